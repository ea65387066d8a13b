"""`python -m services.relay`."""

from contextlib import AsyncExitStack

from aiohttp import web

from services.relay.service import RelayService
from services.relay.settings import RelaySettings
from shared.bus.nats import connect
from shared.log_store import LogStore
from shared.service import HealthDoors, listen, main, serve
from shared.settings import from_environment
from shared.subjects import Names
from shared.telemetry import Metrics, configure_logging


async def run() -> None:
    settings = from_environment(RelaySettings)
    log, metrics = configure_logging("relay", settings.name), Metrics()

    async def make(stack: AsyncExitStack) -> tuple[RelayService, HealthDoors]:
        user, password = settings.nats_user or None, settings.nats_password.reveal() or None
        inbox = f"_INBOX_{user}" if user else "_INBOX"
        bus = await connect(settings.nats_url, user=user, password=password, name=settings.name, inbox_prefix=inbox)
        stack.push_async_callback(bus.close)
        service = RelayService(settings, bus, LogStore(bus, Names(settings.region)), metrics, log)
        doors, app = HealthDoors(service, metrics), web.Application()
        doors.add_to(app)
        log.info("listening", port=await listen(stack, app, settings.http_host, settings.http_port))
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
