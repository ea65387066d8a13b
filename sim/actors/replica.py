"""A replica: the real attempt table, attempts, writers, scheduler and heartbeat; only what a step computes is scripted.

dispatch, ask, cancel ──> AttemptTable ──submit, cancel──> Engine (real scheduler, a step a `step_s`)
│                                  │ report
appends │ <──── tokens, freed, refused ────┘
v
the logs
"""

from functools import partial
from typing import TYPE_CHECKING

from services.replica.attempt import AbortSequence, Attempt, CheckWindow, Over
from services.replica.attempt import Command as AttemptCommand
from services.replica.attempts import AttemptTable, Capacity, Known
from services.replica.core.block_pool import BlockPool
from services.replica.core.plan import StepPlan, StepResult
from services.replica.core.scheduler import Scheduler, SchedulerLimits
from services.replica.core.step_fit import StepSample, StepTimes
from services.replica.engine import Engine
from services.replica.engine_messages import CancelSequence, Command, EngineReady, StepReport, SubmitSequence
from services.replica.heartbeat import Beat, heartbeat
from services.replica.runner import RunnerInfo
from shared.limits import CHUNK_INTERVAL_S_MIN, HEARTBEAT_S, LEASE_EXTEND_S, SAFETY_VERDICT_S
from shared.messages import Ask, AttemptOver, Dispatch, Dispatched, DispatchRefused, Holding, SequencedEntry
from shared.outcomes import EndReason
from shared.token_log import Append
from sim.actors.ender import READ_TIMEOUT_S
from sim.script import VOCABULARY, WORDS, token
from sim.world import Process

if TYPE_CHECKING:
    from sim.region import Region

MODEL, VERSION, CONTEXT = "m", "sim-1", 2048
_RETRY_S = 0.1


class _Script:
    """Instead of a model."""

    def __init__(self, blocks: int) -> None:
        self.info = RunnerInfo(VERSION, blocks, CONTEXT, WORDS)

    def run(self, plan: StepPlan) -> StepResult:
        samples = [chunk.sample for chunk in plan.sampled_chunks]
        return StepResult([token(sample.seed, sample.position) for sample in samples if sample is not None])

    def close(self) -> None: ...


class _Marker:
    """Steps take no time here: how long one stands is the actor's to say."""

    def begin(self, now: float, predicted_s: float) -> None: ...

    def end(self) -> None: ...


class Replica(Process):
    def __init__(self, region: "Region", name: str) -> None:
        super().__init__(region.world, name)
        self.region = region
        self.started()

    # --- life

    def started(self) -> None:
        swarm, world = self.region.swarm, self.world
        self.table = AttemptTable(self.name, MODEL)
        self.table.capacity = Capacity(blocks_total=swarm.blocks, context_max=CONTEXT, running_max=swarm.running_max)
        self.scheduler = Scheduler(
            pool=BlockPool(swarm.blocks),
            vocabulary=VOCABULARY,
            limits=SchedulerLimits(
                running_max=swarm.running_max,
                waiting_max=64,
                step_tokens_max=swarm.running_max + 64,
                mixed_tokens_max=32,
                reserve_blocks=0,
                context_max=CONTEXT,
            ),
        )
        times = StepTimes([StepSample(1, 1, swarm.step_s)])
        self.engine = Engine(
            scheduler=self.scheduler,
            runner=_Script(swarm.blocks),
            step_times=times,
            marker=_Marker(),
            clock=lambda: world.now,
        )
        self._ready = EngineReady(
            model_name=MODEL,
            model_version=VERSION,
            tokenizer_revision="",
            vocab_size=WORDS,
            blocks_total=swarm.blocks,
            context_max=CONTEXT,
            running_max=swarm.running_max,
            step=times.model,
            phases_s={},
            step_tokens=swarm.running_max + 64,
            mixed_tokens=32,
        )
        self.hung_since: float | None = None
        self._commands: list[Command] = []
        self._stepping = False
        self._unseen: set[str] = set()  # handed to the engine, not yet in its figures
        world.at(world.random.random() * HEARTBEAT_S, self._beat, owner=self)
        world.at(LEASE_EXTEND_S * world.random.random(), self._extend_leases, owner=self)

    def kill(self, down_s: float = 3.0) -> None:
        """Gone without a word; another process comes under the same name."""
        self.crash(down_s)

    def crashed(self) -> None:
        self.region.checks.forgotten(self)

    def hang(self, hang_s: float) -> None:
        """The step loop stands still; the shell answers."""
        if self.up and self.hung_since is None:
            self.world.say("{} hangs for {} s", self.name, hang_s)
            self.hung_since = self.disturbed_s = self.world.now
            self.world.at(hang_s, self._unhang, owner=self)

    def _unhang(self) -> None:
        self.hung_since = None
        self.disturbed_s = self.world.now
        self._wake_engine()

    def drain(self, drain_s: float) -> None:
        """Takes nothing new; what runs is handed back; then another process comes."""
        if not self.up:
            return
        self.table.accepting = False
        for attempt in self.table:
            self._perform(attempt, attempt.hand_back("the replica is draining"))
        self.world.at(1.0, self.crash, drain_s, owner=self)

    @property
    def quiet(self) -> bool:
        """Nothing is held."""
        load = self.scheduler.load()
        return len(self.table) == 0 and load.blocks_free == self.scheduler.pool.total

    def at_work(self, reply_id: str, attempt: int) -> bool:
        running = self.table.of_reply(reply_id)
        return (
            self.awake
            and self.hung_since is None
            and running is not None
            and running.number == attempt
            and running.phase.value == "running"
        )

    # --- what routers say

    def dispatched(self, dispatch: Dispatch) -> Dispatched | DispatchRefused:
        now = self.world.now
        outcome = self.table.on_dispatch(dispatch, now=now, epoch_s=0.0)
        if isinstance(outcome, DispatchRefused):
            self.region.checks.given_back(dispatch.request.reply_id, dispatch.attempt)
            return outcome
        if isinstance(outcome, Known):
            self._release(outcome.attempt, outcome.released)
        else:
            self.region.checks.runs(self, dispatch)
            if outcome.replaced is not None:
                self._perform(*outcome.replaced)
            attempt, request = outcome.attempt, dispatch.request
            self._unseen.add(attempt.sequence_id)
            self._commands.append(
                SubmitSequence(
                    sequence_id=attempt.sequence_id,
                    tier=attempt.accepted.tier,
                    prompt=request.prompt,
                    budget=attempt.accepted.budget,
                    sampling=request.sampling,
                    written=dispatch.written,
                    domain=request.domain,
                )
            )
            self._wake_engine()
        return Dispatched(replica=self.name, number=outcome.ordinal, router=outcome.attempt.router)

    def asked(self, ask: Ask) -> Holding:
        holding, attempt, released = self.table.on_ask(ask)
        if attempt is not None:
            self._release(attempt, released)
        return holding

    def _release(self, attempt: Attempt, router: str | None) -> None:
        if router is not None:
            self._tell(router, attempt, "adopted")

    def cancelled(self, reply_id: str, reason: EndReason) -> None:
        attempt = self.table.of_reply(reply_id)
        if attempt is not None:
            self._perform(attempt, attempt.cancelled(reason))

    def present(self, reply_id: str) -> None:
        attempt = self.table.of_reply(reply_id)
        if attempt is not None:
            attempt.present(self.world.now)

    # --- the engine

    def _wake_engine(self) -> None:
        if not self._stepping and (self._commands or not self.engine.idle):
            self._stepping = True
            self.world.at(self.region.swarm.step_s * (0.5 + self.world.random.random()), self._step, owner=self)

    def _step(self) -> None:
        self._stepping = False
        if self.hung_since is not None:
            return
        commands, self._commands = self._commands, []
        report = self.engine.step(commands)
        self.scheduler.check()
        if report is not None:
            self._take(report)
        self._wake_engine()

    def _take(self, report: StepReport) -> None:
        now = self.world.now
        self._unseen.clear()
        for tokens in report.tokens:
            attempt = self.table.of_sequence(tokens.sequence_id)
            if attempt is not None:
                attempt.tokens(tokens.ids, tokens.texts, tokens.cached_tokens, now)
                if tokens.finish is not None:
                    self._perform(attempt, attempt.finished(tokens.finish, tokens.engine_s, now))
                self._pump(attempt)
        for freed in report.freed:
            attempt = self.table.of_sequence(freed.sequence_id)
            if attempt is not None and attempt.blocks_held:
                self._perform(attempt, attempt.freed(freed.engine_s))
        for refused in report.refused:
            attempt = self.table.of_sequence(refused.sequence_id)
            if attempt is not None:
                self._perform(attempt, attempt.refused(refused.reason, refused.detail, now))

    # --- what attempts decide

    def _perform(self, attempt: Attempt, commands: list[AttemptCommand]) -> None:
        for command in commands:
            match command:
                case AbortSequence():
                    self._commands.append(CancelSequence(sequence_id=attempt.sequence_id))
                    self._wake_engine()
                case CheckWindow():
                    self._check(attempt)
                case Over():
                    self.table.forget(attempt)
                    if command.outcome.value == "handed_back":
                        self.region.checks.given_back(attempt.reply_id, attempt.number)
                    self.region.checks.attempt_over(attempt.reply_id, attempt.number)
                    self._tell(attempt.router, attempt, command.outcome.value)
        if not attempt.over:
            self._pump(attempt)

    def _check(self, attempt: Attempt) -> None:
        """Safety says yes, after a moment, or nothing in time."""

        def answered(verdict: bool | None) -> None:
            self._perform(attempt, attempt.verdict(None, self.world.now, checked=verdict is not None))

        self.world.call(self, None, lambda: True, answered, SAFETY_VERDICT_S)

    def _tell(self, router: str, attempt: Attempt, outcome: str) -> None:
        over = AttemptOver(reply_id=attempt.reply_id, attempt=attempt.number, replica=self.name, outcome=outcome)
        for each in self.region.routers:
            if each.id == router:
                self.region.publish(each, each.heard_over, over)

    # --- the logs

    def _pump(self, attempt: Attempt) -> None:
        due = attempt.due_at(CHUNK_INTERVAL_S_MIN)
        if due is None:
            return
        if due > self.world.now:
            self.world.at(due - self.world.now, self._pump, attempt, owner=self)
            return
        append = attempt.next_append(self.world.now)
        if append is not None:
            self._send(attempt, append)

    def _send(self, attempt: Attempt, append: Append) -> None:
        expected = None if self.region.rules.unconditional_append else append.expected_seq

        def serve() -> tuple[int | None]:
            return (self.region.bus.append(attempt.reply_id, expected, append.entry, self),)

        answered = partial(self._appended, attempt, append)
        self.world.call(self, self.region.bus, serve, answered, self.region.swarm.append_timeout_s)

    def _appended(self, attempt: Attempt, sent: Append, answer: tuple[int | None] | None) -> None:
        if attempt.writer.in_flight is not sent:
            return
        if answer is None:
            self.world.at(_RETRY_S, self._again, attempt, sent, owner=self)
        elif answer[0] is None:
            self._read_standing(attempt)
        else:
            self._perform(attempt, attempt.acked(answer[0]))

    def _again(self, attempt: Attempt, sent: Append) -> None:
        if attempt.writer.in_flight is sent:
            self._send(attempt, attempt.writer.unknown())

    def _read_standing(self, attempt: Attempt) -> None:
        def answered(items: list[SequencedEntry] | None) -> None:
            if attempt.writer.in_flight is None:
                return
            if items is None:
                self.world.at(_RETRY_S, self._read_standing, attempt, owner=self)
                return
            commands = attempt.append_refused(items[-1] if items else None)
            if attempt.writer.in_flight is not None:
                self.world.at(_RETRY_S, self._read_standing, attempt, owner=self)
            self._perform(attempt, commands)

        def serve() -> list[SequencedEntry]:
            return self.region.bus.read(attempt.reply_id)

        self.world.call(self, self.region.bus, serve, answered, READ_TIMEOUT_S)

    # --- four times a second, and twice

    def _beat(self) -> None:
        now = self.world.now
        for attempt in self.table:
            self._perform(attempt, attempt.tick(now))
        age_s = 0.0 if self.hung_since is None else now - self.hung_since
        beat = Beat(
            replica=self.name,
            boot_id=str(self.boot),
            model=MODEL,
            http="",
            ready=self._ready,
            stats=self.engine.stats(),
            unseen=tuple(filter(None, map(self.table.of_sequence, sorted(self._unseen)))),
            dispatches=self.table.taken,
            accepting=self.table.accepting,
            step_age_s=age_s,
            step_predicted_s=self.region.swarm.step_s,
            tokens_per_s=0.0,
        )
        health = heartbeat(beat)
        for router in self.region.routers:
            self.region.publish(router, router.heard_health, health)
        self.world.at(HEARTBEAT_S, self._beat, owner=self)

    def _extend_leases(self) -> None:
        for attempt in self.table:
            if attempt.may_extend(self.world.now, engine_moves=self.hung_since is None):
                self.region.extend(attempt.ack_subject)
        self.world.at(LEASE_EXTEND_S, self._extend_leases, owner=self)
