"""Weights from a GGUF file, dequantised.

One trap: llama-architecture files store the rows of the query and key matrices of each head in another order, so that
RoPE may turn neighbours (0, 1), (2, 3) … We put them back, so that RoPE turns the halves (0, d/2), (1, d/2 + 1) …
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.replica.model.config import ModelConfig
from shared.errors import ModelFileError
from shared.gguf import GgufFile, TensorInfo, TensorType

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in]. Products that share their input are one matrix."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim, hidden]: queries, keys, values
    attention_out: torch.Tensor  # [hidden, heads head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]: gate, up
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself when they are tied


def load_weights(file: GgufFile, config: ModelConfig, progress: Callable[[float], None]) -> Weights:
    """All weights as float32. Raises ModelFileError when a tensor is missing, misshapen, or not understood."""
    reader = _TensorReader(file)
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = []
    for index in range(config.layers):
        name = f"blk.{index}."
        query = reader.read(f"{name}attn_q.weight", q_rows, config.hidden)
        key = reader.read(f"{name}attn_k.weight", kv_rows, config.hidden)
        value = reader.read(f"{name}attn_v.weight", kv_rows, config.hidden)
        gate = reader.read(f"{name}ffn_gate.weight", config.ffn, config.hidden)
        up = reader.read(f"{name}ffn_up.weight", config.ffn, config.hidden)
        layers.append(
            LayerWeights(
                attention_norm=_tensor(reader.read(f"{name}attn_norm.weight", config.hidden)),
                qkv=_tensor(np.concatenate([halves(query, config.heads), halves(key, config.kv_heads), value])),
                attention_out=_tensor(reader.read(f"{name}attn_output.weight", config.hidden, q_rows)),
                ffn_norm=_tensor(reader.read(f"{name}ffn_norm.weight", config.hidden)),
                gate_up=_tensor(np.concatenate([gate, up])),
                down=_tensor(reader.read(f"{name}ffn_down.weight", config.hidden, config.ffn)),
            )
        )
        progress((index + 1) / (config.layers + 1))
    embedding = _tensor(reader.read("token_embd.weight", config.vocab, config.hidden))
    tied = "output.weight" not in file.tensors
    head = embedding if tied else _tensor(reader.read("output.weight", config.vocab, config.hidden))
    final_norm = _tensor(reader.read("output_norm.weight", config.hidden))
    reader.refuse_unread()
    return Weights(embedding, tuple(layers), final_norm, head)


class _TensorReader:
    """Reads tensors by name and shape, and knows which were never asked for."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._unread = set(file.tensors)

    def read(self, name: str, *shape: int) -> Floats:
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self._file.path}: the tensor {name} is missing. Choose another file.")
        if info.shape != shape:
            raise ModelFileError(f"{self._file.path}: {name} has the shape {info.shape}, not {shape}.")
        self._unread.discard(name)
        return dequantise(self._file, info)

    def refuse_unread(self) -> None:
        """A tensor that we would leave out changes what the model says."""
        if self._unread:
            names = ", ".join(sorted(self._unread)[:3])
            raise ModelFileError(f"{self._file.path}: it has tensors that are not understood: {names}.")


def _tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def halves(matrix: Floats, heads: int) -> Floats:
    """[heads head_dim, in] with each head's rows reordered from neighbours to halves."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# --- dequantisation --------------------------------------------------------------------------------------


def dequantise(file: GgufFile, info: TensorInfo) -> Floats:
    """A tensor's numbers as float32, in its shape."""
    data = np.frombuffer(file.data(info), dtype=np.uint8)
    return _DEQUANTISE[info.type](data).reshape(info.shape)


def _f32(data: NDArray[np.uint8]) -> Floats:
    return data.view(np.float32).copy()


def _f16(data: NDArray[np.uint8]) -> Floats:
    return data.view(np.float16).astype(np.float32)


def _scale(blocks: NDArray[np.uint8], at: int) -> Floats:
    """The half-precision number at byte `at` of each block, as a column."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> Floats:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves are the first sixteen numbers."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q4_0(data: NDArray[np.uint8]) -> Floats:
    blocks = data.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]) - 8.0) * _scale(blocks, 0)


def _q4_1(data: NDArray[np.uint8]) -> Floats:
    blocks = data.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]) * _scale(blocks, 0) + _scale(blocks, 2)


def _q8_0(data: NDArray[np.uint8]) -> Floats:
    blocks = data.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _scale(blocks, 0)


_DEQUANTISE: dict[TensorType, Callable[[NDArray[np.uint8]], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q8_0: _q8_0,
}
