"""Composition root of the relay."""

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
    log = configure_logging("relay", settings.name)

    async def make(stack: AsyncExitStack) -> tuple[RelayService, HealthDoors]:
        bus = await connect(
            settings.nats_url,
            user=settings.nats_user or None,
            password=settings.nats_password.reveal() or None,
            name=settings.name,
            inbox_prefix="_INBOX_relay",
        )
        stack.push_async_callback(bus.close)
        metrics = Metrics()
        service = RelayService(settings, bus, LogStore(bus, Names(settings.region)), metrics, log)
        doors = HealthDoors(service, metrics)
        app = web.Application()
        doors.add_to(app)
        port = await listen(stack, app, settings.http_host, settings.http_port)
        log.info("listening", host=settings.http_host, port=port)
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
