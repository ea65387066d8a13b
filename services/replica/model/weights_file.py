"""Tensors of a model file as numpy arrays, dequantised or as they stand; no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.gguf import BLOCK_LAYOUT, TensorInfo, TensorType

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class TensorStore(Protocol):
    """Named tensors in one or several mapped files. Views must be dropped before it is closed."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def data(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes as they stand, without a copy."""
        ...

    def contents(self) -> list[memoryview]:
        """Every byte that says what the model is, for hashing."""
        ...

    def close(self) -> None: ...


def dequantise(store: TensorStore, info: TensorInfo) -> Floats:
    """A tensor's numbers as float32, in its shape; a copy."""
    return _DEQUANTISE[info.type](np.frombuffer(store.data(info), dtype=np.uint8)).reshape(info.shape)


def all_finite(store: TensorStore, info: TensorInfo) -> bool:
    """No number of it is infinite or none: one would spoil whatever its rows are added to."""
    data = np.frombuffer(store.data(info), dtype=np.uint8)
    if info.type in _HALVES:
        data = _blocks(data, info.type)[:, : 2 * _HALVES[info.type]].ravel()
    bits, exponent = _EXPONENT.get(info.type, _EXPONENT[TensorType.F16])
    return not (np.bitwise_and(data.view(bits), exponent) == exponent).any()


def raw_rows(store: TensorStore, info: TensorInfo) -> Bytes:
    """A matrix as it stands, without a copy: [rows, bytes of a row]."""
    return np.frombuffer(store.data(info), dtype=np.uint8).reshape(info.shape[0], -1)


# All of these bits set: infinite, or no number.
_EXPONENT: dict[TensorType, tuple[str, int]] = {
    TensorType.F32: ("u4", 0x7F800000),
    TensorType.F16: ("u2", 0x7C00),
    TensorType.BF16: ("u2", 0x7F80),
}
_HALVES = {TensorType.Q4_0: 1, TensorType.Q4_1: 2, TensorType.Q8_0: 1}  # scales, and least numbers, of a block


def _f32(data: Bytes) -> Floats:
    return data.view(np.float32).copy()


def _f16(data: Bytes) -> Floats:
    return data.view(np.float16).astype(np.float32)


def _bf16(data: Bytes) -> Floats:
    """The upper halves of float32 numbers."""
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _scale(blocks: Bytes, at: int) -> Floats:
    """The half-precision number at byte `at` of each block, as a column."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves are the first sixteen numbers."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _blocks(data: Bytes, kind: TensorType) -> Bytes:
    return data.reshape(-1, BLOCK_LAYOUT[kind][1])


def _q4_0(data: Bytes) -> Floats:
    blocks = _blocks(data, TensorType.Q4_0)
    return (_nibbles(blocks[:, 2:]) - 8.0) * _scale(blocks, 0)


def _q4_1(data: Bytes) -> Floats:
    blocks = _blocks(data, TensorType.Q4_1)
    return _nibbles(blocks[:, 4:]) * _scale(blocks, 0) + _scale(blocks, 2)


def _q8_0(data: Bytes) -> Floats:
    blocks = _blocks(data, TensorType.Q8_0)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _scale(blocks, 0)


_DEQUANTISE: dict[TensorType, Callable[[Bytes], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q8_0: _q8_0,
}
