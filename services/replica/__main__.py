"""Composition root of a replica."""

from contextlib import AsyncExitStack

from aiohttp import web

from services.replica.engine_process import EngineHandle
from services.replica.service import ReplicaService
from services.replica.settings import ReplicaSettings
from shared.bus.nats import connect
from shared.service import HealthDoors, listen, main, serve
from shared.settings import from_environment
from shared.telemetry import Metrics, configure_logging


async def run() -> None:
    settings = from_environment(ReplicaSettings)
    log, metrics, app = configure_logging("replica", settings.name), Metrics(), web.Application()

    async def make(stack: AsyncExitStack) -> tuple[ReplicaService, HealthDoors]:
        bus = await connect(
            settings.nats_url,
            user=settings.nats_user or None,
            password=settings.nats_password.reveal() or None,
            name=settings.name,
            inbox_prefix="_INBOX_replica",
        )
        stack.push_async_callback(bus.close)
        service = ReplicaService(settings, bus, EngineHandle(), metrics, log)
        stack.push_async_callback(service.close)
        doors = HealthDoors(service, metrics)
        doors.add_to(app)
        service.http = f"http://{settings.http_host}:{await listen(stack, app, settings.http_host, settings.http_port)}"
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
