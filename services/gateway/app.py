"""The HTTP application: request ids, errors in OpenAI's shape, the page, and the socket it is served on."""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.typedefs import Middleware
from multidict import CIMultiDict, CIMultiDictProxy

from services.gateway.doors import REQUEST_NAME
from services.gateway.http import (
    REQUEST_ID,
    Problem,
    ProblemError,
    headers_too_large,
    problem_of,
    problem_of_status,
    unavailable,
)
from services.gateway.page import add_page
from shared import clock
from shared.errors import BusError, ConfigError, RefusedError
from shared.limits import (
    BODY_BYTES_MAX,
    CONNECTIONS_MAX,
    HEAD_READ_S,
    HEADER_BYTES_MAX,
    KEEP_ALIVE_S,
    LINGER_S,
    WRITE_STUCK_S,
)
from shared.service import HealthDoors
from shared.telemetry import Log

_SENTENCES = {
    400: "This is not a request that can be read as HTTP/1.1.",
    404: "There is nothing at this address.",
    405: "This address does not take that method.",
    408: f"The request was not said to its end within {HEAD_READ_S:g} s.",
    413: f"The body is larger than {BODY_BYTES_MAX} bytes.",
    431: f"The headers are larger than {HEADER_BYTES_MAX} bytes.",
}
_RAW_408 = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"x-request-id: req_%b\r\n\r\n%b"
)
_OTHER_FILES = 128  # descriptors that are no client's
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_json = msgspec.json.Encoder().encode


class _Doors(Protocol):
    def add_to(self, app: web.Application) -> None: ...


class Draining:
    """Whether this gateway still takes new requests."""

    def __init__(self) -> None:
        self.on = False


def make_app(
    doors: Iterable[_Doors], health: HealthDoors, web_dir: Path, draining: Draining, log: Log
) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_envelope(draining, log)])
    health.add_to(app)
    for each in doors:
        each.add_to(app)
    app.on_response_prepare.append(_harden)
    if (web_dir / "index.html").is_file():
        add_page(app, web_dir)
    return app


def _envelope(draining: Draining, log: Log) -> Middleware:
    """What is around every handler: an id for the request, and one shape for whatever goes wrong."""

    @web.middleware
    async def envelope(request: web.Request, handler: _Handler) -> web.StreamResponse:
        request_id = request[REQUEST_NAME] = f"req_{clock.random_token()}"
        try:
            _let_in(request, draining)
            response = await handler(request)
        except Exception as error:  # noqa: BLE001 - every kind has its answer; what has none is logged, a 500
            response = _answer_to(error, log.bind(request_id=request_id, path=request.path))
        finally:
            if isinstance(request.protocol, _Protocol):
                request.protocol.answered()
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id
            if draining.on:
                response.force_close()  # the next request of this client goes elsewhere
        return response

    return envelope


def _let_in(request: web.Request, draining: Draining) -> None:
    """Bounds that hold for every address; raises what is said instead."""
    if isinstance(request.protocol, _Protocol):
        request.protocol.heard()
    if headers_too_large(request.raw_headers):
        raise ProblemError(problem_of_status(431, _SENTENCES[431]))
    if draining.on and request.path.startswith("/v1/"):
        raise unavailable("This gateway is shutting down: ask another.")


def _answer_to(error: Exception, log: Log) -> web.Response:
    if isinstance(error, web.HTTPException):
        return _shaped(error)
    if isinstance(error, ProblemError):
        return _problem(error.problem)
    if isinstance(error, RefusedError):
        return _problem(problem_of(error.refusal))
    if isinstance(error, BusError):
        log.warning("bus_failed", error=str(error))
        return _problem(problem_of_status(503, "A part that is needed does not answer. Try again in a moment."))
    log.error("request_failed", exc_info=error)
    return _problem(problem_of_status(500, "Something went wrong on our side."))


def _problem(problem: Problem) -> web.Response:
    headers = {"Content-Type": "application/json", **problem.headers}
    return web.Response(body=_json(problem.body), status=problem.status, headers=headers)


def _shaped(error: web.HTTPException) -> web.Response:
    """What aiohttp itself says no to."""
    if error.status < 400:
        raise error
    response = _problem(problem_of_status(error.status, _SENTENCES.get(error.status, error.reason)))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def _harden(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "chorus"


class _Connections:
    """How many connections stand, and how many may."""

    def __init__(self, most: int) -> None:
        self.count, self.most = 0, most


def _room_for_connections() -> int:
    """How many connections this process may hold: CONNECTIONS_MAX, as far as the system gives it file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + _OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(CONNECTIONS_MAX, soft - _OTHER_FILES)


class _Protocol(web.RequestHandler):
    """One connection: counted, not waited for without an end, and answered in one shape even when it makes no sense.

    made ──nothing said──> closed        ┌──────────── KEEP_ALIVE_S ──> closed
      └─first byte─> head ──heard──> asked ──answered──> idle ──first byte─> head
                      └ HEAD_READ_S ─> 408   └ full buffer for WRITE_STUCK_S ─> dropped
    """

    def __init__(self, manager: web.Server, connections: _Connections, **options: Any) -> None:
        super().__init__(manager, **options)
        self._connections = connections
        self._asked = False  # a request is being answered
        self._begun = False  # and if not: something was said
        self._patience: asyncio.TimerHandle | None = None  # with its head
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.count += 1
        if self._connections.count > self._connections.most:
            self.force_close()
        else:
            self._be_patient()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.count -= 1
        for timer in (self._patience, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._asked:
            self._begun = True
            if self._patience is None:
                self._be_patient()
        super().data_received(data)

    def heard(self) -> None:
        """A request's head is here."""
        self._asked = True
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def answered(self) -> None:
        """What comes from now on is the next request."""
        self._asked = self._begun = False

    def _be_patient(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(HEAD_READ_S, self._give_up)

    def _give_up(self) -> None:
        """Silence is closed without a word: browsers connect ahead, and would take one for the answer to come."""
        self._patience = None
        if self._begun and self.transport is not None:
            problem = problem_of_status(408, _SENTENCES[408])
            self.transport.write(_RAW_408 % (clock.random_token().encode(), _json(problem.body)))
        self.force_close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = asyncio.get_running_loop().call_later(WRITE_STUCK_S, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - quotes the line it stumbled over, which may hold a key
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        if isinstance(exc, LineTooLong):
            status = 431
        if status >= 500:
            self.log_exception("outside the application", exc_info=exc)
        response = _problem(problem_of_status(status, _SENTENCES.get(status, "Something went wrong on our side.")))
        response.headers["Server"] = "chorus"
        response.headers[REQUEST_ID] = f"req_{clock.random_token()}"
        response.force_close()
        return response


def _without_expectations(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Left alone, aiohttp answers `Expect` before any door has looked at key and length. The doors do it."""

    def made(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        if "Expect" in message.headers:
            headers = CIMultiDict(message.headers)
            headers.popall("Expect")
            message = message._replace(headers=CIMultiDictProxy(headers))
        return make(message, *rest)

    return made


async def listen(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> int:
    """Serve `app` until the stack closes; returns the bound port (for port 0). Raises ConfigError when taken."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    manager = runner.server
    assert manager is not None, "set up above"
    manager.request_factory = _without_expectations(manager.request_factory)

    bounds: dict[str, Any] = {
        "access_log": None,  # one `stream_closed` line says more
        "max_line_size": HEADER_BYTES_MAX,
        "max_field_size": HEADER_BYTES_MAX,
        "keepalive_timeout": KEEP_ALIVE_S,
        "lingering_time": LINGER_S,
        "auto_decompress": False,  # a body that is not plain is refused as it is
    }

    connections = _Connections(_room_for_connections())

    def protocol() -> _Protocol:
        return _Protocol(manager, connections, loop=loop, **bounds)

    try:
        server = await loop.create_server(protocol, host, port, backlog=1024, reuse_address=True)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another port.") from error
    stack.callback(server.close)
    return int(server.sockets[0].getsockname()[1])
