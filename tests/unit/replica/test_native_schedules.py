"""Random schedules on the native runner: whatever the scheduler makes of them, each reply is the one it is alone."""

import random
from collections.abc import Iterator
from functools import cache

import pytest

from services.replica.core.detokenize import Vocabulary
from services.replica.core.scheduler import NotTaken
from services.replica.core.sequence import Demand
from services.replica.model.native.kernels import KernelModel
from services.replica.model.native_runner import NativeRunner
from services.replica.runner import RunnerInfo
from shared.messages import Sampling
from shared.outcomes import EndReason
from shared.tiers import LANE_ORDER, Tier
from tests.unit.replica.machine import Machine
from tests.unit.replica.native_models import CONTEXT, KINDS, VARIANTS, VOCAB, kernel_model, needs_kernels, tiny_file

pytestmark = needs_kernels
SCHEDULES = 504
SEEDS_PER_TEST = 42
BLOCKS_MAX = 40
BUDGET = 30  # replies that grow into more blocks: someone has to make room
LENGTHS = (1, 5, 15, 16, 17, 31, 32, 33, 47, 48, 60, 125, 150)  # the last two end behind a tile of the kernels
VOCABULARY = Vocabulary([bytes([97 + token % 26]) for token in range(VOCAB)], frozenset(range(290, 300)))
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9),
    Sampling(temperature=1.2, top_p=0.8, top_k=40),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
)
CASES = [(kind, precise) for kind in KINDS for precise in (False, True)]


def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of a family share their beginning."""
    rng = random.Random(family)
    return tuple(rng.randrange(290) for _ in range(max(LENGTHS)))[:length]


class Bench:
    """One model, many schedules: what stands in its blocks from the last one must not matter. A second one is alone."""

    def __init__(self, model: KernelModel, solo: KernelModel) -> None:
        self.model, self.solo = model, solo
        self.alone = cache(self._alone)

    def machine(self, model: KernelModel, blocks: int, **changes: int) -> Machine:
        runner = NativeRunner(model, RunnerInfo("tiny", blocks, CONTEXT, VOCAB))
        return Machine(blocks=blocks, runner=runner, vocabulary=VOCABULARY, **changes)

    def _alone(self, family: int, length: int, how: int) -> tuple[tuple[int, ...], EndReason]:
        machine = self.machine(self.solo, BLOCKS_MAX, step_tokens_max=100)
        machine.submit(demand("solo", family, length, how))
        machine.run()
        record = machine.records["solo"]
        assert record.finish is not None
        return tuple(record.ids), record.finish

    def play(self, seed: int) -> Machine:
        rng = random.Random(seed)
        running_max = rng.choice([1, 2, 3, 6, 12])
        step = running_max + rng.choice([3, 8, 16, 50])
        machine = self.machine(
            self.model,
            rng.choice([6, 7, 12, 14, BLOCKS_MAX]),
            running_max=running_max,
            step_tokens_max=step,
            mixed_tokens_max=rng.choice([1, min(5, step), step]),
            reserve_blocks=rng.choice([0, 1, 3]),
        )
        expected: dict[str, tuple[tuple[int, ...], EndReason]] = {}
        to_come = rng.randrange(3, 12)
        while to_come or machine.scheduler.has_work:
            if to_come and rng.random() < 0.5:
                to_come -= 1
                case = rng.randrange(4), rng.choice(LENGTHS), rng.randrange(len(SAMPLINGS))
                ids, reason = self.alone(*case)
                cut = rng.choice([0, 0, rng.randrange(len(ids) + 1)])
                wanted = demand(f"s{to_come}", *case, written=ids[:cut], tier=rng.choice(LANE_ORDER))
                if not isinstance(machine.submit(wanted), NotTaken):
                    expected[wanted.sequence_id] = ids[cut:], reason
            if expected and rng.random() < 0.06:
                machine.cancel(rng.choice(sorted(expected)))
            machine.step()
            assert len(machine.plans) < 2_000, "livelock"
        machine.run()
        for name, (ids, reason) in expected.items():
            record = machine.records[name]
            assert tuple(record.ids) == ids[: len(record.ids)], f"{name} of schedule {seed} is another reply"
            assert record.freed or (tuple(record.ids), record.finish) == (ids, reason), f"{name} of schedule {seed}"
        return machine


def demand(name: str, family: int, length: int, how: int, **changes) -> Demand:
    fields = {"tier": Tier.PAID, **changes}
    ids = prompt(family, length)
    return Demand(sequence_id=name, prompt=ids, budget=BUDGET, sampling=SAMPLINGS[how], seed=family, **fields)


@pytest.fixture(params=range(0, SCHEDULES, SEEDS_PER_TEST))
def bench(request: pytest.FixtureRequest, tmp_path) -> Iterator[tuple[Bench, int]]:
    kind, precise = CASES[request.param // SEEDS_PER_TEST % len(CASES)]
    path = tiny_file(tmp_path / "tiny.gguf", KINDS[kind])
    with (
        kernel_model(path, VARIANTS[0], precise=precise, threads=2, blocks=BLOCKS_MAX) as model,
        kernel_model(path, VARIANTS[0], precise=precise, blocks=BLOCKS_MAX) as solo,
    ):
        yield Bench(model, solo), request.param


def test_every_schedule_gives_every_reply_as_if_it_were_alone(bench: tuple[Bench, int]):
    """Chunked, cached, preempted, cancelled beside and continued, greedy and drawn: token for token the same."""
    played, first = bench
    machines = [played.play(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert any(machine.preempted for machine in machines), "no schedule was short of blocks"
    assert any((record.cached_tokens or 0) > 0 for machine in machines for record in machine.records.values())
