"""A small, strict reader of GGUF model files: metadata and where each tensor lies, over a memory map.

    ┌ magic, version, counts ┐┌ key, type, value … ┐┌ name, shape, type, offset … ┐┌ padding ┐┌ tensor data … ┐
    0                                                                                         data_at      file size

The file is outside data: every count is checked against the bytes that are left before anything is allocated, every
offset against the file's size. Whatever is wrong raises ModelFileError with a sentence that says what to do.
Tensors of six types are read: F32, F16, BF16, Q8_0, Q4_0, Q4_1. Nothing is dequantised here.
"""

import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.errors import ModelFileError
from shared.limits import GGUF_ARRAY_MAX, GGUF_KEYS_MAX, GGUF_TENSORS_MAX, MIB

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMENSIONS_MAX = 4
NAME_BYTES_MAX = 256
TEXT_BYTES_MAX = 4 * MIB
_ALIGNMENT = 32  # unless `general.alignment` says otherwise
_FETCH = "Fetch the file again (`chorus models fetch`) or choose another."


class TensorType(IntEnum):
    """How a tensor's numbers are stored. The values are the file format's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


# numbers in a block, bytes of a block
BLOCK_LAYOUT: Mapping[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),  # scale f16, 32 x 4 bits; value = (q - 8) * scale
    TensorType.Q4_1: (32, 20),  # scale f16, minimum f16, 32 x 4 bits; value = q * scale + minimum
    TensorType.Q8_0: (32, 34),  # scale f16, 32 x int8; value = q * scale
    TensorType.BF16: (1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in the file. `shape` is outermost first: a matrix is (rows, columns), columns contiguous."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of the file
    size: int  # bytes


def map_file(path: Path) -> mmap.mmap:
    """A model file's bytes, read when they are touched; raises ModelFileError when it is missing or empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelFileError(f"cannot read the model file {path}: {error}. {_FETCH}") from error


class GgufFile:
    """An open model file. A context manager; views from `data` must be dropped before it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError when the file is missing, empty or malformed."""
        self.path, self._map = path, map_file(path)
        try:
            reader = _Reader(self._map, path)
            self.metadata, self.tensors = _read_head(reader)
        except BaseException:
            self.close()
            raise

    def data(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes as they stand in the file, without a copy."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.size]

    def contents(self) -> list[memoryview]:
        """The whole file, for hashing."""
        return [memoryview(self._map)]

    def close(self) -> None:
        with suppress(BufferError):  # an error on its way out may hold views: the map goes with the last
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # typed reads of the metadata
    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return float(value)

    def texts(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return [item for item in value if isinstance(item, str)]

    def integers(self, key: str) -> list[int]:
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(key, "a list of integers", value)
        return [item for item in value if isinstance(item, int)]

    def _wrong(self, key: str, wanted: str, value: object) -> ModelFileError:
        found = "is missing" if value is None else f"is a {type(value).__name__}"
        return ModelFileError(f"{self.path}: {key} must be {wanted}, but it {found}. {_FETCH}")


# --- the head of the file --------------------------------------------------------------------------------


class _Reader:
    """A cursor that never reads past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is not a usable GGUF file: {what} (byte {self.at}). {_FETCH}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, but the file ends after {self.size - self.at}")
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken

    def number(self, layout: struct.Struct, what: str) -> int:
        return int(layout.unpack(self.take(layout.size, what))[0])

    def u32(self, what: str) -> int:
        return self.number(_U32, what)

    def u64(self, what: str) -> int:
        return self.number(_U64, what)

    def text(self, what: str, limit: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} is {length} bytes long, more than {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TEXT_TYPE, _ARRAY_TYPE, _BOOL_TYPE = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _read_head(reader: _Reader) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    if reader.take(4, "the magic") != MAGIC:
        raise reader.fail("it does not begin with GGUF")
    version = reader.u32("the version")
    if version not in VERSIONS:
        raise reader.fail(f"its version is {version}, and this reader knows {VERSIONS}")
    tensor_count, key_count = reader.u64("the tensor count"), reader.u64("the key count")
    if tensor_count > GGUF_TENSORS_MAX or key_count > GGUF_KEYS_MAX:
        raise reader.fail(f"{tensor_count} tensors and {key_count} keys are more than it can hold")
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = reader.text("a metadata key", NAME_BYTES_MAX)
        if key in metadata:
            raise reader.fail(f"the key {key!r} stands twice")
        metadata[key] = _read_value(reader, reader.u32(f"the type of {key}"), key)
    return metadata, _read_tensors(reader, tensor_count, metadata)


def _read_value(reader: _Reader, kind: int, key: str) -> Value:
    if kind == _TEXT_TYPE:
        return reader.text(key, TEXT_BYTES_MAX)
    if kind == _ARRAY_TYPE:
        return _read_array(reader, key)
    if kind not in _NUMBERS:
        raise reader.fail(f"{key} has the unknown type {kind}")
    value: int | float | bool = _numbers(reader, kind, 1, key)[0]
    return value


def _read_array(reader: _Reader, key: str) -> Value:
    kind, count = reader.u32(f"the element type of {key}"), reader.u64(f"the length of {key}")
    if count > GGUF_ARRAY_MAX:
        raise reader.fail(f"{key} has {count} elements, more than {GGUF_ARRAY_MAX}")
    if kind == _TEXT_TYPE:
        if count * _U64.size > reader.size - reader.at:
            raise reader.fail(f"{key} says it has {count} texts, more than fit in the file")
        return [reader.text(key, TEXT_BYTES_MAX) for _ in range(count)]
    if kind not in _NUMBERS:
        raise reader.fail(f"{key} is an array of the unknown or nested type {kind}")
    return list(_numbers(reader, kind, count, key))


def _numbers(reader: _Reader, kind: int, count: int, key: str) -> tuple[int, ...]:
    layout = _NUMBERS[kind]
    data = reader.take(count * struct.calcsize("<" + layout), key)
    return struct.unpack(f"<{count}{layout}", data)


def _read_tensors(reader: _Reader, count: int, metadata: Mapping[str, Value]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment must be a power of two, not {alignment!r}")
    found: dict[str, TensorInfo] = {}
    for _ in range(count):
        tensor = _read_tensor(reader, alignment)
        if tensor.name in found:
            raise reader.fail(f"the tensor {tensor.name!r} stands twice")
        found[tensor.name] = tensor
    data_at = -(-reader.at // alignment) * alignment
    return {name: _placed(tensor, data_at, reader) for name, tensor in found.items()}


def _read_tensor(reader: _Reader, alignment: int) -> TensorInfo:
    """A directory entry; its offset is still relative to the data section."""
    name = reader.text("a tensor's name", NAME_BYTES_MAX)
    dimensions = reader.u32(f"the dimensions of {name}")
    if not 1 <= dimensions <= DIMENSIONS_MAX:
        raise reader.fail(f"{name} has {dimensions} dimensions, not 1 to {DIMENSIONS_MAX}")
    innermost_first = [reader.u64(f"the shape of {name}") for _ in range(dimensions)]
    kind, offset = reader.u32(f"the type of {name}"), reader.u64(f"the offset of {name}")
    if kind not in set(TensorType):
        known = ", ".join(member.name for member in TensorType)
        raise reader.fail(f"{name} has the tensor type {kind}, and only {known} are read: convert it to one of them")
    type_ = TensorType(kind)
    numbers_in_block, block_bytes = BLOCK_LAYOUT[type_]
    elements = 1
    for length in innermost_first:
        elements *= length  # Python's integers do not overflow; the size is checked below
    if elements == 0 or innermost_first[0] % numbers_in_block:
        raise reader.fail(f"{name} of shape {innermost_first} cannot be stored as {type_.name}")
    if offset % alignment:
        raise reader.fail(f"{name} lies at offset {offset}, not aligned to {alignment}")
    return TensorInfo(name, tuple(reversed(innermost_first)), type_, offset, elements // numbers_in_block * block_bytes)


def _placed(tensor: TensorInfo, data_at: int, reader: _Reader) -> TensorInfo:
    """The entry with its offset from the start of the file, checked against the file's size."""
    start = data_at + tensor.offset
    if start + tensor.size > reader.size:
        raise reader.fail(
            f"{tensor.name} ends at byte {start + tensor.size}, but the file has {reader.size}: it is cut"
        )
    return TensorInfo(tensor.name, tensor.shape, tensor.type, start, tensor.size)
