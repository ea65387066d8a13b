"""Float matrices into the file format's quantised types, so that the kernels can run them: 32 numbers share a scale.

The layouts are those of `shared.gguf.BLOCK_LAYOUT`. Numbers go to the nearest code. Scales are halves; so is Q4_1's
least number. In Q4_0 the number of greatest magnitude is exact, and one as great of the other sign is a scale off.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.replica.model.weights_file import Bytes, Floats
from shared.gguf import TensorType

BLOCK = 32


def quantise(values: Floats, kind: TensorType) -> Bytes:
    """[rows, columns] -> [rows, bytes of a row]. ValueError: no whole blocks of columns, or a number is not finite."""
    rows, columns = values.shape
    if columns % BLOCK:
        raise ValueError(f"rows of {columns} numbers are no whole blocks of {BLOCK}")
    if not np.isfinite(values).all():
        raise ValueError("not all of its numbers are finite")
    return _QUANTISE[kind](values.reshape(-1, BLOCK)).reshape(rows, -1)


def _halves(scale: Floats) -> tuple[NDArray[np.float16], Floats]:
    """The scale as it is stored, and what to divide by."""
    stored = np.clip(scale, -65504, 65504).astype(np.float16)
    divisor = stored.astype(np.float32)
    return stored, np.where(divisor == 0, np.float32(1), divisor)


def _packed(codes: Floats) -> Bytes:
    """[blocks, 32] codes of 0..15 -> [blocks, 16]: the low halves are the first sixteen numbers."""
    whole = np.rint(codes).clip(0, 15).astype(np.uint8)
    return np.bitwise_or(whole[:, :16], np.left_shift(whole[:, 16:], 4), dtype=np.uint8)


def _q8_0(blocks: Floats) -> Bytes:
    scale, divisor = _halves(np.abs(blocks).max(axis=1, keepdims=True) / 127)
    codes = np.rint(blocks / divisor).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)


def _q4_0(blocks: Floats) -> Bytes:
    """The number of greatest magnitude is code 0, whichever its sign."""
    greatest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale, divisor = _halves(greatest / np.float32(-8))
    return np.concatenate([scale.view(np.uint8), _packed(blocks / divisor + 8)], axis=1)


def _q4_1(blocks: Floats) -> Bytes:
    least, _ = _halves(blocks.min(axis=1, keepdims=True))
    base = least.astype(np.float32)
    scale, divisor = _halves((blocks.max(axis=1, keepdims=True) - base) / np.float32(15))
    return np.concatenate([scale.view(np.uint8), least.view(np.uint8), _packed((blocks - base) / divisor)], axis=1)


_QUANTISE: dict[TensorType, Callable[[Floats], Bytes]] = {
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
}
KINDS = tuple(_QUANTISE)
