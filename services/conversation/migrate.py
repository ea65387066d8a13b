"""`python -m services.conversation.migrate`: bring the database to this version. Idempotent, one at a time."""

from contextlib import AsyncExitStack
from pathlib import Path

from services.conversation.settings import ConversationSettings
from shared.service import main
from shared.settings import from_environment
from shared.storage import Pool, borrow, migrate, open_pool
from shared.telemetry import configure_logging

COMPONENT = "conversation"
MIGRATIONS = Path(__file__).parent / "migrations"


async def apply(pool: Pool) -> list[str]:
    """Names of the migrations applied now; raises ConfigError, or one of storage's UNAVAILABLE_ERRORS."""
    async with borrow(pool) as conn:
        return await migrate(conn, COMPONENT, MIGRATIONS)


async def _run() -> None:
    settings = from_environment(ConversationSettings)
    log = configure_logging(COMPONENT, settings.name)
    async with AsyncExitStack() as stack:
        pool = await open_pool(settings.postgres_url.reveal(), name=settings.name, stack=stack)
        log.info("migrated", applied=await apply(pool))


if __name__ == "__main__":
    main(_run)
