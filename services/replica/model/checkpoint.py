"""A model's weights by what they are for, whatever file they come from and whatever they are called there.

Two traps are undone here, so that nobody behind this door knows of them. Llama-architecture GGUF files store the rows
of each head's query and key matrices (and biases) so that RoPE turns neighbours (0, 1), (2, 3) …; we put them back, so
that it turns the halves (0, d/2), (1, d/2 + 1) …. And float matrices can be quantised while they are read.
"""

import hashlib
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.replica.model.config import ModelConfig
from services.replica.model.quantise import quantise
from services.replica.model.weights_file import Bytes, Floats, TensorStore, all_finite, dequantise, raw_rows
from shared.errors import ModelFileError
from shared.gguf import TensorInfo, TensorType
from shared.limits import MIB

FLOAT_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)
_HASH_PIECE = 16 * MIB
_Number = TypeVar("_Number", bound=np.generic)


class Part(Enum):
    """What a tensor is for. Matrices are [out, in]."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final norm"
    # of each layer
    ATTENTION_NORM = "attention norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_BIAS = "query bias"
    KEY_BIAS = "key bias"
    VALUE_BIAS = "value bias"
    QUERY_NORM = "query norm"
    KEY_NORM = "key norm"
    ATTENTION_OUT = "attention out"
    FFN_NORM = "ffn norm"
    GATE = "gate"
    UP = "up"
    DOWN = "down"


SHARED_INPUT = ((Part.QUERY, Part.KEY, Part.VALUE), (Part.GATE, Part.UP))  # computed as one product
LAYER_MATRICES = (*SHARED_INPUT[0], Part.ATTENTION_OUT, *SHARED_INPUT[1], Part.DOWN)


def shape_of(part: Part, config: ModelConfig) -> tuple[int, ...]:
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[Part, tuple[int, ...]] = {
        Part.EMBEDDING: (config.vocab, hidden),
        Part.HEAD: (config.vocab, hidden),
        Part.FINAL_NORM: (hidden,),
        Part.ATTENTION_NORM: (hidden,),
        Part.QUERY: (queries, hidden),
        Part.KEY: (keys, hidden),
        Part.VALUE: (keys, hidden),
        Part.QUERY_BIAS: (queries,),
        Part.KEY_BIAS: (keys,),
        Part.VALUE_BIAS: (keys,),
        Part.QUERY_NORM: (config.head_dim,),
        Part.KEY_NORM: (config.head_dim,),
        Part.ATTENTION_OUT: (hidden, queries),
        Part.FFN_NORM: (hidden,),
        Part.GATE: (config.ffn, hidden),
        Part.UP: (config.ffn, hidden),
        Part.DOWN: (hidden, config.ffn),
    }
    return shapes[part]


class Checkpoint:
    """An open model: its shape, and its weights by part and layer. A context manager.

    `names` are the store's, with the layer's number for {}; `ignored` tensors say nothing that the shape does not say.
    """

    def __init__(
        self,
        store: TensorStore,
        config: ModelConfig,
        names: Mapping[Part, str],
        *,
        interleaved: bool = False,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self._store, self._names, self._interleaved = store, names, interleaved
        self._unread = set(store.tensors) - ignored

    @property
    def path(self) -> Path:
        return self._store.path

    def type_of(self, part: Part, layer: int = 0) -> TensorType:
        """Raises ModelFileError when it is missing or misshapen, as the others do."""
        return self._find(part, layer).type

    def floats(self, part: Part, layer: int = 0) -> Floats:
        """As float32."""
        values = self._ordered(dequantise(self._store, self._take(part, layer)), part)
        return np.ascontiguousarray(values)

    def raw(self, part: Part, layer: int = 0, *, quantised: TensorType | None = None) -> tuple[TensorType, Bytes]:
        """A matrix as it stands: its type, and [rows, bytes of a row]. A float one as `quantised`, if that is given."""
        info = self._take(part, layer)
        if quantised is None or info.type not in FLOAT_TYPES:
            return info.type, self._ordered(raw_rows(self._store, info), part)
        try:
            return quantised, self._ordered(quantise(dequantise(self._store, info), quantised), part)
        except ValueError as error:
            raise ModelFileError(f"{self.path}: {info.name} cannot be quantised: {error}.") from error

    def refuse_unread(self) -> None:
        """A tensor that we would leave out changes what the model says."""
        if self._unread:
            names = ", ".join(sorted(self._unread)[:3])
            raise ModelFileError(f"{self.path}: it has tensors that are not understood: {names}. Choose another model.")

    def digest(self, progress: Callable[[float], None]) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all its bytes."""
        digest, pieces, done = hashlib.sha256(), self._store.contents(), 0
        whole = max(1, sum(map(len, pieces)))
        for data in pieces:
            for at in range(0, len(data), _HASH_PIECE):
                digest.update(data[at : at + _HASH_PIECE])
                progress(min(1.0, (done + min(at + _HASH_PIECE, len(data))) / whole))
            done += len(data)
            data.release()
        return digest.hexdigest()[:16]

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, part: Part, layer: int) -> TensorInfo:
        name = self._names[part].format(layer)
        info, shape = self._store.tensors.get(name), shape_of(part, self.config)
        if info is None:
            raise ModelFileError(f"{self.path}: the tensor {name} is missing. Choose another model.")
        if info.shape != shape:
            raise ModelFileError(f"{self.path}: {name} has the shape {info.shape}, not {shape}.")
        return info

    def _take(self, part: Part, layer: int) -> TensorInfo:
        info = self._find(part, layer)
        self._unread.discard(info.name)
        if not all_finite(self._store, info):
            raise ModelFileError(
                f"{self.path}: {info.name} has numbers that are none, or infinite. Choose another model."
            )
        return info

    def _ordered(self, rows: NDArray[_Number], part: Part) -> NDArray[_Number]:
        if not self._interleaved:
            return rows
        if part in (Part.QUERY, Part.QUERY_BIAS):
            return halves(rows, self.config.heads)
        return halves(rows, self.config.kv_heads) if part in (Part.KEY, Part.KEY_BIAS) else rows


def halves(rows: NDArray[_Number], heads: int) -> NDArray[_Number]:
    """[heads head_dim, ...] with each head's rows reordered from neighbours to halves."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
