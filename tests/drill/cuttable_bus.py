"""A way to the bus that can be cut: a TCP proxy that knows each client by the name it connects with.

service ──> proxy ──> nats-server
              ╳ silent: bytes wait, as a network that has gone away lets them, and arrive late when it is back
              ╳ reset:  connections break, and new ones break as soon as the client has said who it is
"""

import asyncio
import contextlib
import re
from enum import StrEnum, unique

_CONNECT = re.compile(rb'^CONNECT \{.*?"name":\s*"([^"]*)"', re.MULTILINE)
_READ_BYTES = 65_536
_POLL_S = 0.01


@unique
class Cut(StrEnum):
    SILENT = "silent"
    RESET = "reset"


class _Client:
    """The way of one connection. Nothing passes while `open` is not set."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.name = ""
        self.open = asyncio.Event()
        self.open.set()
        self._writers = writers

    def cut(self, kind: Cut | None) -> None:
        """`None` heals."""
        match kind:
            case None:
                self.open.set()
            case Cut.SILENT:
                self.open.clear()
            case Cut.RESET:
                for writer in self._writers:
                    writer.transport.abort()


class CuttableBus:
    """All methods belong to the loop on which `start` ran."""

    def __init__(self, host: str, port: int) -> None:
        self._far = host, port
        self._clients: set[_Client] = set()
        self._cut: dict[str, Cut] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """The port that stands for the server's."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Every connection breaks; returns when all of them are gone. A loop that still had some would not close."""
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.cut(None)
            client.cut(Cut.RESET)
        while self._clients:
            await asyncio.sleep(_POLL_S)

    async def cut(self, name: str, kind: Cut) -> int:
        """Every connection of `name`, and those it tries to make. How many there were."""
        self._cut[name] = kind
        return self._tell(name, kind)

    async def heal(self, name: str) -> None:
        self._cut.pop(name, None)
        self._tell(name, None)

    def _tell(self, name: str, kind: Cut | None) -> int:
        theirs = [client for client in self._clients if client.name == name]
        for client in theirs:
            client.cut(kind)
        return len(theirs)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._far)
        client = _Client((writer, far_writer))
        self._clients.add(client)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(client, reader, far_writer, asks=True))
                group.create_task(self._pump(client, far_reader, writer, asks=False))
        finally:
            self._clients.discard(client)
            for each in (writer, far_writer):
                each.close()

    async def _pump(
        self, client: _Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool
    ) -> None:
        """One direction, until its end. An end, too, passes only while the way is open."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                if asks and not client.name and (said := _CONNECT.search(data)):
                    client.name = said[1].decode()
                    client.cut(self._cut.get(client.name))
                await client.open.wait()
                writer.write(data)
                await writer.drain()
        await client.open.wait()
        writer.close()
