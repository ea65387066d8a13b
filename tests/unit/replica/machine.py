"""A scheduler and a runner stepped together, audited after every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import Output, StepPlan, StepResult, blocks_for
from services.replica.core.scheduler import NotTaken, Scheduler, SchedulerLimits
from services.replica.core.sequence import Demand
from services.replica.runner import Runner, RunnerInfo
from services.replica.stub_runner import scripted_token
from shared.messages import Sampling
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.tokenizer import StubTokenizer

STUB = StubTokenizer()
VOCABULARY = Vocabulary(STUB.token_bytes, STUB.stop_ids)
STEPS_MAX = 5_000


class Script:
    """A runner that draws the stub's tokens at no pace, or those it is told to."""

    def __init__(self, tokens: dict[str, Sequence[int]] | None = None) -> None:
        self.info = RunnerInfo("script", 1 << 20, 1 << 20, len(VOCABULARY))
        self._tokens = tokens or {}

    def run(self, plan: StepPlan) -> StepResult:
        drawn = []
        for chunk in plan.sampled_chunks:
            told = self._tokens.get(chunk.sequence_id)
            at = chunk.sample.position
            drawn.append(told[at] if told else scripted_token(chunk.sample.seed, at))
        return StepResult(drawn, 0.001 * plan.tokens)

    def close(self) -> None:
        pass


def limits(**changes: int) -> SchedulerLimits:
    defaults = {
        "running_max": 8,
        "waiting_max": 64,
        "step_tokens_max": 64,
        "mixed_tokens_max": 48,
        "reserve_blocks": 1,
        "context_max": 4096,
    }
    return SchedulerLimits(**{**defaults, **changes})


def demand(name: str, prompt: Sequence[int] | int = 20, budget: int = 4, **changes) -> Demand:
    ids = [ord(name[0]) + (at * 31) % 90 for at in range(prompt)] if isinstance(prompt, int) else list(prompt)
    sampling = changes.pop("sampling", Sampling(temperature=0.0))
    fields = {"tier": Tier.PAID, "seed": sum(name.encode()), "sampling": sampling, **changes}
    return Demand(sequence_id=name, prompt=ids, budget=budget, **fields)


@dataclass
class Record:
    """What became of a sequence."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: EndReason | None = None
    freed: bool = False
    engine_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Machine:
    def __init__(
        self,
        *,
        blocks: int = 64,
        runner: Runner | None = None,
        vocabulary: Vocabulary = VOCABULARY,
        **changes: int,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(pool=self.pool, vocabulary=vocabulary, limits=limits(**changes))
        self.runner = runner or Script()
        self.records: dict[str, Record] = {}
        self.plans: list[StepPlan] = []
        self.preempted: list[str] = []
        self.seconds = 0.0
        self.now = 0.0

    def submit(self, wanted: Demand) -> NotTaken | Output | None:
        answer = self.scheduler.submit(wanted, self.now)
        if not isinstance(answer, NotTaken):
            self.records[wanted.sequence_id] = Record()
        if isinstance(answer, Output):
            self._note(answer)
        return answer

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)

    def step(self) -> StepPlan:
        """One whole step, with an audit after the plan and after the commit."""
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        for sequence in self.scheduler._running:
            assert len(sequence.blocks) == blocks_for(sequence.num_tokens), "less than one block of it is empty"
        self.plans.append(plan)
        self.preempted += plan.preempted
        for freed in plan.freed:
            self.records.setdefault(freed.sequence_id, Record()).freed = True
            self.records[freed.sequence_id].engine_s = freed.engine_s
        if plan.chunks:
            result = self.runner.run(plan)
            self.seconds += result.seconds
            self.now += 1.0
            for output in self.scheduler.commit(plan, result, self.now):
                self._note(output)
            self.scheduler.check()
        return plan

    def run(self) -> None:
        """Until nobody is left; a machine that does not come to an end is livelocked."""
        for _ in range(STEPS_MAX):
            if not self.scheduler.has_work:
                assert self.pool.free == self.pool.total, "blocks are missing"
                return
            self.step()
        raise AssertionError(f"still at work after {STEPS_MAX} steps")

    def _note(self, output: Output) -> None:
        record = self.records[output.sequence_id]
        assert record.finish is None, "something came after the end"
        assert not record.freed, "something came after it was freed"
        record.ids += output.ids
        record.texts += output.texts
        record.finish = output.finish
        if output.cached_tokens is not None:
            assert record.cached_tokens is None, "the first token came twice"
            record.cached_tokens = output.cached_tokens
        if output.finish is not None:
            record.engine_s = output.engine_s
