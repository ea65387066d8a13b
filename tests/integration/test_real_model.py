"""The engine on the real model: what it says, and that batching, paging and chunking change none of it."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.replica.core.detokenize import Vocabulary
from services.replica.core.sequence import Demand
from services.replica.engine_messages import EngineConfig, SubmitSequence
from services.replica.engine_process import EngineHandle
from services.replica.model.config import ModelConfig
from services.replica.model.load import open_checkpoint
from services.replica.model.loader import Weights, load_weights
from services.replica.model.torch_runner import TorchRunner
from services.replica.model.transformer import Transformer
from services.replica.runner import RunnerInfo
from shared.messages import Sampling, pack_ids
from shared.outcomes import EndReason
from shared.tiers import LANE_ORDER, Tier
from shared.tokenizer import Tokenizer, load_tokenizer
from tests.unit.replica.machine import Machine
from tests.unit.replica.naive import naive_logits

MODEL_FILE = Path(
    os.environ.get("CHORUS_MODEL_FILE", Path(__file__).parents[2] / ".models/SmolLM2-135M-Instruct.Q4_1.gguf")
)
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not MODEL_FILE.exists(), reason=f"no model file at {MODEL_FILE}: run `chorus models fetch`"),
    pytest.mark.timeout(300),
]
GREEDY = Sampling(temperature=0.0)
BLOCKS = 40  # few, so that sequences are preempted and recomputed
TIE = 1e-3  # logits nearer than this may change places with the order of float32 sums

OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans",
    "To make a good cup of tea, first",
    "The opposite of hot is",
    "A triangle has three sides. A square has",
    "SELECT name FROM users WHERE",
    "My favourite season is autumn, because the",
    "Photosynthesis is the process by which",
    "Two plus two equals",
    "The quick brown fox jumps over the",
    "Mount Everest is the highest",
    "She opened the door slowly and saw",
    "The mitochondria is the powerhouse of",
    "Q: Who wrote Romeo and Juliet?\nA:",
    "Ein Hund ist ein Tier. Eine Rose ist eine",
)


@dataclass(frozen=True)
class Model:
    tokenizer: Tokenizer
    config: ModelConfig
    weights: Weights

    def machine(self, **changes: int) -> Machine:
        forward = Transformer(self.config, self.weights, blocks=BLOCKS, context=512)
        runner = TorchRunner(forward, RunnerInfo("real", BLOCKS, 512, self.config.vocab))
        vocabulary = Vocabulary(self.tokenizer.token_bytes, self.tokenizer.stop_ids)
        return Machine(blocks=BLOCKS, runner=runner, vocabulary=vocabulary, context_max=512, **changes)


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = load_tokenizer(MODEL_FILE)
    with open_checkpoint(MODEL_FILE) as checkpoint:
        return Model(tokenizer, checkpoint.config, load_weights(checkpoint, lambda _: None))


def is_naive_greedy(model: Model, prompt: list[int], written: list[int]) -> bool:
    """Each written token is the best one after all before it, recomputed in one piece without cache or batch."""
    logits = naive_logits(model.config, model.weights, [*prompt, *written[:-1]], rows=len(written))
    chosen = logits.gather(1, torch.tensor(written)[:, None]).squeeze(1)
    return bool((logits.max(dim=-1).values - chosen < TIE).all())


def test_paged_batched_chunked_greedy_is_naive_greedy(model: Model):
    """Twenty prompts side by side, in chunks, short of blocks, write what each writes alone when recomputed whole."""
    machine = model.machine(running_max=8, step_tokens_max=40, mixed_tokens_max=24, reserve_blocks=0)
    prompts = {}
    for number, opening in enumerate(OPENINGS):
        prompts[opening] = model.tokenizer.encode(opening) * (1 + 3 * (number % 3 == 0))
        tier = LANE_ORDER[number % 3]
        machine.submit(
            Demand(sequence_id=opening, tier=tier, prompt=prompts[opening], budget=20, sampling=GREEDY, seed=0)
        )
    machine.run()
    wrong = [
        opening for opening in OPENINGS if not is_naive_greedy(model, prompts[opening], machine.records[opening].ids)
    ]
    assert wrong == []
    assert any(len(plan.chunks) > 4 for plan in machine.plans)


def test_the_oracle_would_notice(model: Model):
    """One wrong token among right ones is no naive greedy reply."""
    prompt = model.tokenizer.encode(OPENINGS[0])
    assert is_naive_greedy(model, prompt, model.tokenizer.encode(" Paris."))
    assert not is_naive_greedy(model, prompt, model.tokenizer.encode(" Rome."))


def test_a_continuation_writes_what_the_whole_reply_holds(model: Model):
    """Cut in the middle and taken up by another engine, a sampled reply goes on token for token."""
    prompt = model.tokenizer.encode(OPENINGS[1])
    sampling = Sampling(temperature=0.8, top_p=0.95)
    whole = model.machine()
    whole.submit(Demand(sequence_id="a", tier=Tier.PAID, prompt=prompt, budget=14, sampling=sampling, seed=11))
    whole.run()
    ids, texts = whole.records["a"].ids, whole.records["a"].texts
    rest = model.machine()
    rest.submit(
        Demand(sequence_id="a", tier=Tier.PAID, prompt=prompt, written=ids[:6], budget=14, sampling=sampling, seed=11)
    )
    rest.run()
    assert (rest.records["a"].ids, rest.records["a"].texts) == (ids[6:], texts[6:])


async def test_the_engine_process_answers_a_chat(model: Model):
    """Started from the file, it opens with the chat template, answers, and ends with the model's own stop token."""
    template = ImmutableSandboxedEnvironment().from_string(model.tokenizer.chat_template)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    rendered = template.render(messages=messages, add_generation_prompt=True)
    prompt = model.tokenizer.encode_template(rendered)
    assert prompt[0] == model.tokenizer.special_ids["<|im_start|>"]
    assert rendered.endswith("<|im_start|>assistant\n")

    engine = EngineHandle()
    ready = await engine.start(EngineConfig(model_file=str(MODEL_FILE), threads=2, blocks=64, context_max=512))
    try:
        assert ready.tokenizer_revision == model.tokenizer.revision
        assert (ready.context_max, ready.blocks_total) == (512, 64)
        assert engine.submit(
            SubmitSequence(
                sequence_id="chat",
                tier=Tier.PAID,
                prompt=pack_ids(prompt),
                budget=60,
                sampling=Sampling(temperature=0.0),
            )
        )
        text, finish = "", None
        async with asyncio.timeout(120):
            while finish is None:
                for report in await engine.reports(timeout_s=10.0):
                    for tokens in report.tokens:
                        text += "".join(tokens.texts)
                        finish = tokens.finish
        assert "Paris" in text
        assert finish is EndReason.STOP_TOKEN
        assert "<|" not in text
        assert engine.stats.blocks_free == 64
    finally:
        await engine.stop()
