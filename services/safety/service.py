"""The safety service: answers checks, and watches replies beside their streams.

    safety.check ──> classifier ──> Verdict                    input before generation, last window before a natural end
    safety.watch ──> one Watch per reply, a bounded number     at each `open`; a reply is watched once here

A watch that is lost with its process is taken up again at the next `open`; the last window is checked by the replica in
any case. On a drain the watches are handed to another instance.
"""

import asyncio
from typing import TypeVar

import msgspec

from services.safety.classifier import Classifier
from services.safety.settings import SafetySettings
from services.safety.verdicts import Passage, Stage
from services.safety.watch import Watch
from shared import clock
from shared.bus import Bus, BusMessage, Subscription
from shared.errors import BusClosedError, BusError, LogGoneError, TokenLogError
from shared.limits import DEADLINE_GRACE_S, REQUEST_DEADLINE_S, SAFETY_WINDOW_CHARS
from shared.log_store import LogStore
from shared.messages import Done, Refused, SafetyCheck, SafetyWatch, Verdict, decoder, encode
from shared.outcomes import Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import TOKEN_BUCKETS_S, Journal, Log, Metrics

_QUEUE = "safety"
_check = decoder(SafetyCheck)
_watch = decoder(SafetyWatch)
T = TypeVar("T")


class SafetyService:
    """See `shared.service.Service` for the doors."""

    def __init__(
        self, settings: SafetySettings, *, bus: Bus, store: LogStore, classifier: Classifier, metrics: Metrics, log: Log
    ) -> None:
        self._name, self._watches_max = settings.name, settings.watches_max
        self._names = Names(settings.region)
        self._bus, self._store, self._classifier, self._log = bus, store, classifier, log
        self._journal = Journal(bus, self._names, "safety", metrics)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._checks_in: Subscription | None = None
        self._watches_in: Subscription | None = None
        self._count = _Counts(metrics)

    # --- the doors --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._checks_in is None:
            self._checks_in = await self._bus.subscribe(self._names.safety_check, queue=_QUEUE)
            self._watches_in = await self._bus.subscribe(self._names.safety_watch, queue=_QUEUE)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._journal.run(), name="safety.journal")
            group.create_task(self._hear_checks(), name="safety.checks")
            group.create_task(self._hear_watches(group), name="safety.watches")

    async def drain(self, deadline_s: float) -> None:
        """Answer what has come, take nothing new, and hand running watches to another instance, if there is one."""
        async with asyncio.timeout(deadline_s):
            for subscription in (self._checks_in, self._watches_in):
                if subscription is not None:
                    await subscription.close()
            for reply_id, task in list(self._watches.items()):
                task.cancel()
                await self._bus.publish(self._names.safety_watch, encode(SafetyWatch(reply_id=reply_id)))

    def ready(self) -> str | None:
        if self._watches_in is None:
            return "not yet subscribed"
        return None if self._bus.connected else "the bus is away"

    # --- checks -----------------------------------------------------------------------------------------------

    async def _hear_checks(self) -> None:
        assert self._checks_in is not None, "start() comes before run()"
        async for message in self._checks_in:
            check = self._decoded(_check, message)
            if check is not None and message.reply:
                await self._answer(message.reply, await self._judge(check))

    async def _judge(self, check: SafetyCheck) -> Verdict:
        """The last window of a longer reply may begin inside a word; see Passage."""
        asked_s = clock.now_s()
        stage = Stage.INPUT if check.stage == Stage.INPUT else Stage.OUTPUT
        opens = stage is Stage.INPUT or len(check.text) < SAFETY_WINDOW_CHARS
        verdict = await self._classifier.judge(Passage(check.text, stage, opens=opens))
        self._count.check_s.labels(stage).observe(clock.now_s() - asked_s)
        self._count.checks.labels(stage, "flagged" if verdict.flagged else "clean").inc()
        if verdict.flagged:
            self._count.flags.labels(stage, verdict.category).inc()
            self._journal.note(
                "safety_flagged", check.reply_id or None, stage=stage, category=verdict.category, rule=verdict.rule
            )
        return verdict

    # --- watches ----------------------------------------------------------------------------------------------

    async def _hear_watches(self, group: asyncio.TaskGroup) -> None:
        assert self._watches_in is not None, "start() comes before run()"
        async for message in self._watches_in:
            request = self._decoded(_watch, message)
            if request is not None:
                answer = self._take(request.reply_id, group)
                if message.reply:
                    await self._answer(message.reply, answer)

    def _take(self, reply_id: str, group: asyncio.TaskGroup) -> Done | Refused:
        """Watch it; one that is watched already is not watched twice."""
        try:
            self._names.live(reply_id)
        except ValueError:
            return _refused(RefusalKind.NOT_FOUND, "There is no such reply here.")
        if reply_id in self._watches:
            return Done()
        if len(self._watches) >= self._watches_max:
            self._count.refused.inc()
            self._journal.note("safety_watch_refused", reply_id, watches=len(self._watches))
            return _refused(RefusalKind.UNAVAILABLE, "This safety service watches as many replies as it may.")
        self._watches[reply_id] = group.create_task(self._run_watch(reply_id), name=f"watch.{reply_id}")
        self._count.watches.set(len(self._watches))
        return Done()

    async def _run_watch(self, reply_id: str) -> None:
        """To the reply's end, or its deadline: the last guard has ended it by then."""
        watch = Watch(
            reply_id,
            by=self._name,
            bus=self._bus,
            store=self._store,
            names=self._names,
            classifier=self._classifier,
            journal=self._journal,
            on_window=self._on_window,
        )
        outcome = "cancelled"
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S + 2 * DEADLINE_GRACE_S):
                outcome = await watch.run()
        except BusClosedError:
            raise
        except (LogGoneError, TokenLogError, BusError, TimeoutError) as error:
            outcome = "failed"
            self._log.warning("watch_failed", reply_id=reply_id, error=str(error) or type(error).__name__)
            self._journal.note("safety_watch_failed", reply_id, error=type(error).__name__)
        finally:
            self._watches.pop(reply_id, None)
            self._count.watches.set(len(self._watches))
            self._count.outcomes.labels(outcome).inc()

    def _on_window(self, seconds: float, verdict: Verdict) -> None:
        self._count.window_s.observe(seconds)
        if verdict.flagged:
            self._count.flags.labels("window", verdict.category).inc()

    # --- both -------------------------------------------------------------------------------------------------

    def _decoded(self, kind: msgspec.msgpack.Decoder[T], message: BusMessage) -> T | None:
        try:
            return kind.decode(message.data)
        except msgspec.DecodeError as error:
            self._count.undecodable.inc()
            self._log.warning("message_undecodable", subject=message.subject, error=str(error))
            return None

    async def _answer(self, subject: str, answer: Verdict | Done | Refused) -> None:
        try:
            await self._bus.publish(subject, encode(answer))
        except BusError as error:  # the asker's deadline speaks
            self._log.warning("not_answered", error=str(error))


def _refused(kind: RefusalKind, message: str) -> Refused:
    return Refused(refusal=Refusal(kind=kind, message=message))


class _Counts:
    """The safety service's metrics; docs/metrics.md defines them."""

    def __init__(self, metrics: Metrics) -> None:
        self.checks = metrics.counter("safety_checks_total", "texts checked on request", ("stage", "outcome"))
        self.check_s = metrics.histogram(
            "safety_check_seconds", "a check was read -> its verdict", ("stage",), buckets=TOKEN_BUCKETS_S
        )
        self.flags = metrics.counter(
            "safety_flags_total", "flagged texts; stage window: beside the stream", ("stage", "category")
        )
        self.watches = metrics.gauge("safety_watches", "replies watched now")
        self.outcomes = metrics.counter(
            "safety_watch_outcomes_total", "watches that are over, by what became of them", ("outcome",)
        )
        self.refused = metrics.counter("safety_watch_refusals_total", "replies not watched: the bound was reached")
        self.window_s = metrics.histogram(
            "safety_window_seconds", "a window's last text came -> its verdict", buckets=TOKEN_BUCKETS_S
        )
        self.undecodable = metrics.counter("safety_undecodable_total", "messages that could not be read")
