"""Every family's logits are transformers' own, kept beside tiny models by `make agreement`; ours needs none of it here."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.replica.core.plan import SampleParams, SeqChunk, StepPlan
from services.replica.model.load import open_checkpoint
from services.replica.model.loader import load_weights
from services.replica.model.safetensors import SafetensorsFile
from services.replica.model.transformer import Transformer
from shared.messages import Sampling

FOLDER = Path(__file__).parent / "agreement"
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
WITHIN = 1e-4
BLOCKS = 16
SAMPLE = SampleParams(Sampling(temperature=0.0), 0, 0)


class Expected:
    """What transformers made of it: ids and the logits of every row, by prompt length."""

    def __init__(self, path: Path) -> None:
        file = SafetensorsFile(path)
        self.by_length = {}
        for name in file.tensors:
            part, length = name.split(".")
            info = file.tensors[name]
            data = memoryview(file.map)[info.offset : info.offset + info.size]
            self.by_length.setdefault(int(length), {})[part] = (
                np.frombuffer(data, np.float32).reshape(info.shape).copy()
            )
            data.release()
        file.close()


def model_of(family: str) -> Transformer:
    with open_checkpoint(FOLDER / family) as checkpoint:
        return Transformer(checkpoint.config, load_weights(checkpoint, lambda _: None), blocks=BLOCKS, context=128)


def cases(family: str) -> dict[int, tuple[tuple[int, ...], torch.Tensor]]:
    kept = Expected(FOLDER / family / "expected.safetensors").by_length
    return {
        length: (tuple(found["ids"].astype(int).tolist()), torch.from_numpy(found["logits"]))
        for length, found in kept.items()
    }


def test_there_is_a_model_of_each_family():
    """Llama 2 and 3 and its linear scaling, SmolLM2, Mistral, Qwen 2.5 with and without a head, Qwen 3."""
    wanted = ["llama-linear", "llama2", "llama3", "mistral", "qwen2", "qwen2-tied", "qwen3", "smollm2"]
    assert wanted == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decodes_are_those_of_transformers(family: str):
    """Every row of a prompt and of the single steps after it, within 1e-4; the logits themselves are far larger."""
    model = model_of(family)
    for length, (ids, wanted) in cases(family).items():
        found = [model.every((SeqChunk("a", 1, 0, ids[:length], tuple(range(BLOCKS)), SAMPLE),))]
        found += [
            model.every((SeqChunk("a", 1, at, ids[at : at + 1], tuple(range(BLOCKS)), SAMPLE),))
            for at in range(length, len(ids))
        ]
        assert torch.cat(found).sub(wanted).abs().max() < WITHIN
        assert wanted.std() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_beside_each_other_are_those_of_transformers(family: str):
    """Both prompts in one step after another, cut into chunks, over scattered blocks."""
    model, kept = model_of(family), cases(family)
    at, sizes = dict.fromkeys(kept, 0), {21: 5, 40: 9}
    tables = {21: (9, 2), 40: (4, 11, 7)}
    while any(at[length] < length for length in kept):
        chunks = tuple(
            SeqChunk(
                str(length),
                1,
                at[length],
                ids[at[length] : min(at[length] + sizes[length], length)],
                tables[length],
                SAMPLE,
            )
            for length, (ids, _) in kept.items()
            if at[length] < length
        )
        found = model.logits(StepPlan(1, chunks))
        for chunk, row in zip(chunks, found, strict=True):
            at[int(chunk.sequence_id)] = chunk.end
            assert row.sub(kept[int(chunk.sequence_id)][1][chunk.end - 1]).abs().max() < WITHIN


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama3", "rope_factors", ()),
        ("llama-linear", "rope_factors", ()),
        ("mistral", "window", 0),
        ("qwen2", "qkv_bias", False),
        ("qwen3", "qk_norm", False),
        ("llama2", "theta", 20_000.0),
    ],
)
def test_the_comparison_would_notice(family: str, field: str, value: object):
    """Without what makes a family what it is, its logits are others."""
    ids, wanted = cases(family)[40]
    with open_checkpoint(FOLDER / family) as checkpoint:
        weights = load_weights(checkpoint, lambda _: None)
        config = checkpoint.config
    assert getattr(config, field) != value
    lost = {"qkv_bias": {"qkv_bias": None}, "qk_norm": {"query_norm": None, "key_norm": None}}.get(field, {})
    weights = replace(weights, layers=tuple(replace(layer, **lost) for layer in weights.layers))
    model = Transformer(replace(config, **{field: value}), weights, blocks=BLOCKS, context=128)
    found = model.every((SeqChunk("a", 1, 0, ids[:40], (0, 1, 2), SAMPLE),))
    assert found.sub(wanted[:40]).abs().max() > 10 * WITHIN
