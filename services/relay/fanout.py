"""One follower per reply, whatever the number of its streams: a subscription, a catch-up, and a task that hands on.

A follower subscribes to its own reply only (`live.<k>.<reply>`), not to a whole shard. A subscription costs the
server a few hundred bytes and this process one small task; a shard-wide one would bring every relay every entry of
the region, so that adding relays would add no capacity. Entries that are ready together are handed on together.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from shared import clock
from shared.errors import BusError, LogGoneError, TokenLogError
from shared.limits import CATCH_UP_BATCH, CATCH_UPS_MAX, LOG_LOOK_S
from shared.log_store import LogFollower, LogStore
from shared.messages import SequencedEntry
from shared.telemetry import Log, Metrics


class Listener(Protocol):
    """Who hears what the followed logs say; none of these waits."""

    def news(self, reply_id: str, items: Sequence[SequencedEntry]) -> None: ...

    def absent(self, reply_id: str) -> None:
        """A first look found no log."""

    def unreadable(self, reply_id: str) -> None:
        """The log could not be read; somebody else may have more luck."""

    def gone(self, reply_id: str) -> None:
        """The log, or its head, is no longer there."""


class Fanout:
    """The followers of this relay; each ends with its reply's `end`, with `leave`, or by saying why it cannot go on."""

    def __init__(self, store: LogStore, listener: Listener, metrics: Metrics, log: Log) -> None:
        self._store, self._listener, self._log = store, listener, log
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looks = asyncio.Semaphore(CATCH_UPS_MAX)
        self._catch_up = metrics.histogram(
            "relay_catch_up_seconds", "a reply is asked for -> the first entries of its log are here"
        )

    def __len__(self) -> int:
        """Followers whose reply has not ended."""
        return len(self._tasks)

    def follow(self, reply_id: str, start: Callable[..., asyncio.Task[None]]) -> None:
        """Follow `reply_id` in a task made by `start` (a TaskGroup's create_task)."""
        task = start(self._run(reply_id), name=f"follow.{reply_id}")
        self._tasks[reply_id] = task
        task.add_done_callback(lambda done: self._forget(reply_id, done))

    def leave(self, reply_id: str) -> None:
        task = self._tasks.pop(reply_id, None)
        if task is not None:
            task.cancel()

    def _forget(self, reply_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(reply_id) is task:
            del self._tasks[reply_id]

    async def _run(self, reply_id: str) -> None:
        try:
            await self._follow(reply_id)
        except (LogGoneError, TokenLogError) as error:
            self._log.warning("log_unusable", reply_id=reply_id, error=str(error))
            self._listener.gone(reply_id)
        except BusError as error:
            self._log.warning("log_unreadable", reply_id=reply_id, error=str(error))
            self._listener.unreadable(reply_id)

    async def _follow(self, reply_id: str) -> None:
        async with self._store.follow(reply_id) as entries:
            async with self._looks:
                first = await self._first(reply_id, entries)
            if first is None:
                return
            self._listener.news(reply_id, [first, *entries.take_ready(CATCH_UP_BATCH)])
            async for item in entries:
                self._listener.news(reply_id, [item, *entries.take_ready(CATCH_UP_BATCH)])

    async def _first(self, reply_id: str, entries: LogFollower) -> SequencedEntry | None:
        """The first entry; None, and the listener told why, when a short look finds none."""
        asked_s = clock.now_s()
        try:
            async with asyncio.timeout(LOG_LOOK_S):
                first = await anext(entries)
        except TimeoutError:
            if await self._store.last(reply_id) is None:
                self._listener.absent(reply_id)
            else:
                self._listener.unreadable(reply_id)
            return None
        self._catch_up.observe(clock.now_s() - asked_s)
        return first
