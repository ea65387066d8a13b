"""A door before a gateway that counts which heartbeats fell within streams, so that a test knows what a client met."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass
class Heard:
    """Of all connections of one client: heartbeats after a stream's first event and before its last."""

    within: int = 0
    address: str = ""


class _Scanner:
    """Lines of one connection's answers. A heartbeat counts once another event has followed it."""

    def __init__(self, heard: Heard) -> None:
        self._heard, self._rest, self._begun, self._waiting = heard, b"", False, 0

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"HTTP/1.1 "):
                self._begun, self._waiting = False, 0
            elif line.startswith(b"data: "):
                self._heard.within += self._waiting
                self._begun, self._waiting = True, 0
            elif line.startswith(b": ping") and self._begun:
                self._waiting += 1


@contextmanager
def recorded(gateway: str) -> Iterator[Heard]:
    """A gateway's address with ears, until the block ends."""
    heard, up = Heard(), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    far = urlsplit(gateway)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, scanner: _Scanner | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if scanner is not None:
                    scanner.feed(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(far.hostname, far.port)
        await asyncio.gather(pump(reader, far_writer, None), pump(far_reader, writer, _Scanner(heard)))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        heard.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        up.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="recorder")
    thread.start()
    try:
        assert up.wait(10), "the recorder listens"
        yield heard
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
