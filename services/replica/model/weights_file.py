"""A model file's tensors as numpy arrays, dequantised or as they stand; no torch.

One trap: llama-architecture files store the rows of the query and key matrices of each head in another order, so that
RoPE may turn neighbours (0, 1), (2, 3) … We put them back, so that RoPE turns the halves (0, d/2), (1, d/2 + 1) …
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFileError
from shared.gguf import BLOCK_LAYOUT, GgufFile, TensorInfo, TensorType
from shared.limits import MIB

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_HASH_PIECE = 16 * MIB
_Number = TypeVar("_Number", bound=np.generic)


class TensorReader:
    """Reads tensors by name and shape, and knows which were never asked for."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._unread = set(file.tensors)

    def read(self, name: str, *shape: int) -> Floats:
        """Dequantised. Raises ModelFileError when it is missing or misshapen."""
        return dequantise(self._file, self._find(name, shape))

    def raw(self, name: str, *shape: int) -> tuple[TensorType, Bytes]:
        """A matrix as it stands in the file, without a copy: its type, and [rows, bytes of a row]."""
        info = self._find(name, shape)
        return info.type, np.frombuffer(self._file.data(info), dtype=np.uint8).reshape(shape[0], -1)

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self._file.path}: the tensor {name} is missing. Choose another file.")
        if info.shape != shape:
            raise ModelFileError(f"{self._file.path}: {name} has the shape {info.shape}, not {shape}.")
        self._unread.discard(name)
        return info

    def refuse_unread(self) -> None:
        """A tensor that we would leave out changes what the model says."""
        if self._unread:
            names = ", ".join(sorted(self._unread)[:3])
            raise ModelFileError(f"{self._file.path}: it has tensors that are not understood: {names}.")


def halves(matrix: NDArray[_Number], heads: int) -> NDArray[_Number]:
    """[heads head_dim, in] with each head's rows reordered from neighbours to halves."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def file_hash(file: GgufFile, progress: Callable[[float], None]) -> str:
    """The first 16 hexadecimal digits of the file's SHA-256."""
    digest = hashlib.sha256()
    data = file.bytes()
    for at in range(0, len(data), _HASH_PIECE):
        digest.update(data[at : at + _HASH_PIECE])
        progress(min(1.0, (at + _HASH_PIECE) / len(data)))
    data.release()
    return digest.hexdigest()[:16]


# --- dequantisation --------------------------------------------------------------------------------------


def dequantise(file: GgufFile, info: TensorInfo) -> Floats:
    """A tensor's numbers as float32, in its shape."""
    data = np.frombuffer(file.data(info), dtype=np.uint8)
    return _DEQUANTISE[info.type](data).reshape(info.shape)


def _f32(data: Bytes) -> Floats:
    return data.view(np.float32).copy()


def _f16(data: Bytes) -> Floats:
    return data.view(np.float16).astype(np.float32)


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
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q8_0: _q8_0,
}
