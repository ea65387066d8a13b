"""The logs this replica writes: when which chunk goes out, and what became of it. One timer for all of them.

    engine report ──> attempts ──touch──> ready ──pump: due now──> append in flight ──> acked | refused | tried again
                                            └────────── not yet: the timer of the earliest ──┘

There is no task per reply: an append in flight is a task for as long as it is in flight, at most one per log.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter, Histogram

from services.replica.attempt import Attempt, Command
from services.replica.pace import ChunkPace
from shared import clock
from shared.errors import BusClosedError, BusError, WrongLastSequenceError
from shared.limits import APPEND_RETRY_S
from shared.log_store import LogStore
from shared.messages import Chunk, End, Open, SequencedEntry
from shared.telemetry import TOKEN_BUCKETS_S, Metrics
from shared.token_log import Append

HEADER_SAMPLED_AT = "Chorus-Sampled-At"  # "<first>,<last>": when the chunk's tokens were sampled, for benches

Perform = Callable[[Attempt, list[Command]], None]
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Writers:
    """`perform` gets what an attempt decides when its log moves; `spawn` starts a guarded task; `writing` says how many
    logs are being written.
    """

    def __init__(
        self, store: LogStore, metrics: Metrics, *, perform: Perform, spawn: Spawn, writing: Callable[[], int]
    ) -> None:
        self._store, self._perform, self._spawn, self._writing = store, perform, spawn, writing
        self._pace = ChunkPace()
        self._ready: dict[Attempt, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._count = _Counts(metrics)

    def touch(self, attempt: Attempt) -> None:
        """It may have something to append."""
        self._ready[attempt] = None

    def pump(self) -> None:
        """Send what is due, and come back when the next is."""
        now = clock.now_s()
        interval = self._pace.interval_s(self._writing())
        earliest = float("inf")
        for attempt in list(self._ready):
            due = attempt.due_at(interval)
            if due is not None and due > now:
                earliest = min(earliest, due)
                continue
            del self._ready[attempt]
            append = attempt.next_append(now) if due is not None else None
            if append is not None:
                self._spawn(self._append(attempt, append))
        self._set_timer(earliest - now)

    def close(self) -> None:
        """No more timers."""
        self._set_timer(float("inf"))

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(seconds, self.pump)

    async def _append(self, attempt: Attempt, append: Append) -> None:
        """One append until its outcome is known, then the next one when it is due already."""
        commands = await self._until_known(attempt, append)
        self._perform(attempt, commands)
        self.touch(attempt)
        self.pump()

    async def _until_known(self, attempt: Attempt, append: Append) -> list[Command]:
        headers = {HEADER_SAMPLED_AT: "{:.6f},{:.6f}".format(*attempt.sampled_s)}
        began = clock.now_s()
        while True:
            try:
                seq = await self._store.append(attempt.reply_id, append.expected_seq, append.data, headers=headers)
            except WrongLastSequenceError:
                return await self._refused(attempt)
            except BusClosedError:
                raise
            except BusError as error:
                self._count.retries.labels(type(error).__name__).inc()
                await asyncio.sleep(APPEND_RETRY_S)
                append = attempt.writer.unknown()
            else:
                seconds = clock.now_s() - began
                self._pace.measured(seconds)
                self._count.append_s.observe(seconds)
                if isinstance(append.entry, Chunk):
                    self._count.chunk_tokens.observe(append.entry.count)
                return attempt.acked(seq)

    async def _refused(self, attempt: Attempt) -> list[Command]:
        """Another entry stands last: read which one, until that is certain."""
        while True:
            try:
                standing = await self._store.last(attempt.reply_id)
            except BusClosedError:
                raise
            except BusError:
                await asyncio.sleep(APPEND_RETRY_S)
                continue
            sent = attempt.writer.in_flight
            commands = attempt.append_refused(standing)
            if attempt.writer.in_flight is not None:
                await asyncio.sleep(APPEND_RETRY_S)  # a copy that lags
                continue
            if standing is None or sent is None or standing.entry != sent.entry:
                self._count.refused.labels(_kind(standing)).inc()
            return commands

    @property
    def append_s(self) -> float:
        """What an append takes, smoothed."""
        return self._pace.append_s


class _Counts:
    def __init__(self, metrics: Metrics) -> None:
        self.append_s: Histogram = metrics.histogram(
            "replica_append_seconds", "an append sent -> acked, retries included", buckets=TOKEN_BUCKETS_S
        )
        self.chunk_tokens: Histogram = metrics.histogram(
            "replica_chunk_tokens", "tokens in an appended chunk", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
        )
        self.refused: Counter = metrics.counter(
            "replica_appends_refused_total", "appends that found another entry in their place", ("standing",)
        )
        self.retries: Counter = metrics.counter(
            "replica_appends_retried_total", "appends tried again, byte-identical", ("error",)
        )


def _kind(standing: SequencedEntry | None) -> str:
    if standing is None:
        return "nothing"
    if isinstance(standing.entry, End):
        return "end"
    return "open" if isinstance(standing.entry, Open) else "other"
