"""Composition root of a router."""

from contextlib import AsyncExitStack

from aiohttp import web

from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.bus.nats import connect
from shared.service import HealthDoors, listen, main, serve
from shared.settings import from_environment, read_catalog
from shared.telemetry import Metrics, configure_logging


async def run() -> None:
    settings = from_environment(RouterSettings)
    log, metrics, app = configure_logging("router", settings.name), Metrics(), web.Application()

    async def make(stack: AsyncExitStack) -> tuple[RouterService, HealthDoors]:
        bus = await connect(
            settings.nats_url,
            user=settings.nats_user or None,
            password=settings.nats_password.reveal() or None,
            name=settings.name,
            inbox_prefix="_INBOX_router",
        )
        stack.push_async_callback(bus.close)
        service = RouterService(settings, read_catalog(settings.catalog), bus, metrics, log)
        doors = HealthDoors(service, metrics)
        doors.add_to(app)
        port = await listen(stack, app, settings.http_host, settings.http_port)
        log.info("listening", host=settings.http_host, port=port)
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
