"""A TCP proxy that holds every byte back for a while, so that calls can be cut off in every phase."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def delayed(host: str, port: int, delay_s: float) -> AsyncIterator[int]:
    """The port of a proxy to (host, port) whose both directions are late by `delay_s`."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                await asyncio.sleep(delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, far_writer))
                group.create_task(pump(far_reader, writer))
        except asyncio.CancelledError:
            pass
        finally:
            tasks.discard(task)
            for each in writers:
                each.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports say goodbye
