"""Asking a local server whether it is ready: one short conversation over TCP, with a deadline."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

PROBE_S = 2.0

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[str | None]]


async def conversing(host: str, port: int, conversation: Conversation) -> str | None:
    """The conversation's own answer, or why it could not be held."""
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await conversation(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"no answer on {host}:{port} within {PROBE_S:g} s"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return f"no answer on {host}:{port} ({error})"


async def http_ready(host: str, port: int, path: str = "/readyz") -> str | None:
    """None when `path` answers 200, else what it says is missing."""

    async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        status = (await reader.readline()).split()
        if len(status) < 2:
            return "it hung up"
        if status[1] == b"200":
            return None
        head, _, body = (await reader.read(4096)).partition(b"\r\n\r\n")
        return (body or head).decode(errors="replace").strip()

    return await conversing(host, port, get)
