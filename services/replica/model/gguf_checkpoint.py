"""Models in GGUF files: which of their metadata say what shape they are of, and what their tensors are called."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.replica.model.checkpoint import Checkpoint, Part
from services.replica.model.config import ModelConfig, linear_factors
from services.replica.model.weights_file import dequantise
from shared.errors import ModelFileError
from shared.gguf import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral and SmolLM2 call themselves llama
INTERLEAVED = ("llama",)  # their rows of queries and keys stand in another order
ROPE_FACTORS = "rope_freqs.weight"
NAMES: Mapping[Part, str] = {
    Part.EMBEDDING: "token_embd.weight",
    Part.HEAD: "output.weight",
    Part.FINAL_NORM: "output_norm.weight",
    Part.ATTENTION_NORM: "blk.{}.attn_norm.weight",
    Part.QUERY: "blk.{}.attn_q.weight",
    Part.KEY: "blk.{}.attn_k.weight",
    Part.VALUE: "blk.{}.attn_v.weight",
    Part.QUERY_BIAS: "blk.{}.attn_q.bias",
    Part.KEY_BIAS: "blk.{}.attn_k.bias",
    Part.VALUE_BIAS: "blk.{}.attn_v.bias",
    Part.QUERY_NORM: "blk.{}.attn_q_norm.weight",
    Part.KEY_NORM: "blk.{}.attn_k_norm.weight",
    Part.ATTENTION_OUT: "blk.{}.attn_output.weight",
    Part.FFN_NORM: "blk.{}.ffn_norm.weight",
    Part.GATE: "blk.{}.ffn_gate.weight",
    Part.UP: "blk.{}.ffn_up.weight",
    Part.DOWN: "blk.{}.ffn_down.weight",
}


def open_gguf(path: Path) -> Checkpoint:
    """Raises ModelFileError when the file is malformed, or of a kind that is not built."""
    file = GgufFile(path)
    try:
        config = read_config(file)
    except BaseException:
        file.close()
        raise
    interleaved = file.text("general.architecture") in INTERLEAVED
    return Checkpoint(file, config, NAMES, interleaved=interleaved, ignored=frozenset({ROPE_FACTORS}))


def read_config(file: GgufFile) -> ModelConfig:
    """Raises ModelFileError when the file is of another architecture or scales RoPE in a way that is not built."""
    kind = file.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelFileError(f"{file.path}: its architecture is {kind!r}, and only {ARCHITECTURES} are built.")
    heads = file.integer(f"{kind}.attention.head_count")
    hidden = file.integer(f"{kind}.embedding_length")
    head_dim = file.integer(f"{kind}.attention.key_length", hidden // max(heads, 1))
    if file.integer(f"{kind}.rope.dimension_count", head_dim) != head_dim:
        raise ModelFileError(f"{file.path}: RoPE turns a part of each head only, which is not built.")
    if file.integer(f"{kind}.attention.value_length", head_dim) != head_dim:
        raise ModelFileError(f"{file.path}: its values are of another length than its keys, which is not built.")
    embedding = file.tensors.get(NAMES[Part.EMBEDDING])
    context, window = file.integer(f"{kind}.context_length"), file.integer(f"{kind}.attention.sliding_window", 0)
    try:
        config = ModelConfig(
            vocab=embedding.shape[0] if embedding else 0,
            hidden=hidden,
            layers=file.integer(f"{kind}.block_count"),
            heads=heads,
            kv_heads=file.integer(f"{kind}.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn=file.integer(f"{kind}.feed_forward_length"),
            context=context,
            eps=file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
            theta=file.number(f"{kind}.rope.freq_base", 10_000.0),
            qkv_bias=NAMES[Part.QUERY_BIAS].format(0) in file.tensors,
            qk_norm=NAMES[Part.QUERY_NORM].format(0) in file.tensors,
            window=window if window < context else 0,
            tied=NAMES[Part.HEAD] not in file.tensors,
        )
        return replace(config, rope_factors=_rope_factors(file, kind, head_dim))  # its sizes are sane by now
    except ValueError as error:
        raise ModelFileError(f"{file.path}: {error}. Choose another file.") from error


def _rope_factors(file: GgufFile, kind: str, head_dim: int) -> tuple[float, ...]:
    """Llama 3's scaling is a tensor here; the linear one a number."""
    scaling = file.text(f"{kind}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelFileError(f"{file.path}: it scales RoPE ({scaling}), which is not built. Choose another file.")
    factors = np.ones(head_dim // 2)
    if scaling == "linear":
        factors *= np.array(linear_factors(head_dim, file.number(f"{kind}.rope.scaling.factor")))
    if (info := file.tensors.get(ROPE_FACTORS)) is not None:
        if info.shape != factors.shape:
            raise ModelFileError(f"{file.path}: {ROPE_FACTORS} has the shape {info.shape}, not {factors.shape}.")
        factors *= dequantise(file, info)
    return () if (factors == 1).all() else tuple(factors.tolist())
