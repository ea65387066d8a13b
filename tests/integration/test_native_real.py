"""The native kernels on the real model: near float32, and every schedule gives every reply as if it were alone."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import SampleParams
from services.replica.core.randomness import unit
from services.replica.core.sequence import Demand
from services.replica.model.config import ModelConfig
from services.replica.model.load import open_checkpoint
from services.replica.model.native.kernels import BEST, Draw, KernelModel, Rows
from services.replica.model.native_runner import NativeRunner, build_model
from services.replica.model.sampler import sample
from services.replica.runner import RunnerInfo
from shared.messages import Sampling
from shared.tiers import LANE_ORDER, Tier
from shared.tokenizer import Tokenizer, load_tokenizer
from tests.unit.replica.machine import Machine
from tests.unit.replica.native_models import VARIANTS, needs_kernels

MODEL_FILE = Path(
    os.environ.get("CHORUS_MODEL_FILE", Path(__file__).parents[2] / ".models/SmolLM2-135M-Instruct.Q4_1.gguf")
)
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not MODEL_FILE.exists(), reason=f"no model file at {MODEL_FILE}: run `chorus models fetch`"),
    pytest.mark.timeout(300),
    needs_kernels,
]
BLOCKS, CONTEXT, BUDGET = 24, 512, 10
SCHEDULES = 20
TEXT = (
    "The harbour lay quiet before the morning. A boat came in with its nets empty, and nobody on the quay asked why. "
    "Later, when the market opened, the talk was of prices and of the weather, as on every other day of the year."
)
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.9), Sampling(temperature=0.8, top_p=0.9, top_k=50))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_FILE)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    with open_checkpoint(MODEL_FILE) as checkpoint:
        return checkpoint.config


def built(*, precise: bool = False) -> KernelModel:
    with open_checkpoint(MODEL_FILE) as checkpoint:
        return build_model(
            checkpoint,
            VARIANTS[0],
            context=CONTEXT,
            blocks=BLOCKS,
            threads=2,
            precise=precise,
            progress=lambda _: None,
        )


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[KernelModel, KernelModel]]:
    """One for the schedules, one for replies alone."""
    pair = built(), built()
    yield pair
    for model in pair:
        model.close()


def machine(model: KernelModel, tokenizer: Tokenizer, vocab: int, blocks: int, **changes: int) -> Machine:
    runner = NativeRunner(model, RunnerInfo("real", blocks, CONTEXT, vocab))
    vocabulary = Vocabulary(tokenizer.token_bytes, tokenizer.stop_ids)
    return Machine(blocks=blocks, runner=runner, vocabulary=vocabulary, context_max=CONTEXT, **changes)


def test_twenty_schedules_give_every_reply_as_if_it_were_alone(models, tokenizer: Tokenizer, config: ModelConfig):
    """Shared prefixes, chunks, preemption, continuations: the same tokens as in an engine that has nothing else to do."""
    ids = tokenizer.encode(TEXT)
    busy, quiet = models
    alone: dict[tuple[int, int, int], list[int]] = {}

    def demand(name: str, case: tuple[int, int, int], written: list[int], tier: Tier) -> Demand:
        prompt = ids[: case[0]] + ids[case[1] : case[1] + 4]
        sampling = SAMPLINGS[case[2]]
        return Demand(
            sequence_id=name, tier=tier, prompt=prompt, written=written, budget=BUDGET, sampling=sampling, seed=case[1]
        )

    preempted = 0
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        step = rng.choice([12, 30, 60])
        played = machine(
            busy, tokenizer, config.vocab, rng.choice([4, 6, BLOCKS]), running_max=6, step_tokens_max=step,
            mixed_tokens_max=rng.choice([3, step]), reserve_blocks=rng.choice([0, 1]),
        )  # fmt: skip
        expected: dict[str, list[int]] = {}
        for number in range(rng.randrange(2, 6)):
            case = rng.choice([8, 16, 30]), rng.randrange(0, 12), rng.randrange(len(SAMPLINGS))
            if case not in alone:
                solo = machine(quiet, tokenizer, config.vocab, BLOCKS, step_tokens_max=100)
                solo.submit(demand("solo", case, [], Tier.PAID))
                solo.run()
                alone[case] = solo.records["solo"].ids
            cut = rng.choice([0, 0, rng.randrange(len(alone[case]))])
            played.submit(demand(f"s{number}", case, alone[case][:cut], rng.choice(LANE_ORDER)))
            expected[f"s{number}"] = alone[case][cut:]
            for _ in range(rng.randrange(3)):
                played.step()
        played.run()
        assert {name: record.ids for name, record in played.records.items()} == expected, f"schedule {seed}"
        preempted += len(played.preempted)
    assert preempted, "no schedule was short of blocks"


def test_the_kernels_draw_what_the_sampler_draws(models, tokenizer: Tokenizer):
    """Over the whole of a real vocabulary, at all temperatures and cuts."""
    cuts = (
        {"temperature": 0.3, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 2.0, "top_p": 0.99},
        {"temperature": 2.0, "top_p": 0.9999},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 2.0, "top_k": 20_000, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0},
    )
    ids = tokenizer.encode(TEXT)
    for fields in cuts:
        params = [SampleParams(Sampling(**fields), 5, n) for n in range(BLOCKS)]
        rows = [Rows(ids[: 1 + n % 15], 0, (n,), Draw(unit=unit(5, n), **fields)) for n in range(BLOCKS)]
        drawn, logits = models[0].forward(rows, logits=True)
        same = sum(a == b for a, b in zip(drawn.tolist(), sample(logits, params), strict=True))
        assert same >= BLOCKS - 1, fields


def test_greedy_says_what_it_should(models, tokenizer: Tokenizer):
    """The kernels read the file rightly: a fact comes out."""
    prompt = tokenizer.encode("The capital of France is")
    best, _ = models[0].forward([Rows(prompt, 0, (0,), BEST)], logits=False)
    assert tokenizer.token_bytes[int(best[0])] == b" Paris"


def test_precise_is_nearer_to_itself_than_fast(models, tokenizer: Tokenizer):
    """Fast differs from precise by a few hundredths of the logits' spread, in one step of the whole text."""
    prompt = tokenizer.encode(TEXT)
    rows = [Rows(prompt, 0, tuple(range(BLOCKS)), BEST)]
    precise = built(precise=True)
    try:
        wanted = precise.forward(rows, logits=True)[1]
    finally:
        precise.close()
    found = models[0].forward(rows, logits=True)[1]
    assert wanted is not None
    assert found is not None
    error = float(np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std())
    assert 0 < error < 0.1
