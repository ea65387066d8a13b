"""The replica's bus shell: dispatches in, sequences to the engine, its tokens to the logs, and a heartbeat.

    dispatch, ask, cancel, presence ──> AttemptTable ──submit, cancel──> EnginePort (another process)
                                            │ ^                              │ a report a step
                                     appends│ └──────── tokens, freed ───────┘
                                            v
                                         Writers ──> token logs        Outbox ──> USAGE

The engine is another process, so a long step delays no heartbeat; the heartbeat says how old the step is.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar, assert_never

import msgspec

from services.replica.attempt import AbortSequence, Attempt, CheckWindow, Command, Over
from services.replica.attempts import AttemptTable, Capacity, Known, Taken
from services.replica.engine_messages import EngineStarting, FreedSequence, StepReport, SubmitSequence
from services.replica.engine_port import EnginePort
from services.replica.heartbeat import Beat, heartbeat, is_full
from services.replica.metrics import ReplicaMetrics
from services.replica.outbox import Outbox
from services.replica.prefix_report import PrefixReport
from services.replica.settings import ReplicaSettings
from services.replica.writers import Writers
from shared import clock
from shared.bus import Bus, BusMessage, Subscription
from shared.errors import BusError, ConfigError, EngineError
from shared.limits import (
    DRAIN_S,
    ENGINE_STUCK_EXIT_S,
    FLUSH_S,
    HEARTBEAT_S,
    HEARTBEAT_S_MIN,
    LEASE_EXTEND_S,
    SAFETY_VERDICT_S,
)
from shared.log_store import LogStore
from shared.messages import (
    Ask,
    AttemptOver,
    Cancel,
    Dispatch,
    Dispatched,
    DispatchRefused,
    Message,
    SafetyCheck,
    UsageRecord,
    Verdict,
    decoder,
    encode,
)
from shared.soundness import dispatch_fault
from shared.subjects import Names
from shared.telemetry import Journal, Log, Metrics

_dispatch, _ask, _cancel, _verdict = decoder(Dispatch), decoder(Ask), decoder(Cancel), decoder(Verdict)
_REPORT_WAIT_S = 1.0
T = TypeVar("T")


class ReplicaService:
    """See `shared.service.Service` for the doors."""

    def __init__(
        self,
        settings: ReplicaSettings,
        bus: Bus,
        engine: EnginePort,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self.replica, self.boot_id = settings.name, clock.random_token(8)
        self.http = ""  # where its metrics are, for those who watch
        self._settings, self._bus, self._engine, self._log = settings, bus, engine, log
        self._names = Names(settings.region)
        self._table = AttemptTable(self.replica, settings.model, idle_end_s=settings.idle_end_s)
        self._writers = Writers(
            LogStore(bus, self._names),
            metrics,
            perform=self._perform,
            spawn=self._spawn,
            writing=lambda: len(self._table),
            appends_per_s_max=settings.appends_per_s_max,
        )
        self._outbox = Outbox(bus, metrics)
        self._prefix = PrefixReport(self.replica, self.boot_id)
        self._journal = Journal(bus, self._names, "replica", metrics)
        self._count = ReplicaMetrics(metrics)
        self._group: asyncio.TaskGroup | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._unseen: dict[Attempt, int] = {}  # handed to the engine -> reports since
        self._aborted: dict[str, tuple[float, str, str]] = {}  # sequence -> when, phase, cause
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._tokens_marked = (clock.now_s(), 0)
        self._full = False  # as of the last heartbeat: the routers hold requests back
        self._beat_soon = asyncio.Event()
        self._stuck_since: float | None = None

    # --- the doors -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the engine up, then listen. Raises ConfigError or EngineError when there is no engine."""
        if self._subscriptions:
            return
        if not self._settings.stub and not self._settings.model_file:
            raise ConfigError("a replica needs weights: set CHORUS_MODEL_FILE, or CHORUS_STUB=1 for scripted tokens")
        ready = await self._engine.start(self._settings.engine_config(), on_progress=self._on_progress)
        self._log.info(
            "engine_ready",
            model=ready.model_name,
            version=ready.model_version,
            phases_s=ready.phases_s,
            step_tokens=ready.step_tokens,
            mixed_tokens=ready.mixed_tokens,
        )
        self._table.capacity = Capacity(
            blocks_total=ready.blocks_total,
            context_max=ready.context_max,
            running_max=ready.running_max,
            cores=ready.cores,
        )
        names, replica = self._names, self.replica
        self._subscriptions = {
            "dispatch": await self._bus.subscribe(names.dispatch(replica)),
            "ask": await self._bus.subscribe(names.ask(replica)),
            "blocks": await self._bus.subscribe(names.blocks_snapshot(replica)),
            "drain": await self._bus.subscribe(names.drain(replica)),
            "cancel": await self._bus.subscribe(names.cancel("*")),
            "presence": await self._bus.subscribe(names.presence("*")),
        }

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for name, loop in self._loops().items():
                    group.create_task(loop, name=f"replica.{name}")
        finally:
            self._group = None
            self._writers.close()

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "dispatches": self._hear_dispatches(),
            "asks": self._hear_asks(),
            "snapshots": self._hear_snapshots(),
            "cancels": self._hear_cancels(),
            "presence": self._hear_presence(),
            "drains": self._hear_drains(),
            "reports": self._take_reports(),
            "heartbeat": self._beat(),
            "leases": self._extend_leases(),
            "outbox": self._outbox.run(),
            "journal": self._journal.run(),
        }

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new; what runs may finish; what has not when the deadline nears is handed back."""
        self._table.accepting = False
        with contextlib.suppress(BusError):
            await self._say_health()
        give_up_s = clock.now_s() + deadline_s
        if not await self._until_none_left(max(0.0, deadline_s - FLUSH_S)):
            for attempt in self._table:
                self._perform(attempt, attempt.hand_back("the replica is draining"))
            self._writers.pump()
            await self._until_none_left(max(0.0, give_up_s - clock.now_s()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.1, give_up_s - clock.now_s())):
                await self._outbox.emptied()

    async def close(self) -> None:
        """Leave no engine process behind."""
        await self._engine.stop()

    def ready(self) -> str | None:
        if not self._subscriptions:
            return "the engine is not ready"
        if not self._engine.alive:
            return "the engine is gone"
        if self._engine.stuck:
            return f"the engine has been in one step for {self._engine.step_age_s():.1f} s"
        return None if self._bus.connected else "the bus is away"

    async def _until_none_left(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        return self._none_left.is_set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._group is None:
            work.close()  # we are leaving
        else:
            self._group.create_task(work)

    def _on_progress(self, progress: EngineStarting) -> None:
        if progress.share >= 1.0:
            self._log.info("engine_phase_done", phase=progress.phase)

    # --- what comes in ---------------------------------------------------------------------------------------

    def _decoded(self, kind: msgspec.msgpack.Decoder[T], message: BusMessage) -> T | None:
        try:
            return kind.decode(message.data)
        except msgspec.DecodeError as error:
            self._count.undecodable.inc()
            self._log.warning("message_undecodable", subject=message.subject, error=str(error))
            return None

    async def _hear_dispatches(self) -> None:
        async for message in self._subscriptions["dispatch"]:
            dispatch = self._decoded(_dispatch, message)
            if dispatch is not None:
                answer = self._on_dispatch(dispatch)
                await self._say(message.reply, answer)

    def _on_dispatch(self, dispatch: Dispatch) -> Dispatched | DispatchRefused:
        now = clock.now_s()
        fault = dispatch_fault(dispatch, self._settings.region)
        if fault is not None:
            self._count.undecodable.inc()
            return DispatchRefused(replica=self.replica, reason="bad_request", detail=fault)
        outcome = self._table.on_dispatch(dispatch, now=now, epoch_s=clock.wall_s() - now)
        if isinstance(outcome, DispatchRefused):
            self._count.dispatches.labels(outcome.reason).inc()
            return outcome
        if isinstance(outcome, Known):
            self._count.dispatches.labels("known").inc()
            self._release(outcome.attempt, outcome.released)
        elif not self._submit(outcome, dispatch):
            self._count.dispatches.labels("full").inc()
            return DispatchRefused(replica=self.replica, reason="full", detail="the engine has no place")
        return Dispatched(replica=self.replica, number=outcome.ordinal, router=outcome.attempt.router)

    def _submit(self, taken: Taken, dispatch: Dispatch) -> bool:
        attempt, request = taken.attempt, dispatch.request
        if taken.replaced is not None:
            self._perform(*taken.replaced)
        submitted = self._engine.submit(
            SubmitSequence(
                sequence_id=attempt.sequence_id,
                tier=attempt.accepted.tier,
                prompt=request.prompt,
                budget=attempt.accepted.budget,
                sampling=msgspec.structs.replace(request.sampling, seed=attempt.accepted.seed),
                written=dispatch.written,
                domain=request.domain,
            )
        )
        if not submitted:
            self._table.forget(attempt)
            return False
        self._count.dispatches.labels("taken").inc()
        self._none_left.clear()
        self._unseen[attempt] = 0
        self._journal.note(
            "attempt_taken",
            attempt.reply_id,
            replica=self.replica,
            attempt=attempt.number,
            first_index=attempt.first_index,
            here=len(self._table),
        )
        return True

    async def _hear_asks(self) -> None:
        async for message in self._subscriptions["ask"]:
            ask = self._decoded(_ask, message)
            if ask is not None:
                holding, attempt, released = self._table.on_ask(ask)
                if attempt is not None:
                    self._release(attempt, released)
                await self._say(message.reply, holding)

    def _release(self, attempt: Attempt, router: str | None) -> None:
        """`router` held an older delivery; the attempt reports to another one from now on."""
        if router is not None:
            self._journal.note(
                "attempt_adopted", attempt.reply_id, replica=self.replica, by=attempt.router, released=router
            )
            self._spawn(self._say_over(attempt, router, "adopted", ""))

    async def _hear_snapshots(self) -> None:
        async for message in self._subscriptions["blocks"]:
            await self._say(message.reply, self._prefix.snapshot())

    async def _hear_cancels(self) -> None:
        async for message in self._subscriptions["cancel"]:
            attempt = self._table.of_reply(message.subject.rpartition(".")[2])
            cancel = self._decoded(_cancel, message) if attempt is not None else None
            if attempt is not None and cancel is not None:
                self._perform(attempt, attempt.cancelled(cancel.reason))

    async def _hear_presence(self) -> None:
        async for message in self._subscriptions["presence"]:
            attempt = self._table.of_reply(message.subject.rpartition(".")[2])
            if attempt is not None:
                attempt.present(clock.now_s())

    async def _hear_drains(self) -> None:
        async for _ in self._subscriptions["drain"]:
            self._log.info("drain_ordered")
            await self.drain(DRAIN_S)

    # --- the engine -------------------------------------------------------------------------------------------

    async def _take_reports(self) -> None:
        while True:
            try:
                reports = await self._engine.reports(_REPORT_WAIT_S)
            except EngineError as error:
                await self._engine_lost(error)
                raise
            epoch_s = clock.wall_s() - clock.now_s()
            for report in reports:
                self._on_report(report, epoch_s + report.sampled_s)
            if reports:
                self._writers.pump(reports[-1].stats.step_s)

    def _on_report(self, report: StepReport, sampled_s: float) -> None:
        now = clock.now_s()
        self._unseen = {attempt: seen + 1 for attempt, seen in self._unseen.items() if seen == 0}
        for tokens in report.tokens:
            attempt = self._table.of_sequence(tokens.sequence_id)
            if attempt is None:
                continue
            self._unseen.pop(attempt, None)
            attempt.tokens(tokens.ids, tokens.texts, tokens.cached_tokens, sampled_s, tokens.logprobs)
            if tokens.finish is not None:
                self._note_freed(tokens.sequence_id, now)
                self._perform(attempt, attempt.finished(tokens.finish, tokens.engine_s, now))
            self._writers.touch(attempt)
        for freed in report.freed:
            self._on_freed(freed, now)
        if self._full and (report.freed or any(tokens.finish is not None for tokens in report.tokens)):
            self._beat_soon.set()
        for refused in report.refused:
            attempt = self._table.of_sequence(refused.sequence_id)
            if attempt is not None:
                self._unseen.pop(attempt, None)
                self._perform(attempt, attempt.refused(refused.reason, refused.detail, now))
        self._prefix.step(report.stored, report.evicted)
        self._count.step(report)

    def _on_freed(self, freed: FreedSequence, now: float) -> None:
        self._note_freed(freed.sequence_id, now)
        attempt = self._table.of_sequence(freed.sequence_id)
        if attempt is not None and attempt.blocks_held:
            self._perform(attempt, attempt.freed(freed.engine_s))

    def _note_freed(self, sequence_id: str, now: float) -> None:
        began = self._aborted.pop(sequence_id, None)
        if began is not None:
            at, phase, cause = began
            self._count.cancel_to_free_s.labels(phase, cause).observe(now - at)

    async def _engine_lost(self, error: EngineError) -> None:
        """Write down what had been sampled, tell the routers, and let the process end: a new one starts warm."""
        self._log.error("engine_lost", error=str(error), running=len(self._table))
        self._table.accepting = False
        with contextlib.suppress(BusError):
            await self._say_health()  # before the routers hear of the attempts: else they come back here
        self._table.capacity = None
        for attempt in self._table:
            self._perform(attempt, attempt.engine_lost())
        self._writers.pump()
        await self._until_none_left(FLUSH_S)

    # --- what attempts decide ----------------------------------------------------------------------------------

    def _perform(self, attempt: Attempt, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case AbortSequence():
                    phase = "decode" if attempt.sampled_tokens else "prefill"
                    self._aborted[attempt.sequence_id] = (clock.now_s(), phase, command.cause)
                    self._engine.cancel(attempt.sequence_id)
                case CheckWindow():
                    self._spawn(self._check(attempt, command.text))
                case Over():
                    self._on_over(attempt, command)
                case _:
                    assert_never(command)
        if not attempt.over:
            self._writers.touch(attempt)

    async def _check(self, attempt: Attempt, text: str) -> None:
        """The last window's verdict; without one in time the end is marked unchecked."""
        check = SafetyCheck(stage="output", text=text, reply_id=attempt.reply_id)
        category, checked = None, True
        try:
            answer = await self._bus.request(self._names.safety_check, encode(check), timeout_s=SAFETY_VERDICT_S)
            verdict = _verdict.decode(answer.data)
            category = verdict.category or "unsafe" if verdict.flagged else None
        except (BusError, msgspec.DecodeError) as error:
            checked = False
            self._count.unchecked.labels(type(error).__name__).inc()
        self._perform(attempt, attempt.verdict(category, clock.now_s(), checked=checked))
        self._writers.pump()

    def _on_over(self, attempt: Attempt, over: Over) -> None:
        self._table.forget(attempt)
        self._unseen.pop(attempt, None)
        self._aborted.pop(attempt.sequence_id, None)
        self._count.attempts.labels(over.outcome.value).inc()
        self._spawn(self._say_over(attempt, attempt.router, over.outcome.value, over.detail))
        self._write_usage(attempt)
        self._journal.note(
            "attempt_over",
            attempt.reply_id,
            replica=self.replica,
            attempt=attempt.number,
            outcome=over.outcome.value,
            detail=over.detail,
            output_tokens=attempt.output_tokens,
            engine_s=attempt.engine_s,
        )
        if not len(self._table):
            self._none_left.set()

    def _write_usage(self, attempt: Attempt) -> None:
        accepted = attempt.accepted
        record = UsageRecord(
            reply_id=attempt.reply_id,
            attempt=attempt.number,
            org=accepted.org,
            user=accepted.user,
            tier=accepted.tier,
            model=accepted.model,
            replica=self.replica,
            input_tokens=accepted.input_tokens,
            cached_tokens=attempt.cached_tokens,
            output_tokens=attempt.output_tokens,
            engine_s=attempt.engine_s,
            at_s=clock.wall_s(),
            core_s=attempt.core_s,
        )
        message_id = f"{attempt.reply_id}:{attempt.number}"
        self._outbox.put(self._names.usage(attempt.reply_id), encode(record), message_id)

    # --- what goes out -----------------------------------------------------------------------------------------

    async def _say(self, subject: str, message: Message) -> None:
        if subject:
            with contextlib.suppress(BusError):
                await self._bus.publish(subject, encode(message))

    async def _say_over(self, attempt: Attempt, router: str, outcome: str, detail: str) -> None:
        over = AttemptOver(
            reply_id=attempt.reply_id, attempt=attempt.number, replica=self.replica, outcome=outcome, detail=detail
        )
        await self._say(self._names.attempt_over(router), over)

    async def _beat(self) -> None:
        """Heartbeats, prefix changes and the attempts' deadlines, four times a second; sooner when room was made."""
        while True:
            self._look_after_engine()
            now = clock.now_s()
            for attempt in self._table:
                self._perform(attempt, attempt.tick(now))
            self._writers.pump()
            changed = self._prefix.changes()
            if changed is not None:
                await self._say(self._names.blocks(self.replica), changed)
            with contextlib.suppress(BusError):
                await self._say_health()
            await asyncio.sleep(HEARTBEAT_S_MIN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S - HEARTBEAT_S_MIN):
                    await self._beat_soon.wait()

    def _look_after_engine(self) -> None:
        """A step that never ends: first nothing new comes here, then the replica gives itself up."""
        if not self._engine.stuck:
            self._stuck_since = None
            return
        now = clock.now_s()
        if self._stuck_since is None:
            self._stuck_since = now
            self._log.error("engine_stuck", step_age_s=self._engine.step_age_s())
            self._journal.note("engine_stuck", None, replica=self.replica, step_age_s=self._engine.step_age_s())
        if now - self._stuck_since > ENGINE_STUCK_EXIT_S:
            raise EngineError(f"the engine has been in one step for {self._engine.step_age_s():.0f} s")

    async def _say_health(self) -> None:
        engine = self._engine
        if self._table.capacity is None:
            return
        beat = Beat(
            replica=self.replica,
            boot_id=self.boot_id,
            model=self._settings.model,
            http=self.http,
            ready=engine.ready,
            stats=engine.stats,
            unseen=tuple(self._unseen),
            dispatches=self._table.taken,
            accepting=self._table.accepting and self._stuck_since is None,
            step_age_s=engine.step_age_s(),
            step_predicted_s=engine.step_predicted_s(),
            tokens_per_s=self._tokens_per_s(engine.stats.sampled_tokens),
        )
        health = heartbeat(beat)
        self._full = is_full(health)
        self._beat_soon.clear()
        self._count.beat(health, attempts=len(self._table), append_s=self._writers.append_s)
        await self._bus.publish(self._names.health(self.replica), encode(health))

    def _tokens_per_s(self, sampled: int) -> float:
        now = clock.now_s()
        (at, before), self._tokens_marked = self._tokens_marked, (now, sampled)
        return (sampled - before) / (now - at) if now > at else 0.0

    async def _extend_leases(self) -> None:
        """Keep the deliveries of what runs, and only while it does."""
        while True:
            await asyncio.sleep(LEASE_EXTEND_S)
            now, moves = clock.now_s(), self._engine.alive and not self._engine.stuck
            for attempt in self._table:
                if attempt.may_extend(now, engine_moves=moves):
                    with contextlib.suppress(BusError):
                        await self._bus.extend(attempt.ack_subject)
