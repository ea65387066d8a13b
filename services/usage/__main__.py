"""`python -m services.usage`."""

from contextlib import AsyncExitStack

from aiohttp import web

from services.usage.service import UsageService
from services.usage.settings import UsageSettings
from services.usage.store import LedgerStore
from shared.bus.nats import connect
from shared.service import HealthDoors, listen, main, serve
from shared.settings import from_environment
from shared.storage import open_pool
from shared.telemetry import Metrics, configure_logging


async def run() -> None:
    settings = from_environment(UsageSettings)
    log, metrics = configure_logging("usage", settings.name), Metrics()

    async def make(stack: AsyncExitStack) -> tuple[UsageService, HealthDoors]:
        user, password = settings.nats_user or None, settings.nats_password.reveal() or None
        inbox = f"_INBOX_{user}" if user else "_INBOX"
        bus = await connect(settings.nats_url, user=user, password=password, name=settings.name, inbox_prefix=inbox)
        stack.push_async_callback(bus.close)
        pool = await open_pool(settings.postgres_url.reveal(), name=settings.name, stack=stack)
        service = UsageService(settings, bus=bus, store=LedgerStore(pool), metrics=metrics, log=log)
        doors, app = HealthDoors(service, metrics), web.Application()
        doors.add_to(app)
        log.info("listening", port=await listen(stack, app, settings.http_host, settings.http_port))
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
