"""`python -m services.conversation`."""

from contextlib import AsyncExitStack

from aiohttp import web

from services.conversation.composition import compose, read_catalog
from services.conversation.service import ConversationService
from services.conversation.settings import ConversationSettings
from shared.bus.nats import connect
from shared.service import HealthDoors, listen, main, serve
from shared.settings import from_environment
from shared.storage import open_pool
from shared.telemetry import Metrics, configure_logging


async def run() -> None:
    settings = from_environment(ConversationSettings)
    catalog = read_catalog(settings.catalog)
    log, metrics = configure_logging("conversation", settings.name), Metrics()

    async def make(stack: AsyncExitStack) -> tuple[ConversationService, HealthDoors]:
        user, password = settings.nats_user or None, settings.nats_password.reveal() or None
        inbox = f"_INBOX_{user}" if user else "_INBOX"
        bus = await connect(settings.nats_url, user=user, password=password, name=settings.name, inbox_prefix=inbox)
        stack.push_async_callback(bus.close)
        address = settings.postgres_url.reveal()
        pool = await open_pool(address, name=settings.name, stack=stack, size_max=settings.postgres_pool)
        service = compose(settings, catalog, bus=bus, pool=pool, metrics=metrics, log=log)
        doors, app = HealthDoors(service, metrics), web.Application()
        doors.add_to(app)
        log.info("listening", port=await listen(stack, app, settings.http_host, settings.http_port))
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
