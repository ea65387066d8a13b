"""The logs this replica writes: when which chunk goes out, and what became of it. One timer for all of them.

    engine report ──> attempts ──touch──> pump ──due now──> append in flight ──> acked | refused | tried again
                                           │  ^                    │
                             not yet due   v  │ timer              └── the next one of the same log
                                        waiting

There is no task per reply: an append in flight is a task for as long as it is in flight, at most one per log.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client import Counter, Histogram

from services.replica.attempt import Attempt, Command
from services.replica.pace import ChunkPace, goes_by, wakes_at
from shared import clock
from shared.errors import BusClosedError, BusError, WrongLastSequenceError
from shared.limits import APPEND_RETRY_S
from shared.log_store import LogStore
from shared.messages import Chunk, End, Open, SequencedEntry
from shared.telemetry import TOKEN_BUCKETS_S, Metrics
from shared.token_log import Append

HEADER_SAMPLED_AT = "Chorus-Sampled-At"  # "<first>,<last>": when the chunk's tokens were sampled, for benches

_NEVER = float("inf")

Perform = Callable[[Attempt, list[Command]], None]
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Writers:
    """`perform` gets what an attempt decides when its log moves; `spawn` starts a guarded task; `writing` says how many
    logs are being written, with `appends_per_s_max` for all of them.
    """

    def __init__(
        self,
        store: LogStore,
        metrics: Metrics,
        *,
        perform: Perform,
        spawn: Spawn,
        writing: Callable[[], int],
        appends_per_s_max: int,
    ) -> None:
        self._store, self._perform, self._spawn, self._writing = store, perform, spawn, writing
        self._pace = ChunkPace(appends_per_s_max)
        self._touched: dict[Attempt, None] = {}
        self._waiting: dict[Attempt, None] = {}  # something to append, not yet due
        self._step_s = 0.0  # of the last step
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER
        self._count = _Counts(metrics)

    def touch(self, attempt: Attempt) -> None:
        """It may have something to append: looked at by the next `pump`."""
        self._touched[attempt] = None

    def pump(self, step_s: float = 0.0) -> None:
        """Send what is due; a step or a timer comes back for the rest. `step_s`: what the step just over took."""
        touched, self._touched = self._touched, {}
        self._step_s = step_s or self._step_s
        self._send_due(self._waiting | touched)

    def _send_due(self, attempts: Iterable[Attempt]) -> None:
        now = clock.now_s()
        interval = self._pace.interval_s(self._writing())
        dues = {attempt: attempt.due_at(interval) for attempt in attempts}
        going = goes_by((due for due in dues.values() if due is not None), now, interval)
        for attempt, due in dues.items():
            if due is None:
                self._waiting.pop(attempt, None)
            elif due > going:
                self._waiting[attempt] = None
                self._wake_at(wakes_at(due, interval, self._step_s), now)
            else:
                self._waiting.pop(attempt, None)
                append = attempt.next_append(now)
                if append is not None:
                    self._spawn(self._append(attempt, append))

    def _wake_at(self, due: float, now: float) -> None:
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = asyncio.get_running_loop().call_later(due - now, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        self._send_due(list(self._waiting))

    def close(self) -> None:
        """No more timers."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, _NEVER

    async def _append(self, attempt: Attempt, append: Append) -> None:
        """One append until its outcome is known, then the next of this log when it is due already."""
        self._perform(attempt, await self._until_known(attempt, append))
        self._send_due((attempt,))

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
