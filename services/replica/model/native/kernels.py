"""The kernels as Python sees them: a shared library per instruction set, a model in it, one `forward` per step.

Arguments are checked here, because the library does not. ctypes lets go of the interpreter lock during a call.
"""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.replica.model.kv_size import KvType
from shared.errors import ConfigError, EngineError
from shared.gguf import BLOCK_LAYOUT, TensorType
from shared.limits import BLOCK_TOKENS

BUILT = Path(__file__).parent / "built"
SOURCE = Path(__file__).parent / "forward.cpp"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-pthread", "-w")
CHOICE = "CHORUS_KERNELS"  # a variant's name, or "none"; unset: the best that this processor runs


@cache
def source_hash() -> str:
    digest = hashlib.sha256(" ".join(COMMON_FLAGS).encode())
    for path in (*sorted(SOURCE.parent.glob("*.h")), SOURCE):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set: what the compiler is told, and what a processor must have (as /proc/cpuinfo names it)."""

    name: str
    compile_flags: tuple[str, ...]
    needs: frozenset[str]

    @property
    def library(self) -> Path:
        """Named after the sources too: one that was built from others is not found, rather than called wrongly."""
        return BUILT / f"{self.name}-{source_hash()}.so"


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
VARIANTS = (  # best first
    Variant(
        "avx512",
        (*(f"-m{flag}" for flag in _AVX512), "-mprefer-vector-width=512"),
        frozenset(flag.replace("avx512vnni", "avx512_vnni") for flag in _AVX512),
    ),
    Variant("avx2", tuple(f"-m{flag}" for flag in _AVX2), frozenset(_AVX2)),
    Variant("portable", (), frozenset()),
)


def processor_flags() -> frozenset[str]:
    """What this processor has; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), ":").split(":", 1)[1].split())


def runnable() -> tuple[Variant, ...]:
    """Variants that are built and that this processor runs, best first."""
    flags = processor_flags()
    return tuple(variant for variant in VARIANTS if variant.needs <= flags and variant.library.exists())


def choose(wanted: str | None = None) -> Variant | str:
    """The variant to use, or a sentence that says why there is none. ConfigError: the one asked for cannot be had."""
    wanted = wanted or os.environ.get(CHOICE, "")
    if wanted == "none":
        return f"{CHOICE}=none"
    there = runnable()
    if wanted:
        found = next((variant for variant in there if variant.name == wanted), None)
        if found is None:
            names = ", ".join(variant.name for variant in there) or "none"
            raise ConfigError(f"{CHOICE}={wanted} is not built or not for this processor; there is: {names}.")
        return found
    # The portable variant exists to be tested: on a processor it was not tuned for, torch is faster.
    tuned = [variant for variant in there if variant.needs]
    return (
        tuned[0]
        if tuned
        else "no native kernels are built for this processor (python -m services.replica.model.native)"
    )


# --- the library's own shapes; mirrored in forward.cpp ---------------------------------------------------

MatrixPlace = Literal["qkv", "o", "gate_up", "down", "head", "embedding"]
VectorPlace = Literal["norm", "ffn_norm", "q_norm", "k_norm", "qkv_bias", "final_norm"]
_MATRICES: tuple[MatrixPlace, ...] = ("qkv", "o", "gate_up", "down", "head", "embedding")
_VECTORS: tuple[VectorPlace, ...] = ("norm", "ffn_norm", "q_norm", "k_norm", "qkv_bias", "final_norm")
KV_TYPES = (KvType.FLOAT32, KvType.BFLOAT16, KvType.FLOAT16, KvType.INT8)
REVISION = 1  # of what the kernels compute: raised with every change that changes a bit
KINDS = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0)
BLOCK = 32
PANEL = 16
HEAD_DIM_MAX = 512  # of keys and values in bytes, whose sums are whole numbers


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")
        ),
        *((name, ctypes.c_int32) for name in ("blocks", "threads", "precise", "qk_norm", "window", "kv")),
        ("eps", ctypes.c_float),
        ("theta", ctypes.c_float),
        ("rope_factors", ctypes.c_void_p),  # read while the model is made
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "chunks", "wanted", "draws")),
        *((name, ctypes.c_void_p) for name in ("tokens", "chunk", "tables", "wanted_rows", "draw", "drawn", "logits")),
    )


_DRAW = np.dtype(
    [
        ("temperature", np.float32), ("min_p", np.float32), ("top_p", np.float64), ("unit", np.float64),
        ("top_k", np.int32), ("unused", np.int32),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """A model's sizes, in numbers. `blocks` KV blocks of 16 tokens; `context` bounds every position."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float
    theta: float
    blocks: int
    threads: int
    rope_factors: tuple[float, ...] = ()  # as in ModelConfig
    window: int = 0
    precise: bool = False
    qk_norm: bool = False
    kv: KvType = KvType.FLOAT16

    def misfit(self) -> str | None:
        """Why the kernels cannot run such a model; None: they can."""
        for name in ("hidden", "head_dim", "ffn"):
            if getattr(self, name) % BLOCK:
                return f"its {name} of {getattr(self, name)} is not a multiple of {BLOCK}"
        if self.head_dim > HEAD_DIM_MAX:
            return f"its head_dim of {self.head_dim} is more than {HEAD_DIM_MAX}"
        return None


@dataclass(frozen=True, slots=True)
class Draw:
    """Which tokens are in play: `top_k` of the best (0: all), until they hold `top_p` of the mass, and none less than
    `min_p` times as likely as the best.

    `unit` in [0, 1) says where in the distribution the token lies. A temperature of 0 takes the best.
    """

    temperature: float
    min_p: float = 0.0
    unit: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


BEST = Draw(0.0)


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows in a step: token ids from position `start` on, and its block table."""

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: Draw | None  # how the token after the last row is drawn; None: it is not asked for


class KernelModel:
    """A model inside the library: weights, KV memory and threads. Not thread-safe; `close` gives all of it back."""

    def __init__(self, variant: Variant, shape: KernelShape) -> None:
        misfit = shape.misfit()
        if misfit is not None:
            raise ConfigError(f"the native kernels do not run this model: {misfit}")
        self.shape = shape
        self._library = _load(variant.library)
        fields = {name: getattr(shape, name) for name, *_ in _Shape._fields_}
        factors = np.array(shape.rope_factors, np.float64)
        fields |= {"kv": KV_TYPES.index(shape.kv), "rope_factors": factors.ctypes.data if factors.size else None}
        self._model: int | None = self._library.chorus_create(ctypes.byref(_Shape(**fields)))
        if not self._model:
            raise EngineError("the native kernels found no memory for the model's KV blocks: give it fewer")

    def put_matrix(
        self, place: MatrixPlace, layer: int, kind: TensorType, parts: Sequence[NDArray[np.uint8]], *, cols: int
    ) -> None:
        """Rows [rows, bytes of a row] as the file has them; `qkv` stacks its parts, `gate_up` alternates them."""
        numbers, size = BLOCK_LAYOUT[kind]
        held = [np.ascontiguousarray(part) for part in parts]
        if kind not in KINDS or cols % numbers or any(part.shape[1] != cols // numbers * size for part in held):
            raise ValueError(f"{place}: {kind.name} rows of {cols} numbers have another size")
        if len(held) > 1 and any(part.shape[0] % PANEL for part in held):
            raise ValueError(f"{place}: its parts must have a multiple of {PANEL} rows")
        pointers = (ctypes.c_void_p * len(held))(*(part.ctypes.data for part in held))
        rows = (ctypes.c_int32 * len(held))(*(part.shape[0] for part in held))
        interleave = int(place == "gate_up")
        if self._library.chorus_matrix(
            self._model, layer, _MATRICES.index(place), int(kind), cols, len(held), pointers, rows, interleave
        ):
            raise EngineError("there is no memory for the model's weights")

    def tie_embedding(self) -> None:
        """The embedding is the head's matrix."""
        self._library.chorus_tie(self._model)

    def put_vector(self, place: VectorPlace, layer: int, values: NDArray[np.float32]) -> None:
        held = np.ascontiguousarray(values, dtype=np.float32)
        self._library.chorus_vector(self._model, layer, _VECTORS.index(place), held.ctypes.data, held.size)

    def forward(self, rows: Sequence[Rows], *, logits: bool) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
        """Compute the rows, write their keys and values -> (tokens drawn, their logits [drawn, vocab] if asked for)."""
        if self._model is None:
            raise RuntimeError("the model was closed")
        tokens: list[int] = []
        chunks: list[int] = []
        tables: list[int] = []
        wanted: list[int] = []
        draws: list[tuple[float, float, float, float, int, int]] = []
        for part in rows:
            chunks += (len(tokens), len(part.ids), part.start, len(tables))
            tokens += part.ids
            tables += part.blocks
            if len(part.blocks) * BLOCK_TOKENS < part.start + len(part.ids) or part.start < 0 or not part.ids:
                raise ValueError("a sequence's blocks do not cover its tokens")
            if part.start + len(part.ids) > self.shape.context:
                raise ValueError("a sequence is longer than the context")
            if part.draw is not None:
                wanted.append(len(tokens) - 1)
                draws.append(_fields(part.draw, self.shape.vocab))
        ids, table = _numbers(tokens, self.shape.vocab), _numbers(tables, self.shape.blocks)
        chunk, last = np.array(chunks, np.int32), np.array(wanted, np.int32)
        draw, drawn = np.array(draws, _DRAW), np.empty(len(wanted), np.int32)
        out = np.empty((len(wanted), self.shape.vocab), np.float32) if logits and wanted else None
        step = _Step(
            len(tokens),
            len(rows),
            len(wanted),
            any(temperature > 0 for temperature, *_ in draws),
            *(array.ctypes.data for array in (ids, chunk, table, last, draw, drawn)),
            None if out is None else out.ctypes.data,
        )
        if self._library.chorus_forward(self._model, ctypes.byref(step)):
            raise EngineError("the native kernels found no memory for a step")
        return drawn, out

    def close(self) -> None:
        """Idempotent."""
        model, self._model = self._model, None
        if model is not None:
            self._library.chorus_destroy(model)


def _fields(draw: Draw, vocab: int) -> tuple[float, float, float, float, int, int]:
    return draw.temperature, draw.min_p, draw.top_p, draw.unit, min(draw.top_k, vocab), 0


def _numbers(values: list[int], below: int) -> NDArray[np.int32]:
    """As int32; ValueError when one is outside [0, below): the library would read foreign memory."""
    array = np.array(values, np.int32)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= below):
        raise ValueError(f"a number is outside 0..{below - 1}")
    return array


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    doors = {
        "chorus_create": (pointer, [pointer]),
        "chorus_destroy": (None, [pointer]),
        "chorus_matrix": (number, [pointer, *[number] * 5, pointer, pointer, number]),
        "chorus_tie": (None, [pointer]),
        "chorus_vector": (None, [pointer, number, number, pointer, ctypes.c_int64]),
        "chorus_forward": (number, [pointer, pointer]),
    }
    for name, (result, arguments) in doors.items():
        door = getattr(library, name)
        door.restype, door.argtypes = result, arguments
    return library
