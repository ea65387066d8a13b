"""A client on the raw wire: one connection per question, nothing between it and the bytes.

It knows HTTP/1.1 and server-sent events only as far as it must, so that what it hears is what was sent.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

CONNECT_S = 3.0
SILENCE_S = 25.0  # more than two pings are missing
_encode = msgspec.json.Encoder().encode


class CutError(Exception):
    """The connection broke, or was never there."""


class Event(msgspec.Struct):
    """What a client looks at in an event."""

    type: str
    sequence_number: int
    delta: str = ""
    token_ids: tuple[int, ...] = ()
    response: dict[str, Any] | None = None


_event = msgspec.json.Decoder(Event)


@dataclass
class Answer:
    """A status, headers in lower case, and the body as it comes."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    pings: int = field(default=0)

    async def body(self) -> bytes:
        return b"".join([part async for part in self._parts()])

    async def json(self) -> Any:
        return msgspec.json.decode(await self.body())

    async def events(self) -> AsyncIterator[Event]:
        """Each event once it is whole. Raises CutError when the stream breaks; ends when the server ends it."""
        rest = b""
        async for part in self._parts():
            *blocks, rest = (rest + part).split(b"\n\n")
            for block in blocks:
                event = self._read(block)
                if event is not None:
                    yield event

    def _read(self, block: bytes) -> Event | None:
        fields: dict[bytes, bytes] = {}
        for line in block.split(b"\n"):
            if line.startswith(b":"):
                self.pings += 1
            elif line:
                name, _, value = line.partition(b": ")
                assert name not in fields, f"two {name!r} lines in one event"
                fields[name] = value
        if b"data" not in fields:
            return None
        event = _event.decode(fields[b"data"])
        assert fields[b"event"].decode() == event.type
        assert int(fields[b"id"]) == event.sequence_number
        return event

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int(await self._line(), 16):
                    yield (await self._within(self._reader.readexactly(size + 2)))[:-2]
            elif length := int(self.headers.get("content-length", "0")):
                yield await self._within(self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise CutError(f"{type(error).__name__}: {error}") from None

    async def _line(self) -> bytes:
        return await self._within(self._reader.readuntil(b"\r\n"))

    @staticmethod
    async def _within(reading: Any) -> Any:
        async with asyncio.timeout(SILENCE_S):
            return await reading

    def close(self) -> None:
        self._writer.transport.abort()


async def ask(
    url: str, method: str, path: str, key: str, body: object = None, headers: dict[str, str] | None = None
) -> Answer:
    """Ask a gateway; returns when the head of its answer is here. Raises CutError."""
    place, data = urlsplit(url), b"" if body is None else _encode(body)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {place.netloc}", f"Authorization: Bearer {key}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if data:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
    except (OSError, TimeoutError) as error:
        raise CutError(f"no connection: {error}") from None
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        async with asyncio.timeout(SILENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        writer.transport.abort()
        raise CutError(f"{type(error).__name__}: {error}") from None
    except BaseException:
        writer.transport.abort()
        raise
    named = dict(line.split(": ", 1) for line in head[1:] if line)
    return Answer(int(head[0].split()[1]), {name.lower(): value for name, value in named.items()}, reader, writer)
