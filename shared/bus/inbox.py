"""The bounded inbox behind every subscription of both adapters: a callback fills it, one loop empties it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from shared.bus import BusMessage
from shared.errors import BusClosedError


class Inbox:
    """Oldest kept: what does not fit is dropped and counted.

    Iteration ends when the subscription is closed, and raises BusClosedError when the bus is gone for good.
    """

    def __init__(self, most: int, leave: Callable[[], Awaitable[None]]) -> None:
        self.dropped = 0
        self._most = most
        self._leave = leave
        self._messages: deque[BusMessage] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._bus_gone = False

    def put(self, message: BusMessage) -> None:
        if self._closed:
            return
        if len(self._messages) >= self._most:
            self.dropped += 1
            return
        self._messages.append(message)
        self._wake.set()

    def bus_gone(self) -> None:
        """The bus is closed: what is here can still be taken, then BusClosedError."""
        self._bus_gone = True
        self._wake.set()

    def __aiter__(self) -> "Inbox":
        return self

    async def __anext__(self) -> BusMessage:
        await self._ready()
        if self._messages:
            return self._messages.popleft()
        raise StopAsyncIteration

    async def next(self, timeout_s: float) -> BusMessage | None:
        if not self._messages:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready()
            except TimeoutError:
                return None
        return self._messages.popleft() if self._messages else None

    def take_ready(self, most: int) -> list[BusMessage]:
        return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake.set()
            await self._leave()

    async def _ready(self) -> None:
        """Until there is a message, or none can come any more."""
        while not self._messages and not self._closed:
            if self._bus_gone:
                raise BusClosedError("the bus is closed")
            self._wake.clear()
            await self._wake.wait()
