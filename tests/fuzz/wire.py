"""Sends fuzzed requests on raw sockets and says what came back."""

import asyncio
import re
from collections import Counter
from urllib.parse import urlsplit

from tests.fuzz.requests import Fuzzer, Request

ANSWER_S = 30.0
PATIENCE_S = 0.3  # for a request that promises more than it sends: then our side is closed
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


async def answer_to(url: str, raw: bytes, *, whole: bool) -> bytes:
    """Everything the server says until it closes. Not `whole`: the client gives up after PATIENCE_S."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        async with asyncio.timeout(ANSWER_S if whole else PATIENCE_S):
            try:
                writer.write(raw)
                await writer.drain()
                return await reader.read()
            except ConnectionError:
                return b""
    except TimeoutError:
        if whole:
            raise AssertionError(f"no end of an answer within {ANSWER_S} s to {raw[:300]!r}") from None
        return b""
    finally:
        writer.close()


async def fuzz(url: str, key: str, fuzzer: Fuzzer, count: int, *, at_once: int = 12) -> tuple[Counter[int], list[str]]:
    """(statuses, what was wrong); status 0 is a connection that ended without an answer."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            request = fuzzer.request()
            said = await answer_to(url, request.encode(key), whole=request.length is None)
            status = int(match[1]) if (match := _STATUS.match(said)) else 0
            statuses[status] += 1
            if (found := fault(request, said, status)) is not None:
                wrong.append(f"{found}: {request.method} {request.path} {request.headers} {request.body[:400]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return statuses, wrong


def fault(request: Request, said: bytes, status: int) -> str | None:
    """What is wrong with an answer, if anything."""
    if status >= 500:
        return f"{status} {said[-200:]!r}"
    if b"Traceback" in said:
        return "a traceback"
    if status and b"\r\nx-request-id: req_" not in said:
        return f"{status} without a request id"
    if 400 <= status < 500 and request.method != "HEAD" and b'"error":{"message":' not in said:
        return f"{status} without an error object"
    if status == 0 and request.length is None and said:
        return f"no status line in {said[:80]!r}"
    return None
