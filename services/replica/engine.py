"""The step loop: inbox once a step -> plan -> run -> commit -> results once a step. Free of asyncio and of sockets.

interval        from                       to
step_s          plan made                  runner returned        (what the step model predicts)
queued_s        submitted to the engine    first admitted
engine_s        a sequence's share of step_s: of the weights read, of its tokens computed, of its context read
"""

from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from services.replica.core.plan import Freed, Output, StepPlan, StepResult
from services.replica.core.scheduler import NotTaken, Scheduler
from services.replica.core.sequence import Demand
from services.replica.core.step_fit import StepSample, StepTimes, predict
from services.replica.engine_messages import (
    CancelSequence,
    Command,
    EngineStats,
    FreedSequence,
    SequenceRefused,
    SequenceTokens,
    StepReport,
    StopEngine,
    SubmitSequence,
)
from services.replica.runner import Runner
from shared.messages import unpack_ids


class Inbox(Protocol):
    def take(self, *, wait: bool) -> list[Command]:
        """What came since the last call; with `wait`, blocks until there is something. EOFError: the shell is gone."""
        ...


class Outbox(Protocol):
    def put(self, report: StepReport) -> None: ...


class StepMarker(Protocol):
    """Where the shell sees that a step is running, without asking: a stuck loop cannot hide."""

    def begin(self, now: float, predicted_s: float) -> None: ...

    def end(self) -> None: ...


class Engine:
    """Scheduler and runner, stepped together."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        step_times: StepTimes,
        marker: StepMarker,
        clock: Callable[[], float],
    ) -> None:
        self.stopping = False
        self._scheduler, self._runner = scheduler, runner
        self._step_times, self._marker, self._clock = step_times, marker, clock
        self._steps = self._sampled = self._computed = self._cached = self._preemptions = 0

    @property
    def idle(self) -> bool:
        return not self._scheduler.has_work

    def step(self, commands: Iterable[Command]) -> StepReport | None:
        """Take commands in, then run one step; None when there was nothing to do and nothing to say."""
        said = [answer for command in commands if (answer := self._obey(command)) is not None]
        if not said and self.idle:
            return None
        plan = self._scheduler.plan(self._clock(), self._step_times.model)
        outputs, seconds, predicted_s = self._run(plan) if plan.chunks else ([], 0.0, 0.0)
        sampled_s = self._clock()
        over = [answer for answer in said if isinstance(answer, Output)]
        self._steps += 1
        self._preemptions += len(plan.preempted)
        self._sampled += len(outputs)
        self._computed += plan.tokens
        self._cached += sum(output.cached_tokens or 0 for output in outputs)
        changes = self._scheduler.pool.take_changes()
        return StepReport(
            number=self._steps,
            stats=self._stats(plan, seconds, predicted_s),
            tokens=tuple(map(_tokens, [*over, *outputs])),
            freed=tuple(map(_freed, plan.freed)),
            refused=tuple(_refused(answer) for answer in said if isinstance(answer, NotTaken)),
            preempted=plan.preempted,
            stored=b"".join(changes.stored),
            evicted=b"".join(changes.evicted),
            sampled_s=sampled_s,
        )

    def _obey(self, command: Command) -> NotTaken | Output | None:
        match command:
            case SubmitSequence():
                return self._scheduler.submit(_demand(command), self._clock())
            case CancelSequence():
                self._scheduler.cancel(command.sequence_id)
            case StopEngine():
                self.stopping = True
            case _:
                assert_never(command)
        return None

    def _run(self, plan: StepPlan) -> tuple[list[Output], float, float]:
        """(outputs, measured seconds, predicted seconds)."""
        model = self._step_times.model
        predicted_s = predict(model, plan.tokens, plan.attended)
        began = self._clock()
        self._marker.begin(began, predicted_s)
        result = self._runner.run(plan)
        now = self._clock()
        self._marker.end()
        only_decodes = plan.tokens == len(plan.chunks)
        sample = StepSample(plan.tokens, plan.attended, now - began)
        self._step_times.observe(sample, only_decodes=only_decodes)
        timed = StepResult(result.sampled, now - began, result.odds)
        return self._scheduler.commit(plan, timed, now, model), now - began, predicted_s

    def _stats(self, plan: StepPlan, seconds: float, predicted_s: float) -> EngineStats:
        load = self._scheduler.load()
        return EngineStats(
            blocks_total=self._scheduler.pool.total,
            blocks_free=load.blocks_free,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            step=self._step_times.model,
            step_s=seconds,
            step_predicted_s=predicted_s,
            step_tokens=plan.tokens,
            step_attended=plan.attended,
            steps=self._steps,
            sampled_tokens=self._sampled,
            computed_tokens=self._computed,
            cached_tokens=self._cached,
            preemptions=self._preemptions,
        )

    def stats(self) -> EngineStats:
        """As of now, between steps."""
        return self._stats(StepPlan(0, ()), 0.0, 0.0)


def run_engine(engine: Engine, inbox: Inbox, outbox: Outbox) -> None:
    """Step until told to stop. Idle, it blocks on its inbox and costs nothing."""
    while not engine.stopping:
        report = engine.step(inbox.take(wait=engine.idle))
        if report is not None:
            outbox.put(report)


def _demand(command: SubmitSequence) -> Demand:
    return Demand(
        sequence_id=command.sequence_id,
        tier=command.tier,
        prompt=unpack_ids(command.prompt),
        written=unpack_ids(command.written),
        budget=command.budget,
        sampling=command.sampling,
        seed=command.sampling.seed or 0,
        domain=command.domain,
    )


def _tokens(output: Output) -> SequenceTokens:
    return SequenceTokens(
        sequence_id=output.sequence_id,
        ids=output.ids,
        texts=output.texts,
        cached_tokens=output.cached_tokens,
        queued_s=output.queued_s,
        finish=output.finish,
        engine_s=output.engine_s,
        logprobs=output.logprobs,
    )


def _freed(freed: Freed) -> FreedSequence:
    return FreedSequence(sequence_id=freed.sequence_id, engine_s=freed.engine_s)


def _refused(answer: NotTaken) -> SequenceRefused:
    return SequenceRefused(sequence_id=answer.sequence_id, reason=answer.reason, detail=answer.detail)
