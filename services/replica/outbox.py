"""Records that must be stored and need not be waited for: kept in order, appended again until they stand."""

import asyncio
from collections import deque

from shared.bus import Bus
from shared.errors import BusClosedError, BusError
from shared.limits import OUTBOX_MAX, OUTBOX_RETRY_S, REQUEST_TIMEOUT_S
from shared.telemetry import Metrics


class Outbox:
    """Bounded: past OUTBOX_MAX the newest record is dropped and counted. Appends are deduplicated by message id."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._records: deque[tuple[str, bytes, str]] = deque()
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._dropped = metrics.counter("replica_outbox_dropped_total", "usage records dropped: outbox full")

    def put(self, subject: str, data: bytes, message_id: str) -> None:
        if len(self._records) >= OUTBOX_MAX:
            self._dropped.inc()
            return
        self._records.append((subject, data, message_id))
        self._emptied.clear()
        self._wake.set()

    async def run(self) -> None:
        """Store what was put, for as long as the service lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._records:
                subject, data, message_id = self._records[0]
                try:
                    await self._bus.append(subject, data, message_id=message_id, timeout_s=REQUEST_TIMEOUT_S)
                except BusClosedError:
                    raise
                except BusError:
                    await asyncio.sleep(OUTBOX_RETRY_S)
                else:
                    self._records.popleft()
            self._emptied.set()

    async def emptied(self) -> None:
        """Until everything put so far is stored; the caller sets the deadline."""
        await self._emptied.wait()
