"""The word that requests are in their lanes, written to the rows in batches behind the users' backs.

A send is answered without waiting for it. A word that is lost costs the outbox one look: queuing again is harmless.
"""

import asyncio
from collections import deque

from services.conversation.store import Store, StoreAwayError
from shared.telemetry import Log

MARKS_MAX = 4096  # not yet written; past it the oldest are left to the outbox
BATCH = 256
RETRY_S = 1.0


class QueuedMarks:
    def __init__(self, store: Store, log: Log) -> None:
        self._store, self._log = store, log
        self._queued: deque[str] = deque(maxlen=MARKS_MAX)
        self._wake = asyncio.Event()

    def note(self, reply_id: str) -> None:
        self._queued.append(reply_id)
        self._wake.set()

    @property
    def pending(self) -> int:
        return len(self._queued)

    async def run(self) -> None:
        """Write what was noted, for as long as the service lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queued:
                await self.flush()

    async def flush(self) -> None:
        """One batch; one that cannot be written now is tried again later."""
        batch = [self._queued.popleft() for _ in range(min(BATCH, len(self._queued)))]
        try:
            await self._store.queued(batch)
        except StoreAwayError as error:
            self._log.warning("marks_wait", count=len(batch), error=str(error))
            self._queued.extendleft(reversed(batch))
            await asyncio.sleep(RETRY_S)
