"""Tiny random models as GGUF files in each quantisation, and the native kernels over them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.replica.model.config import ModelConfig
from services.replica.model.kv_size import KvType
from services.replica.model.load import open_checkpoint
from services.replica.model.native.kernels import KernelModel, Rows, Variant, runnable
from services.replica.model.native_runner import build_model
from shared.gguf import TensorType
from tests.unit.shared.gguf_files import BFLOAT16, FLOAT16, FLOAT32, Q4_0, Q4_1, Q8_0, Tensor, Typed, gguf

VOCAB = 300
CONTEXT = 512
FLOATS = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
KINDS = {"Q4_1": Q4_1, "Q4_0": Q4_0, "Q8_0": Q8_0}
VARIANTS = runnable()
NOT_BUILT = "no native kernels are built: python -m services.replica.model.native"
needs_kernels = pytest.mark.skipif(not VARIANTS, reason=NOT_BUILT)
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def quantised(values: NDArray[np.float32], kind: int) -> bytes:
    """Rows in blocks of 32; how well does not matter, every reader must read the same numbers from them."""
    if kind in FLOATS.values():
        return float_bytes(values, kind)
    blocks = values.reshape(-1, 32)
    parts: list[NDArray] = []
    if kind == Q8_0:
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        parts = [scale.view(np.uint8), np.round(blocks / scale).clip(-127, 127).astype(np.int8).view(np.uint8)]
    else:
        least = blocks.min(1, keepdims=True) if kind == Q4_1 else -8 * (np.abs(blocks).max(1, keepdims=True) / 8)
        width = blocks.max(1, keepdims=True) - least if kind == Q4_1 else -2 * least
        scale = (width / (15 if kind == Q4_1 else 16)).astype(np.float16)
        codes = np.round((blocks - least) / scale).clip(0, 15).astype(np.uint8)
        parts = [scale.view(np.uint8)]
        if kind == Q4_1:
            parts.append(least.astype(np.float16).view(np.uint8))
        parts.append(codes[:, :16] | codes[:, 16:] << 4)
    return np.concatenate(parts, axis=1).tobytes()


def float_bytes(values: NDArray[np.float32], kind: int) -> bytes:
    if kind == BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if kind == FLOAT16 else np.float32).tobytes()


def _metadata(family: str, numbers: Mapping[str, int]) -> Mapping[str, object]:
    return {
        "general.architecture": family,
        **{f"{family}.{key}": Typed("u64", number) for key, number in numbers.items()},
        f"{family}.attention.layer_norm_rms_epsilon": Typed("f32", 1e-5),
    }


def _spoilt(whole: Tensor) -> Tensor:
    bad = (np.float32 if whole.type == FLOAT32 else np.float16)(np.nan).tobytes()
    return Tensor(whole.shape, whole.type, bad + whole.data[len(bad) :])


def tiny_file(
    path: Path,
    kind: int,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    tied: bool = True,
    seed: int = 0,
    family: str = "llama",
    window: int = 0,
    rope_factors: bool = False,
    odd: Mapping[str, int] = {},
    numbers: Mapping[str, int] = {},
    spoilt: str = "",
    gates: float = 1.0,
) -> Path:
    """A model of two layers, heads of 32, every matrix of one kind, but for the `odd` ones.

    `numbers` are told instead of the true ones; the tensor `spoilt` begins with NaN (its first scale, if it has some);
    the norm before the feed-forward part multiplies by `gates`.
    """
    rng, hidden, ffn, dim, layers = np.random.default_rng(seed), 64, 96, 32, 2

    def matrix(name: str, rows: int, columns: int, gain: float = 1.5) -> Tensor:
        values = rng.standard_normal((rows, columns), np.float32) * gain * columns**-0.5
        stored = odd.get(name, kind)
        return Tensor((columns, rows), stored, quantised(values, stored))

    def vector(width: int, middle: float = 1.0, spread: float = 0.1) -> Tensor:
        return Tensor((width,), FLOAT32, (middle + spread * rng.standard_normal(width, np.float32)).tobytes())

    tensors = {"token_embd.weight": matrix("token_embd", VOCAB, hidden, 8.0), "output_norm.weight": vector(hidden)}
    if not tied:
        tensors["output.weight"] = matrix("output", VOCAB, hidden)
    if rope_factors:
        tensors["rope_freqs.weight"] = Tensor(
            (dim // 2,), FLOAT32, np.geomspace(1, 8, dim // 2, dtype=np.float32).tobytes()
        )
    for layer in range(layers):
        shapes = {
            "attn_q": (heads * dim, hidden),
            "attn_k": (kv_heads * dim, hidden),
            "attn_v": (kv_heads * dim, hidden),
            "attn_output": (hidden, heads * dim),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        tensors |= {f"blk.{layer}.{name}.weight": matrix(f"{layer}.{name}", *shape) for name, shape in shapes.items()}
        norms = (("attn_norm", 1.0), ("ffn_norm", gates))
        tensors |= {f"blk.{layer}.{name}.weight": vector(hidden, middle) for name, middle in norms}
        if family == "qwen2":
            tensors |= {f"blk.{layer}.{name}.bias": vector(shapes[name][0], 0.0, 1.0) for name in list(shapes)[:3]}
        if family == "qwen3":
            tensors |= {f"blk.{layer}.{name}.weight": vector(dim) for name in ("attn_q_norm", "attn_k_norm")}
    if spoilt:
        tensors[spoilt] = _spoilt(tensors[spoilt])
    told = {
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": ffn,
        "context_length": CONTEXT,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "rope.dimension_count": dim,
        "attention.sliding_window": window,
    }
    path.write_bytes(gguf(_metadata(family, {**told, **numbers}), tensors))
    return path


@cache
def config_of(path: Path) -> ModelConfig:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config


@contextmanager
def kernel_model(
    path: Path,
    variant: Variant,
    *,
    precise: bool = False,
    threads: int = 1,
    blocks: int = 64,
    kv: KvType | None = None,
    quantised: TensorType | None = None,
) -> Iterator[KernelModel]:
    """From a GGUF file or a folder."""
    with open_checkpoint(path) as checkpoint:
        model = build_model(
            checkpoint,
            variant,
            kv=kv,
            quantised=quantised,
            context=CONTEXT,
            blocks=blocks,
            threads=threads,
            precise=precise,
            progress=lambda _: None,
        )
    try:
        yield model
    finally:
        model.close()


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length))


def logits(model: KernelModel, *rows: Rows) -> NDArray[np.float32]:
    """[wanted, vocab]; the best tokens are checked on the way."""
    best, out = model.forward(rows, logits=True)
    assert out is not None
    assert best.tolist() == out.argmax(axis=-1).tolist()
    return out
