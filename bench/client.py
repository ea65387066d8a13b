"""A lean streaming client: it shares the machine with what it measures, so it parses no more than it must.

One connection per stream, closed by the server's end. Per event it keeps the arrival time and, where events carry
them, the number of the last token in it.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_EVENT = re.compile(rb"(?:id: (\d+)\n)?(?:event: ([a-z_.]+)\n)?data: ([^\n]*)\n")
_TEXT = re.compile(rb'"(?:content|text)": ?"')
_USAGE = re.compile(rb'"(?:output_tokens|completion_tokens)": ?(\d+)')
_REPLY = re.compile(rb'"id": ?"(resp_[A-Za-z0-9]+)"')
STREAM_TIMEOUT_S = 300.0


@dataclass
class Stream:
    """What one reply looked like from outside. Times are `time.time()` seconds."""

    started_s: float = 0.0
    status: int = 0
    reply_id: str = ""
    events: int = 0
    deltas: list[tuple[float, int]] = field(default_factory=list)  # (arrival, event number or -1)
    tokens: int = 0
    ended_s: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.deltas[0][0] - self.started_s if self.deltas else float("inf")


async def stream(url: str, path: str, key: str, body: dict[str, object], headers: str = "") -> Stream:
    """POST `body`, read its event stream to the end."""
    seen = Stream()
    try:
        await asyncio.wait_for(_read(url, path, key, body, headers, seen), STREAM_TIMEOUT_S)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.ended_s = time.time()
    return seen


async def _read(url: str, path: str, key: str, body: dict[str, object], headers: str, seen: Stream) -> None:
    place = urlsplit(url)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    seen.started_s = time.time()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {key}\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        + data
    )
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.status = int(head.split(b" ", 2)[1])
        rest = b""
        while part := await reader.read(65536):
            rest = _events(rest + part, time.time(), seen)
        if seen.status != 200:
            seen.error = rest.decode(errors="replace")[:300]
    finally:
        writer.close()


def _events(data: bytes, now: float, seen: Stream) -> bytes:
    """Count the whole events in `data`; returns what is left over."""
    end = 0
    for match in _EVENT.finditer(data):
        end = match.end()
        number, name, payload = match.groups()
        if payload == b"[DONE]":
            continue
        seen.events += 1
        if name == b"response.output_text.delta" or (name is None and _TEXT.search(payload)):
            seen.deltas.append((now, int(number) if number else -1))
        if not seen.reply_id and (reply := _REPLY.search(payload)):
            seen.reply_id = reply.group(1).decode()
        if (usage := _USAGE.search(payload)) is not None:
            seen.tokens = int(usage.group(1))
    return data[end:]
