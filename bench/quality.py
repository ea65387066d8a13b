"""What quantised activations cost: perplexity and greedy agreement on our prose, beside float32 on the same weights.

python -m bench.quality [--tokens 20480] [--cases fast,fast/float16,...,llama.cpp] [--out bench/results/quality.json]
    a case: the kernels' mode, and after a slash what keys and values are kept as, if not the mode's own type
    llama.cpp: its own programs (make bench-peers), on the same file, beside their float32 on the file's weights

Windows of 512 tokens, each scored from its second token on; the kernels compute them as decodes, a token of every
window in each step, because a step hands out the logits of last rows only. Float32 is torch over the dequantised
weights. llama.cpp scores the second half of each window only; so every case says its agreement there, too.
"""

import argparse
import hashlib
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.engine_peers import LLAMA_SERVER, MODEL_FILE
from bench.hardware import describe
from services.replica.core.plan import SeqChunk
from services.replica.model.kv_size import KvType
from services.replica.model.load import open_checkpoint
from services.replica.model.loader import load_weights
from services.replica.model.native.kernels import BEST, Rows, Variant, choose
from services.replica.model.native_runner import build_model
from services.replica.model.transformer import Transformer
from shared.limits import BLOCK_TOKENS
from shared.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "data/prose.txt"
RESULT = Path(__file__).parent / "results/quality.json"
CASES = ("fast", "fast/float16", "fast/float32", "fast/bfloat16", "precise", "precise/int8", "llama.cpp")
WINDOW = 512
PROGRAM_S = 1800.0
BLOCKS = WINDOW // BLOCK_TOKENS
Scores = tuple[
    NDArray[np.float64], NDArray[np.int64]
]  # [windows, 511]: log-probability of the next token, and the best


def score(logits: NDArray[np.float32], following: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """[rows, vocab], [rows] -> log-probabilities of what follows, and the best tokens."""
    top = logits.max(axis=-1, keepdims=True)
    whole = top[:, 0].astype(np.float64) + np.log(np.exp(logits - top).sum(axis=-1, dtype=np.float64))
    return np.take_along_axis(logits, following[:, None], 1)[:, 0] - whole, logits.argmax(axis=-1)


def float32(windows: NDArray[np.int64]) -> Scores:
    with open_checkpoint(MODEL_FILE) as checkpoint:
        weights = load_weights(checkpoint, lambda _: None)
        model = Transformer(checkpoint.config, weights, blocks=BLOCKS, context=WINDOW)
    found = []
    for window in windows:
        chunk = SeqChunk("w", 1, 0, tuple(window.tolist()), tuple(range(BLOCKS)), None)
        found.append(score(model.every((chunk,)).numpy()[:-1], window[1:]))
    return np.stack([one for one, _ in found]), np.stack([best for _, best in found])


def native(windows: NDArray[np.int64], variant: Variant, kv: KvType | None, *, precise: bool, threads: int) -> Scores:
    with open_checkpoint(MODEL_FILE) as checkpoint:
        model = build_model(
            checkpoint,
            variant,
            context=WINDOW,
            blocks=BLOCKS * len(windows),
            threads=threads,
            precise=precise,
            kv=kv,
            progress=lambda _: None,
        )
    tables = [tuple(range(BLOCKS * at, BLOCKS * (at + 1))) for at in range(len(windows))]

    def steps() -> Iterator[Scores]:
        for at in range(WINDOW - 1):
            rows = [Rows((int(w[at]),), at, table, BEST) for w, table in zip(windows, tables, strict=True)]
            logits = model.forward(rows, logits=True)[1]
            assert logits is not None
            yield score(logits, windows[:, at + 1])

    found = list(steps())
    model.close()
    return np.stack([one for one, _ in found], axis=1), np.stack([best for _, best in found], axis=1)


def llama_cpp(windows: int, threads: int) -> dict[str, float]:
    """What its own comparison says of the file beside the same weights in float32, over the same text."""
    programs = LLAMA_SERVER.parent

    def ran(program: str, *flags: str) -> str:
        command = [str(programs / program), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=True)
        return done.stdout + done.stderr

    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        wide, base = f"{folder}/float32.gguf", f"{folder}/logits"
        ran("llama-quantize", "--allow-requantize", str(MODEL_FILE), wide, "F32")
        shape = ["-c", str(WINDOW), "-b", str(WINDOW), "--chunks", str(windows), "-t", str(threads)]
        ran("llama-perplexity", "-m", wide, "-f", str(TEXT), "--kl-divergence-base", base, *shape)
        said = ran("llama-perplexity", "-m", str(MODEL_FILE), "--kl-divergence-base", base, "--kl-divergence", *shape)

    def number(label: str) -> float:
        found = re.search(rf"{label}\s*:\s*([\d.]+)", said)
        if found is None:
            raise SystemExit(f"llama-perplexity says no {label!r}")
        return float(found.group(1))

    perplexity, wanted = number(r"Mean PPL\(Q\)"), number(r"Mean PPL\(base\)")
    return {
        "perplexity": perplexity,
        "perplexity_change_percent": 100 * (perplexity / wanted - 1),
        "greedy_agreement_second_half_percent": number("Same top p"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    variant = choose()
    if isinstance(variant, str):
        raise SystemExit(variant)
    ids = np.array(load_tokenizer(str(MODEL_FILE)).encode(TEXT.read_text()))
    count = min(args.tokens, len(ids)) // WINDOW
    windows = ids[: count * WINDOW].reshape(count, WINDOW)
    wanted, best = float32(windows)
    base = math.exp(-wanted.mean())
    result: dict[str, object] = {
        "tokens": int(windows.size),
        "text": hashlib.sha256(TEXT.read_bytes()).hexdigest()[:16],
        "kernels": variant.name,
        "hardware": describe(("numpy", "torch")),
    }
    for case in ("float32", *args.cases.split(",")):
        if case == "llama.cpp":
            if (LLAMA_SERVER.parent / "llama-quantize").exists():
                result[case] = llama_cpp(count, args.threads)
                print(case, result[case], flush=True)
            else:
                result[case] = "missing (make bench-peers)"
                print(case, result[case])
            continue
        found, chosen = wanted, best
        if case != "float32":
            mode, _, kind = case.partition("/")
            kv = KvType(kind) if kind else None
            found, chosen = native(windows, variant, kv, precise=mode == "precise", threads=args.threads)
        perplexity = math.exp(-found.mean())
        result[case] = {
            "perplexity": perplexity,
            "perplexity_change_percent": 100 * (perplexity / base - 1),
            "greedy_agreement_percent": 100 * float((chosen == best).mean()),
            "greedy_agreement_second_half_percent": 100 * float((chosen == best)[:, WINDOW // 2 :].mean()),
        }
        print(case, result[case], flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
