"""The native CPU kernels: one `forward` per step over quantised weights and a paged half-precision cache.

Built by `python -m services.replica.model.native` where a C++ compiler is, once per instruction set; the best one that
this processor can run is loaded. Where there is none, the plain-torch runner takes its place and says so.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
BUILT = FOLDER / "built"

# Instruction sets, best first: name -> (compiler flags, /proc/cpuinfo flags it needs)
VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512": (
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"}),
    ),
    "avx2": (("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
    "portable": ((), frozenset()),
}


class Shape(ctypes.Structure):
    """A model as the kernels see it; mirrors `Shape` in forward.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")),
        *((name, ctypes.c_int32) for name in ("blocks", "threads", "residual", "qk_norm")),
        ("eps", ctypes.c_float),
        ("theta", ctypes.c_float),
    ]


class Chunk(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("row", "count", "start", "table")]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "chunks", "logits")),
        ("tokens", ctypes.c_void_p),
        ("chunk", ctypes.POINTER(Chunk)),
        ("tables", ctypes.c_void_p),
        ("logits_rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]
