"""The life of a service process: start, ready, drain, stop; its health doors; no naked tasks.

main() ── settings, logging, loop
  └─ serve(make)                   AsyncExitStack: bus, stores, HTTP doors; cleanup beside creation
       ├─ service.start()          ready afterwards
       ├─ TaskGroup: service.run() a forever-task that returns is an error
       └─ SIGTERM/SIGINT ── service.drain(DRAIN_S) ── leave; a second signal leaves now
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NoReturn, Protocol

import uvloop
from aiohttp import web

from shared.errors import ConfigError
from shared.limits import DRAIN_S
from shared.telemetry import Log, Metrics


class Service(Protocol):
    """What each services/<name>/service.py offers. Each door is idempotent."""

    async def start(self) -> None:
        """Connect and subscribe; returns when the service can do its work."""
        ...

    async def run(self) -> None:
        """The forever-task: holds the service's one TaskGroup; returns only by cancellation."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new; finish what runs or hand it back, within the deadline."""
        ...

    def ready(self) -> str | None:
        """None when ready, else what is missing, as a sentence."""
        ...


class HealthDoors:
    """`/healthz`, `/readyz` and `/metrics`, added to a service's own HTTP application or served alone."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service, self._metrics = service, metrics
        self.draining = False

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._page)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        missing = "draining" if self.draining else self._service.ready()
        if missing is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "missing": missing}, status=503)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def listen(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> int:
    """Serve `app` until the stack closes; returns the bound port (for port 0). Raises ConfigError when taken."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another port.") from error
    address = runner.addresses[0]
    return int(address[1])


async def serve(
    make: Callable[[AsyncExitStack], Awaitable[tuple[Service, HealthDoors]]], log: Log, drain_s: float = DRAIN_S
) -> None:
    """Build, start, run until a signal, drain, leave. `make` wires the parts and pushes their cleanup."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)  # the second signal: now
        stop.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
    async with AsyncExitStack() as stack:
        service, doors = await make(stack)
        await service.start()
        log.info("service_ready")
        running = asyncio.create_task(service.run(), name="service.run")
        stopped = asyncio.create_task(stop.wait(), name="service.stop")
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            raise RuntimeError("a forever-task returned")
        doors.draining = True
        log.info("service_draining", deadline_s=drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.drain(drain_s), drain_s + 1.0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    log.info("service_stopped")


def main(run: Callable[[], Awaitable[None]]) -> NoReturn:
    """Run a composition root; a ConfigError is one sentence and exit 2."""

    async def body() -> None:
        await run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    except ConfigError as error:
        print(f"cannot start: {error}", file=sys.stderr)  # noqa: T201 - before or without logging
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
