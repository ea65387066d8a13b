"""The step loop around a scripted runner, without a process."""

import random
from collections import deque
from itertools import pairwise

import pytest

from services.replica.core.block_pool import BlockPool
from services.replica.core.plan import StepPlan
from services.replica.core.scheduler import Scheduler, WhyNot
from services.replica.core.step_fit import StepSample, StepTimes
from services.replica.engine import Engine, run_engine
from services.replica.engine_messages import (
    CancelSequence,
    Command,
    EngineConfig,
    FrameBuffer,
    StepReport,
    StopEngine,
    SubmitSequence,
    frame,
)
from services.replica.stub_runner import StubRunner, scripted_token
from shared.messages import Sampling, pack_ids
from shared.outcomes import EndReason
from shared.tiers import Tier
from tests.unit.replica.machine import VOCABULARY, Machine, Script, demand, limits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Mark:
    def __init__(self) -> None:
        self.running: tuple[float, float] | None = None
        self.begun = 0

    def begin(self, now: float, predicted_s: float) -> None:
        self.running, self.begun = (now, predicted_s), self.begun + 1

    def end(self) -> None:
        self.running = None


def engine(runner=None, mark: Mark | None = None, **changes: int) -> Engine:
    pool = BlockPool(64)
    return Engine(
        scheduler=Scheduler(pool=pool, vocabulary=VOCABULARY, limits=limits(**changes)),
        runner=runner or Script(),
        step_times=StepTimes([StepSample(1, 1, 0.002)]),
        marker=mark or Mark(),
        clock=Clock(),
    )


def submit(name: str, length: int = 20, budget: int = 3, **fields) -> SubmitSequence:
    sampling = fields.pop("sampling", Sampling(seed=5))
    prompt = pack_ids(40 + at % 200 for at in range(length))
    return SubmitSequence(sequence_id=name, tier=Tier.FREE, prompt=prompt, budget=budget, sampling=sampling, **fields)


def finish(stepped: Engine, commands: list[Command]) -> list[StepReport]:
    reports = [stepped.step(commands)]
    while not stepped.idle:
        reports.append(stepped.step([]))
    return [report for report in reports if report is not None]


def test_a_sequence_goes_in_and_its_tokens_come_out_step_by_step():
    """One report a step: ids, text per token, what the cache held with the first, the reason and cost with the last."""
    reports = finish(engine(), [submit("a")])
    tokens = [report.tokens[0] for report in reports]
    assert [token.ids for token in tokens] == [(scripted_token(5, at),) for at in range(3)]
    assert [token.texts[0] for token in tokens] == [
        VOCABULARY.token_bytes[scripted_token(5, at)].decode() for at in range(3)
    ]
    assert [token.cached_tokens for token in tokens] == [0, None, None]
    assert [token.finish for token in tokens] == [None, None, EndReason.MAX_TOKENS]
    assert tokens[2].engine_s > 0
    assert tokens[0].queued_s is not None
    assert [len(report.stored) for report in reports] == [16, 0, 0]


def test_the_report_of_the_last_step_shows_the_blocks_free():
    """Health is read from the newest report: after the end it must not still count what was held."""
    reports = finish(engine(), [submit("a"), submit("b")])
    assert reports[0].stats.blocks_free == 60
    assert reports[0].stats.running == 2
    last = reports[-1].stats
    assert (last.blocks_free, last.running, last.waiting) == (64, 0, 0)
    assert (last.sampled_tokens, last.computed_tokens, last.steps) == (6, 44, 3)


def test_nothing_to_do_is_no_step():
    """An idle engine makes no report, and its runner is never called with an empty plan."""
    assert engine().step([]) is None


def test_refusals_and_finished_continuations_are_answered_in_the_same_step():
    """Whoever submits hears in the next report, even when nothing runs."""
    stepped = engine()
    over = submit("over", budget=2, written=pack_ids([300, 301]))
    report = stepped.step([over, submit("big", length=5_000)])
    assert report is not None
    assert [(token.sequence_id, token.ids, token.finish) for token in report.tokens] == [
        ("over", (), EndReason.MAX_TOKENS)
    ]
    assert [(refused.sequence_id, refused.reason) for refused in report.refused] == [("big", WhyNot.NEVER_FITS)]
    assert report.stats.step_tokens == 0


def test_a_cancel_is_confirmed_by_the_next_report():
    """The blocks are free when the report says so, and no token of the sequence comes with or after it."""
    stepped = engine()
    stepped.step([submit("a", budget=50), submit("b", budget=2)])
    report = stepped.step([CancelSequence(sequence_id="a"), CancelSequence(sequence_id="nobody")])
    assert report is not None
    assert [freed.sequence_id for freed in report.freed] == ["a", "nobody"]
    assert report.freed[0].engine_s > 0
    assert [token.sequence_id for token in report.tokens] == ["b"]
    assert report.stats.blocks_free == 64
    assert stepped.idle


def test_a_running_step_is_marked():
    """While the runner runs, the shared marker says since when and for how long; between steps it says nothing."""
    mark = Mark()

    class Looking(Script):
        def run(self, plan: StepPlan):
            assert mark.running is not None
            assert mark.running[1] > 0
            return super().run(plan)

    finish(engine(Looking(), mark), [submit("a")])
    assert mark.begun == 3
    assert mark.running is None


def test_the_loop_stops_when_told_and_waits_only_when_idle():
    """With work to do it looks at its inbox without waiting; without any it blocks there."""
    waited: list[bool] = []
    script: deque[list[Command]] = deque([[submit("a")], [], [], [submit("b"), StopEngine()]])

    class Inbox:
        def take(self, *, wait: bool) -> list[Command]:
            waited.append(wait)
            return script.popleft()

    class Outbox(list):
        put = list.append

    outbox = Outbox()
    run_engine(engine(), Inbox(), outbox)
    assert waited == [True, False, False, True]
    assert len(outbox) == 4


def test_frames_survive_any_cut():
    """Messages come out whole and in order, however the bytes were delivered; a foreign length is refused."""
    messages = [submit(f"s{number}", length=number * 50) for number in range(1, 20)]
    data = b"".join(map(frame, messages))
    rng = random.Random(1)
    buffer, bodies, at = FrameBuffer(), [], 0
    while at < len(data):
        size = rng.randrange(1, 900)
        bodies += buffer.feed(data[at : at + size])
        at += size
    assert [frame_of(body) for body in bodies] == [frame(message) for message in messages]
    with pytest.raises(ValueError, match="frame of"):
        buffer.feed(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="more than a frame"):
        frame(EngineConfig(model_file="x" * (1 << 25)))


def frame_of(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


# --- the stub runner -------------------------------------------------------------------------------------


def stub(tps: float, clock: Clock) -> StubRunner:
    return StubRunner(tps=tps, blocks_total=64, context_max=512, clock=clock, wait=clock.sleep)


def test_a_stub_reply_is_a_function_of_its_seed():
    """Whatever else runs, whenever it runs, a seed's reply is the same; another seed's is another."""
    texts = {}
    for seed, neighbours in ((1, 0), (1, 3), (2, 1)):
        machine = Machine(runner=stub(0.0, Clock()))
        for number in range(neighbours):
            machine.submit(demand(f"n{number}", 30, budget=9))
        machine.submit(demand("a", 10 + neighbours, budget=8, seed=seed))
        machine.run()
        texts[seed, neighbours] = machine.records["a"].text
    assert texts[1, 0] == texts[1, 3] != texts[2, 1]


def test_a_paced_stub_takes_one_step_per_interval():
    """The first token comes at once; then each step lasts 1 / tps, and a pause is not caught up with a burst."""
    clock = Clock()
    machine = Machine(runner=stub(10.0, clock))
    machine.submit(demand("a", 5, budget=6))
    starts = []
    while machine.scheduler.has_work:
        if len(starts) == 4:
            clock.sleep(5.0)
        machine.step()
        starts.append(clock.now)
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert starts[0] < 100.1
    assert gaps[:3] == pytest.approx([0.1] * 3, abs=0.005)
    assert gaps[4] == pytest.approx(0.1, abs=0.005)
