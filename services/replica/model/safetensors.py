"""A strict reader of safetensors: one file, or the shards that an index names, each over a memory map.

    ┌ length of the header ┐┌ JSON: name -> dtype, shape, data_offsets ┐┌ tensor data, without gaps … ┐
    0                      8                                            data_at                 file size

The files are outside data, checked as those of `shared.gguf` are: every size against the bytes that are there, no two
tensors over each other, no byte that belongs to none. Whatever is wrong raises ModelFileError. Our own reader, because
it saves a dependency, and the library hands tensors out only as copies or as torch's.
"""

import math
import mmap
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from shared.errors import ModelFileError
from shared.gguf import BLOCK_LAYOUT, TensorInfo, TensorType, map_file
from shared.hf_files import read_json
from shared.limits import GGUF_TENSORS_MAX, MODEL_SHARDS_MAX, SAFETENSORS_HEADER_BYTES_MAX

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES: Mapping[str, TensorType] = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
_LENGTH_BYTES = 8
_DIMENSIONS_MAX = 4
_Whole = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Whole]
    data_offsets: tuple[_Whole, _Whole]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFile:
    """One open file; `tensors` with offsets from its start. Views from `data` must be dropped before it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError when the file is missing, empty or malformed."""
        self.path, self.map = path, map_file(path)
        try:
            self.tensors = _read_header(self.map, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with suppress(BufferError):  # an error on its way out may hold views: the map goes with the last
            self.map.close()


class SafetensorsFolder:
    """`TensorStore` over all files of a model's folder. `describing`: bytes beside them that say what the model is."""

    def __init__(self, folder: Path, describing: bytes = b"") -> None:
        """Raises ModelFileError: files are missing or malformed, or do not hold what the index says."""
        self.path, self._describing = folder, describing
        self.tensors: dict[str, TensorInfo] = {}
        self._place: dict[str, SafetensorsFile] = {}
        with ExitStack() as opened:
            self._files = []
            for path, wanted in sorted(_shards(folder).items()):
                file = SafetensorsFile(path)
                opened.callback(file.close)
                self._files.append(file)
                self._add(file, wanted)
            self._opened = opened.pop_all()

    def _add(self, file: SafetensorsFile, wanted: frozenset[str] | None) -> None:
        if wanted is not None and wanted != file.tensors.keys():
            odd = sorted(wanted ^ file.tensors.keys())
            raise ModelFileError(f"{file.path} does not hold the tensors that {INDEX} says: {', '.join(odd[:3])}.")
        self.tensors |= file.tensors
        self._place |= dict.fromkeys(file.tensors, file)

    def data(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes as they stand in its file, without a copy."""
        return memoryview(self._place[tensor.name].map)[tensor.offset : tensor.offset + tensor.size]

    def contents(self) -> list[memoryview]:
        return [memoryview(self._describing), *(memoryview(file.map) for file in self._files)]

    def close(self) -> None:
        self._opened.close()


def _shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The files of a model, and which tensors the index expects in each; None: there is no index."""
    if not (folder / INDEX).exists():
        return {folder / SINGLE: None}
    found: dict[str, set[str]] = {}
    for name, file in read_json(folder / INDEX, _Index).weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelFileError(f"{folder / INDEX}: {file!r} is no file beside it.")
        found.setdefault(file, set()).add(name)
    if not 0 < len(found) <= MODEL_SHARDS_MAX:
        raise ModelFileError(f"{folder / INDEX}: {len(found)} files, not 1 to {MODEL_SHARDS_MAX}.")
    return {folder / file: frozenset(names) for file, names in found.items()}


def _read_header(data: mmap.mmap, path: Path) -> dict[str, TensorInfo]:
    def wrong(what: str) -> ModelFileError:
        return ModelFileError(f"{path} is not a usable safetensors file: {what}. Fetch it again.")

    if len(data) < _LENGTH_BYTES:
        raise wrong(f"it has only {len(data)} bytes")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    data_at = _LENGTH_BYTES + length
    if length > SAFETENSORS_HEADER_BYTES_MAX or data_at > len(data):
        raise wrong(f"its header of {length} bytes does not fit its {len(data)}")
    try:
        entries = msgspec.json.decode(data[_LENGTH_BYTES:data_at], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        if not 0 < len(entries) <= GGUF_TENSORS_MAX:
            raise wrong(f"{len(entries)} tensors are none or too many")
        found = [_tensor(name, msgspec.json.decode(raw, type=_Entry), data_at) for name, raw in entries.items()]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise wrong(f"its header cannot be read: {error}") from error
    end = data_at
    for info in sorted(found, key=lambda info: info.offset):
        if info.offset != end:
            relation = "over another tensor" if info.offset < end else f"{info.offset - end} bytes after the last"
            raise wrong(f"{info.name} lies {relation}")
        end = info.offset + info.size
    if end != len(data):
        raise wrong(f"its tensors end at byte {end}, but it has {len(data)}")
    return {info.name: info for info in found}


def _tensor(name: str, entry: _Entry, data_at: int) -> TensorInfo:
    """ValueError: type, shape and offsets do not go together."""
    kind, (begin, end) = TYPES.get(entry.dtype), entry.data_offsets
    if kind is None:
        raise ValueError(f"{name} is of type {entry.dtype!r}, and only {', '.join(TYPES)} are read")
    if not 1 <= len(entry.shape) <= _DIMENSIONS_MAX or 0 in entry.shape:
        raise ValueError(f"{name} has the shape {entry.shape}")
    size = math.prod(entry.shape) * BLOCK_LAYOUT[kind][1]
    if end - begin != size:
        raise ValueError(f"{name} of shape {entry.shape} takes {size} bytes, but its place has {end - begin}")
    return TensorInfo(name, tuple(entry.shape), kind, data_at + begin, size)
