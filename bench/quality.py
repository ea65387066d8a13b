"""What quantised activations cost: perplexity and greedy agreement on our prose, beside float32 on the same weights.

python -m bench.quality [--tokens 20480] [--modes fast,precise] [--out bench/results/quality.json]

Windows of 512 tokens, each scored from its second token on; the kernels compute them as decodes, a token of every
window in each step, because a step hands out the logits of last rows only. Float32 is torch over the dequantised
weights.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from bench.engine_peers import MODEL_FILE
from bench.hardware import describe
from services.replica.core.plan import SeqChunk
from services.replica.model.attention import lay_out
from services.replica.model.config import read_config
from services.replica.model.layers import rms_norm, swiglu
from services.replica.model.loader import load_weights
from services.replica.model.native.kernels import BEST, Rows, Variant, choose
from services.replica.model.native_runner import build_model
from services.replica.model.transformer import Transformer
from shared.gguf import GgufFile
from shared.limits import BLOCK_TOKENS
from shared.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "data/prose.txt"
RESULT = Path(__file__).parent / "results/quality.json"
WINDOW = 512
BLOCKS = WINDOW // BLOCK_TOKENS
Scores = tuple[
    NDArray[np.float64], NDArray[np.int64]
]  # [windows, 511]: log-probability of the next token, and the best


def score(logits: NDArray[np.float32], following: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """[rows, vocab], [rows] -> log-probabilities of what follows, and the best tokens."""
    top = logits.max(axis=-1, keepdims=True)
    whole = top[:, 0].astype(np.float64) + np.log(np.exp(logits - top).sum(axis=-1, dtype=np.float64))
    return np.take_along_axis(logits, following[:, None], 1)[:, 0] - whole, logits.argmax(axis=-1)


class EveryRow(Transformer):
    """The float32 reference, with the logits of all rows."""

    @torch.inference_mode()
    def every(self, chunk: SeqChunk) -> NDArray[np.float32]:
        layout, config = lay_out((chunk,)), self._config
        x = self._weights.embedding[layout.tokens]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(x, index, layer, layout)
            x = x + swiglu(rms_norm(x, layer.ffn_norm, config.eps), layer.gate_up, layer.down)
        return functional.linear(rms_norm(x, self._weights.final_norm, config.eps), self._weights.head).numpy()


def float32(windows: NDArray[np.int64]) -> Scores:
    with GgufFile(MODEL_FILE) as file:
        config = read_config(file)
        model = EveryRow(config, load_weights(file, config, lambda _: None), blocks=BLOCKS, context=WINDOW)
    found = [
        score(model.every(SeqChunk("w", 1, 0, tuple(window.tolist()), tuple(range(BLOCKS)), None))[:-1], window[1:])
        for window in windows
    ]
    return np.stack([one for one, _ in found]), np.stack([best for _, best in found])


def native(windows: NDArray[np.int64], variant: Variant, *, precise: bool, threads: int) -> Scores:
    with GgufFile(MODEL_FILE) as file:
        model = build_model(
            file,
            read_config(file),
            variant,
            context=WINDOW,
            blocks=BLOCKS * len(windows),
            threads=threads,
            precise=precise,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--modes", default="fast,precise")
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
    for mode in ("float32", *args.modes.split(",")):
        reference = mode == "float32"
        found, chosen = (
            (wanted, best) if reference else native(windows, variant, precise=mode == "precise", threads=args.threads)
        )
        perplexity = math.exp(-found.mean())
        result[mode] = {
            "perplexity": perplexity,
            "perplexity_change_percent": 100 * (perplexity / base - 1),
            "greedy_agreement_percent": 100 * float((chosen == best).mean()),
        }
        print(mode, result[mode], flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
