"""Clients that say or take things slowly, half, or not at all: each is cut in time, and nobody else waits for them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from services.gateway import app, doors
from services.gateway.app import Draining, listen, make_app
from shared.limits import BODY_BYTES_MAX
from shared.service import HealthDoors
from shared.telemetry import Metrics, configure_logging
from tests.service.gateway_world import KEY, World, end, eventually, opened

HEAD_S = 0.3
BODY_S = 0.3
ANSWER_S = 10.0  # for an answer that waits for nothing
BYTE_S = 0.01  # between two bytes of a slow client: never long enough to look like silence
HEAD = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 900\r\n\r\n".encode()
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Any]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(app, "HEAD_READ_S", HEAD_S)
    monkeypatch.setattr(app, "LINGER_S", 0.1)
    monkeypatch.setattr(doors, "BODY_READ_S", BODY_S)
    async with World().running() as running:
        yield running


@pytest.fixture
async def connect(world: World) -> AsyncIterator[Connect]:
    """Opens connections to the gateway that are closed with the test."""
    writers: list[asyncio.StreamWriter] = []

    async def opened_one() -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]))
        writers.append(writer)
        return reader, writer

    yield opened_one
    for writer in writers:
        writer.close()


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One byte at a time, for as long as somebody listens."""
    for at in range(len(data)):
        if writer.is_closing():
            return
        writer.write(data[at : at + 1])
        await asyncio.sleep(BYTE_S)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What is still said until the gateway closes."""
    said = b""
    async with asyncio.timeout(10):
        try:
            while data := await reader.read(65_536):
                said += data
        except ConnectionError:
            pass
    return said


def is_408(said: bytes) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"x-request-id: req_" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "request_timeout"
    assert " s." in error["message"]


async def test_a_head_that_comes_byte_by_byte_is_a_408(connect: Connect) -> None:
    """However busily it trickles: the whole head has to be there in time. The answer says so, and the connection ends."""
    reader, writer = await connect()
    dripping = asyncio.create_task(drip(writer, b"GET /v1/models HTTP/1.1\r\nX-Long: " + b"x" * 1000))
    is_408(await rest(reader))
    dripping.cancel()


async def test_the_second_request_of_a_connection_is_held_to_it_too(connect: Connect) -> None:
    """A connection that was in order once may rest, but a head that begins must end."""
    reader, writer = await connect()
    for _ in range(2):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b'{"status": "ok"}')).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2 * HEAD_S)  # a rest is no offence
    writer.write(b"GET /healthz HT")
    is_408(await rest(reader))


async def test_a_connection_that_says_nothing_is_closed_without_a_word(connect: Connect) -> None:
    """Browsers connect ahead; an answer to nothing would be taken for the answer to what they ask next."""
    reader, _ = await connect()
    assert await rest(reader) == b""


async def test_a_connection_that_rests_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests it may rest for a stated time."""
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.2)
    async with World().running() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("how", ["byte by byte", "half", "not at all"])
async def test_a_body_that_does_not_come_in_time_is_a_408(world: World, connect: Connect, how: str) -> None:
    """The body has one deadline as a whole; nothing of it reaches conversation, and the connection ends."""
    reader, writer = await connect()
    writer.write(HEAD)
    body = b'{"input": "' + b"x" * 880
    dripping = asyncio.create_task(drip(writer, body if how == "byte by byte" else b""))
    if how == "half":
        writer.write(body)
    is_408(await rest(reader))
    dripping.cancel()
    assert world.sends == []


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
@pytest.mark.parametrize(("key", "status"), [(KEY, 413), ("sk-chorus-nobody", 401)])
async def test_a_body_that_is_announced_too_large_is_not_waited_for(
    world: World, connect: Connect, monkeypatch: pytest.MonkeyPatch, expect: str, key: str, status: int
) -> None:
    """Key and length are looked at before the client is told to go on."""
    monkeypatch.setattr(doors, "BODY_READ_S", 10 * ANSWER_S)
    reader, writer = await connect()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{expect}"
    writer.write(f"{head}Content-Length: {BODY_BYTES_MAX + 1}\r\n\r\n".encode())
    async with asyncio.timeout(ANSWER_S):
        said = await reader.readuntil(b"\r\n\r\n")
    assert said.startswith(f"HTTP/1.1 {status} ".encode())
    assert world.sends == []


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(connect: Connect) -> None:
    """`Expect: 100-continue` is answered once the body is wanted; what else is expected is not known and ignored."""
    reader, writer = await connect()
    body = b'{"input": "hi"}'
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    reader, writer = await connect()
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nExpect: 999\r\n\r\n".encode())
    said = await reader.readuntil(b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"x-request-id: req_" in said


async def test_a_line_that_makes_no_sense_is_not_repeated(connect: Connect) -> None:
    """It may hold a key, and answers are written down in many places."""
    reader, writer = await connect()
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\0\r\n\r\n".encode())
    said = await rest(reader)
    assert b" 400 " in said.partition(b"\r\n")[0]
    assert KEY.encode() not in said
    assert b"x-request-id: req_" in said


async def test_a_reply_may_take_longer_than_its_request(world: World) -> None:
    """The deadlines are for what a client says: a stream that runs past all of them, and the next request, are whole."""

    async def slowly(log: Any, _: Any) -> None:
        await asyncio.sleep(3 * max(HEAD_S, BODY_S))
        log.append(opened(), end())

    world.script = slowly
    async with aiohttp.ClientSession(
        world.url, headers={"Authorization": f"Bearer {KEY}"}, connector=aiohttp.TCPConnector(limit=1)
    ) as http:
        for body in ({"input": "hi", "stream": True}, {"input": "hi"}):
            async with http.post("/v1/responses", json=body) as answer:
                assert answer.status == 200
                assert b"completed" in await answer.read()


async def test_half_open_connections_cost_nobody_else_anything(world: World, connect: Connect) -> None:
    """While hundreds stand half open, requests are answered; then all of them are gone."""
    half = [await connect() for _ in range(300)]
    for at, (_, writer) in enumerate(half):
        writer.write((b"", b"GET /v1/mod", HEAD, HEAD + b'{"input": "')[at % 4])
    async with world.client() as http, http.post("/v1/responses", json={"input": "hi"}) as answer:
        assert answer.status == 200
    said = await asyncio.gather(*(rest(reader) for reader, _ in half))
    assert sum(one == b"" for one in said) >= 75  # and whoever was silent for too long before its turn came
    for one in said:
        if one:
            is_408(one)
    assert len(world.sends) == 1


async def test_a_client_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An answer that nobody reads holds its connection and its handler for a stated time, then both are free."""
    monkeypatch.setattr(app, "WRITE_STUCK_S", 0.2)
    ended: list[str] = []

    class Much:
        def add_to(self, application: web.Application) -> None:
            application.router.add_get("/much", self.much)

        async def much(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            try:
                await response.prepare(request)
                while True:
                    await response.write(bytes(1 << 20))
            finally:
                ended.append("free")

    log = configure_logging("gateway", "gateway-1", "error")
    health = HealthDoors(cast("Any", None), Metrics())
    async with AsyncExitStack() as stack:
        port = await listen(stack, make_app([Much()], health, tmp_path, Draining(), log), "127.0.0.1", 0)
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: ended, "the handler has ended")
        deaf.close()
