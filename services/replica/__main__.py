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
    log = configure_logging("replica", settings.name)

    async def make(stack: AsyncExitStack) -> tuple[ReplicaService, HealthDoors]:
        bus = await connect(
            settings.nats_url,
            user=settings.nats_user or None,
            password=settings.nats_password.reveal() or None,
            name=settings.name,
            inbox_prefix="_INBOX_replica",
        )
        stack.push_async_callback(bus.close)
        metrics, engine, app = Metrics(), EngineHandle(), web.Application()
        stack.push_async_callback(engine.stop)
        service = ReplicaService(settings, bus, engine, metrics, log)
        doors = HealthDoors(service, metrics)
        doors.add_to(app)
        port = await listen(stack, app, settings.http_host, settings.http_port)
        service.http = f"http://{settings.http_host}:{port}"
        log.info("listening", host=settings.http_host, port=port)
        return service, doors

    await serve(make, log)


if __name__ == "__main__":
    main(run)
