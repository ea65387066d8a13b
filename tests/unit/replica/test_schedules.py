"""Random schedules through the real path, tiny model included, against the oracle that recomputes everything.

Each seed draws a pool size, limits, arrivals in all lanes, shared prefixes, cancels, and continuations cut at any token;
whatever the scheduler made of it, every reply must be the one that the model gives alone.
"""

import random
from functools import cache

import pytest
import torch

from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import SampleParams
from services.replica.core.scheduler import NotTaken
from services.replica.core.sequence import Demand
from services.replica.model.sampler import sample
from services.replica.model.torch_runner import TorchRunner
from services.replica.model.transformer import Transformer
from services.replica.runner import RunnerInfo
from shared.messages import Sampling
from shared.outcomes import EndReason
from shared.tiers import LANE_ORDER
from tests.unit.replica.machine import Machine
from tests.unit.replica.naive import naive_logits, random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = {dtype: random_weights(CONFIG, dtype=dtype) for dtype in (torch.float64, torch.float32)}
VOCABULARY = Vocabulary([bytes([97 + token % 26]) for token in range(CONFIG.vocab)], frozenset(range(290, 300)))
SCHEDULES = 240
SEEDS_PER_TEST = 20
BUDGET = 36
LENGTHS = (1, 5, 15, 16, 17, 31, 32, 33, 47, 48, 60)
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9),
    Sampling(temperature=1.2, top_p=0.8, top_k=40),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
)


def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of a family share their beginning."""
    rng = random.Random(family)
    return tuple(rng.randrange(290) for _ in range(max(LENGTHS)))[:length]


@cache
def alone(family: int, length: int, how: int, dtype: torch.dtype) -> tuple[tuple[int, ...], EndReason]:
    """(ids, reason) of the reply that this prompt has when nothing else exists."""
    ids, sampling, written = list(prompt(family, length)), SAMPLINGS[how], []
    while len(written) < BUDGET:
        params = SampleParams(sampling, family, len(written), tuple(ids), tuple(written))
        written += sample(naive_logits(CONFIG, WEIGHTS[dtype], [*ids, *written]), [params])
        if written[-1] in VOCABULARY.stop_ids:
            return tuple(written), EndReason.STOP_TOKEN
    return tuple(written), EndReason.MAX_TOKENS


def build(rng: random.Random, dtype: torch.dtype) -> Machine:
    blocks = rng.choice([6, 7, 8, 10, 24])
    running_max = rng.choice([1, 3, 4, 6])
    step = running_max + rng.choice([3, 8, 16, 50])
    forward = Transformer(CONFIG, WEIGHTS[dtype], blocks=blocks, context=CONFIG.context)
    return Machine(
        blocks=blocks,
        runner=TorchRunner(forward, RunnerInfo("tiny", blocks, CONFIG.context, CONFIG.vocab)),
        vocabulary=VOCABULARY,
        running_max=running_max,
        step_tokens_max=step,
        mixed_tokens_max=min(step, rng.choice([1, 5, step])),
        reserve_blocks=rng.choice([0, 0, 1, 3]),
    )


def play(seed: int, dtype: torch.dtype = torch.float64) -> Machine:
    """One random schedule, checked; returns the machine for what it went through."""
    rng = random.Random(seed)
    machine = build(rng, dtype)
    expected: dict[str, tuple[tuple[int, ...], EndReason]] = {}
    to_come = rng.randrange(3, 9)
    while to_come or machine.scheduler.has_work:
        if to_come and rng.random() < 0.6:
            to_come -= 1
            name = f"s{to_come}"
            case = rng.randrange(4), rng.choice(LENGTHS), rng.randrange(len(SAMPLINGS))
            ids, reason = alone(*case, dtype)
            cut = rng.choice([0, 0, rng.randrange(len(ids) + 1)])
            wanted = Demand(
                sequence_id=name,
                tier=rng.choice(LANE_ORDER),
                prompt=prompt(*case[:2]),
                written=ids[:cut],
                budget=BUDGET,
                sampling=SAMPLINGS[case[2]],
                seed=case[0],
            )
            if not isinstance(machine.submit(wanted), NotTaken):
                expected[name] = ids[cut:], reason
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


@pytest.mark.parametrize("first", range(0, SCHEDULES, SEEDS_PER_TEST))
def test_every_schedule_gives_every_reply_as_if_it_were_alone(first: int):
    """Chunked, cached, preempted, cancelled beside and continued, greedy and drawn: token for token the same."""
    machines = [play(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert any(machine.preempted for machine in machines), "no schedule was short of blocks"
    assert any((record.cached_tokens or 0) > 0 for machine in machines for record in machine.records.values())
