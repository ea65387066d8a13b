"""The real model under random schedules, and its logits alone and in any company."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from services.replica.core.detokenize import Vocabulary
from services.replica.core.sequence import Demand
from services.replica.model.native.kernels import BEST, KernelModel, Rows
from services.replica.model.native_runner import NativeRunner
from services.replica.runner import RunnerInfo
from shared.messages import Sampling
from shared.tiers import LANE_ORDER, Tier
from shared.tokenizer import Tokenizer
from tests.integration.test_native_real import BLOCKS, CONTEXT, TEXT
from tests.unit.replica.machine import Machine

BUDGET = 10
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9),
    Sampling(temperature=0.8, top_p=0.9, top_k=50),
    Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2),
)
Case = tuple[int, int, int]  # length of the shared head, place of the own tail, sampling


class Real:
    """`busy` runs the schedules, `quiet` the same replies alone."""

    def __init__(self, busy: KernelModel, quiet: KernelModel, tokenizer: Tokenizer) -> None:
        self._busy, self._quiet = busy, quiet
        self._vocabulary = Vocabulary(tokenizer.token_bytes, tokenizer.stop_ids)
        self._ids = tokenizer.encode(TEXT * 3)
        self._alone: dict[Case, list[int]] = {}

    def play(self, seed: int, told: Counter[str]) -> None:
        """One random schedule; AssertionError when any reply is not the one it is alone, or a block is missing."""
        rng = random.Random(seed)
        step = rng.choice([12, 30, 60])
        machine = self._machine(
            self._busy,
            rng.choice([11, 13, BLOCKS]),
            running_max=6,
            step_tokens_max=step,
            mixed_tokens_max=rng.choice([3, step]),
            reserve_blocks=rng.choice([0, 1]),
        )
        expected: dict[str, list[int]] = {}
        for number in range(rng.randrange(3, 7)):
            case = rng.choice([8, 30, 125, 140]), rng.randrange(12), rng.randrange(len(SAMPLINGS))
            whole = self.alone(case)
            cut = rng.choice([0, 0, rng.randrange(len(whole))])
            machine.submit(self._demand(f"s{number}", case, whole[:cut], rng.choice(LANE_ORDER)))
            expected[f"s{number}"] = whole[cut:]
            told["continuations"] += cut > 0
            for _ in range(rng.randrange(4)):
                machine.step()
            if rng.random() < 0.15:
                machine.cancel(rng.choice(sorted(expected)))
        machine.run()
        for name, record in machine.records.items():
            assert record.ids == expected[name][: len(record.ids)], f"{name} of schedule {seed} is another reply"
            assert record.freed or record.ids == expected[name], f"{name} of schedule {seed} is cut short"
            told["cancelled"] += record.freed
            told["cached_tokens"] += record.cached_tokens or 0
        told["schedules"] += 1
        told["sequences"] += len(expected)
        told["preemptions"] += len(machine.preempted)

    def alone(self, case: Case) -> list[int]:
        if case not in self._alone:
            machine = self._machine(self._quiet, BLOCKS, step_tokens_max=100)
            machine.submit(self._demand("solo", case, [], Tier.PAID))
            machine.run()
            self._alone[case] = machine.records["solo"].ids
        return self._alone[case]

    def _demand(self, name: str, case: Case, written: Sequence[int], tier: Tier) -> Demand:
        head, tail, how = case
        prompt = self._ids[:head] + self._ids[tail : tail + 4]
        return Demand(
            sequence_id=name,
            tier=tier,
            prompt=prompt,
            written=written,
            budget=BUDGET,
            sampling=SAMPLINGS[how],
            seed=tail,
        )

    def _machine(self, model: KernelModel, blocks: int, **changes: int) -> Machine:
        runner = NativeRunner(model, RunnerInfo("real", blocks, CONTEXT, len(self._vocabulary)))
        return Machine(blocks=blocks, runner=runner, vocabulary=self._vocabulary, context_max=CONTEXT, **changes)


def same_logits(model: KernelModel, ids: Sequence[int], trials: int) -> int:
    """Rows compared bit for bit: the last logits of a prompt alone, against it chunked at random beside random others."""
    rng = random.Random(1)
    prompt = list(ids[:40])
    alone = model.forward([Rows(prompt, 0, (0, 1, 2), BEST)], logits=True)[1]
    assert alone is not None
    for _ in range(trials):
        at, found = 0, None
        while at < len(prompt):
            count = min(rng.choice([1, 3, 16, 40]), len(prompt) - at)
            others = [
                Rows(list(ids[n : n + rng.choice([1, 1, 5])]), 0, (6 + n,), BEST) for n in range(rng.randrange(12))
            ]
            place = rng.randrange(len(others) + 1)
            others.insert(place, Rows(prompt[at : at + count], at, (3, 4, 5), BEST))
            found = model.forward(others, logits=True)[1]
            at += count
        assert found is not None
        assert np.array_equal(found[place], alone[0]), "a row's logits depend on its neighbours"
    return trials
