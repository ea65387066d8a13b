"""The real model against transformers: the same tokens, as `make agreement` kept them; it is not needed here."""

import json
import os
from pathlib import Path

import pytest

from services.replica.core.plan import SampleParams, SeqChunk, StepPlan, blocks_for
from services.replica.model.load import open_checkpoint
from services.replica.model.loader import load_weights
from services.replica.model.transformer import Transformer
from shared.messages import Sampling
from shared.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
MODEL_FILE = Path(os.environ.get("CHORUS_MODEL_FILE", ROOT / ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
KEPT = json.loads((ROOT / "tests/unit/replica/agreement/greedy.json").read_text())
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(MODEL_FILE.name != KEPT["file"] or not MODEL_FILE.exists(), reason=f"not here: {KEPT['file']}"),
    pytest.mark.timeout(300),
]
TOKENS = int(os.environ.get("CHORUS_AGREEMENT_TOKENS", "16"))  # of the 64 that are kept; `make agreement` asks for all
GREEDY = SampleParams(Sampling(temperature=0.0), 0, 0)


def test_the_first_greedy_tokens_of_20_prompts_are_those_of_transformers():
    """Float32 on the file's own weights, twenty replies side by side over paged blocks: token for token."""
    replies = KEPT["replies"]
    prompts, wanted = [reply["prompt"] for reply in replies], [reply["tokens"] for reply in replies]
    assert (len(replies), {len(tokens) for tokens in wanted}) == (20, {64})
    each = blocks_for(max(map(len, prompts)) + TOKENS)
    with open_checkpoint(MODEL_FILE) as checkpoint:
        weights = load_weights(checkpoint, lambda _: None)
        model = Transformer(checkpoint.config, weights, blocks=20 * each, context=each * 16)
    tables = [tuple(range(at * each, (at + 1) * each)) for at in range(20)]
    written: list[list[int]] = [[] for _ in prompts]
    for step in range(TOKENS):
        chunks = []
        for number, prompt in enumerate(prompts):
            ids = tuple(prompt) if step == 0 else (written[number][-1],)
            start = 0 if step == 0 else len(prompt) + step - 1
            chunks.append(SeqChunk(str(number), 1, start, ids, tables[number], GREEDY))
        for tokens, best in zip(written, model.logits(StepPlan(step, tuple(chunks))).argmax(-1).tolist(), strict=True):
            tokens.append(best)
    assert written == [tokens[:TOKENS] for tokens in wanted]


def test_our_tokenizer_cuts_the_prompts_alike():
    """The file's vocabulary read by us and by transformers: the same ids."""
    tokenizer = load_tokenizer(MODEL_FILE)
    for reply in KEPT["replies"]:
        assert tokenizer.encode(tokenizer.decode(reply["prompt"])) == reply["prompt"]
