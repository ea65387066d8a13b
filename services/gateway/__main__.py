"""Composition root of the gateway."""

from contextlib import AsyncExitStack

from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from shared.bus.nats import connect
from shared.catalog import parse_catalog
from shared.errors import ConfigError
from shared.service import HealthDoors, main, serve
from shared.settings import from_environment
from shared.telemetry import Metrics, configure_logging


async def run() -> None:
    settings = from_environment(GatewaySettings)
    log = configure_logging("gateway", settings.name)
    try:
        catalog = parse_catalog(settings.catalog.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the model catalog {settings.catalog}: {error.strerror}") from error

    async def make(stack: AsyncExitStack) -> tuple[GatewayService, HealthDoors]:
        bus = await connect(
            settings.nats_url,
            user=settings.nats_user or None,
            password=settings.nats_password.reveal() or None,
            name=settings.name,
            inbox_prefix="_INBOX_gateway",
        )
        stack.push_async_callback(bus.close)
        service = GatewayService(settings, catalog, bus, Metrics(), log)
        log.info("listening", host=settings.http_host, port=await service.listen(stack))
        return service, service.health

    await serve(make, log)


if __name__ == "__main__":
    main(run)
