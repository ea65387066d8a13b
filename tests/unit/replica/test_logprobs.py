"""Log probabilities inside a replica: what a runner tells of its draws, and what the engine reports of it."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from services.replica.core.plan import SampleParams, SeqChunk, StepPlan
from services.replica.model.native.kernels import KernelModel
from services.replica.model.native_runner import NativeRunner
from services.replica.runner import RunnerInfo
from shared.messages import Sampling
from tests.fuzz.engine import VOCABULARY, TableRunner
from tests.unit.replica.machine import Machine, demand
from tests.unit.replica.native_models import KINDS, VARIANTS, VOCAB, kernel_model, needs_kernels, tiny_file

PLAIN = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.9, top_k=7),
    Sampling(temperature=0.7, logit_bias={5: 3.0}, presence_penalty=0.5),
)


@pytest.fixture
def model(tmp_path) -> Iterator[KernelModel]:
    with kernel_model(tiny_file(tmp_path / "tiny.gguf", KINDS["Q4_1"]), VARIANTS[0], blocks=64) as made:
        yield made


def plan(logprobs: int | None) -> StepPlan:
    chunks = []
    for at in range(16):
        kind = PLAIN[at % len(PLAIN)]
        fields = {name: getattr(kind, name) for name in Sampling.__struct_fields__}
        ids = tuple((at * 7 + place) % 290 for place in range(1 + at))
        params = SampleParams(Sampling(**{**fields, "logprobs": logprobs}), 7, at, ids, ())
        chunks.append(SeqChunk(str(at), 1, 0, ids, (2 * at, 2 * at + 1), params))
    return StepPlan(1, tuple(chunks))


@needs_kernels
def test_asking_for_log_probabilities_changes_no_token(model: KernelModel):
    """Rows that the kernels draw and rows that the sampler draws: the same tokens, asked or not; told alone or in a batch."""
    runner = NativeRunner(model, RunnerInfo("tiny", 64, 512, VOCAB))
    silent, told = runner.run(plan(None)), runner.run(plan(3))
    assert list(told.sampled) == list(silent.sampled)
    assert not silent.odds
    alone = [runner.run(StepPlan(1, (chunk,))).odds[0] for chunk in plan(3).chunks]
    assert list(told.odds) == alone
    for odds, token in zip(told.odds, told.sampled, strict=True):
        assert odds is not None
        assert len(odds.top) == 3
        assert all(before[1] >= after[1] for before, after in pairwise(odds.top))
        assert dict(odds.top).get(token, odds.logprob) == odds.logprob


def test_the_engine_tells_them_with_the_tokens_bytes():
    """Each sampled token has its own; a sequence beside it that did not ask has none."""
    machine = Machine(runner=TableRunner(1), vocabulary=VOCABULARY)
    asks = Sampling(temperature=1.0, ignore_eos=True, logprobs=2)
    told = []
    machine.submit(demand("a", [9, 8, 7], budget=5, sampling=asks))
    machine.submit(demand("b", [9, 8, 7], budget=5, sampling=Sampling(ignore_eos=True)))
    while machine.scheduler.has_work:
        step = machine.scheduler.plan(0.0)
        told += machine.scheduler.commit(step, machine.runner.run(step), 0.0)
    for output in told:
        assert len(output.logprobs) == (output.sequence_id == "a")
        for odds in output.logprobs:
            assert odds.token == VOCABULARY.token_bytes[output.ids[0]]
            assert len(odds.top) in (0, 2)
    assert len(told) == 10
