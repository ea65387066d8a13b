"""Our engine without a server, as `transformers_generate` is without one: the same prompts at once, the same figures.

python -m bench.engine_in_process MODEL_FILE THREADS PROMPT_TOKENS OUT_TOKENS LONG_TOKENS BATCH...

Prints one line of JSON: batch N and prefill, in tokens a second.
"""

import json
import random
import sys
import time

from services.replica.engine import Engine
from services.replica.engine_main import start
from services.replica.engine_messages import EngineConfig, SubmitSequence
from shared.messages import Sampling, pack_ids
from shared.tiers import Tier

KV_BYTES = 1 << 30


class Quiet:
    """Nobody is told of the start, and nobody watches the steps."""

    def send(self, message: object) -> None: ...

    def begin(self, now: float, predicted_s: float) -> None: ...

    def end(self) -> None: ...


def seconds(engine: Engine, ids: random.Random, count: int, length: int, tokens: int) -> float:
    """From the first prompt handed over until the last token."""
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    asked = [
        SubmitSequence(
            sequence_id=f"{ids.getrandbits(64)}",
            tier=Tier.PAID,
            prompt=pack_ids([ids.randrange(1000, 40_000) for _ in range(length)]),
            budget=tokens,
            sampling=greedy,
        )
        for _ in range(count)
    ]
    began, written = time.perf_counter(), 0
    report = engine.step(asked)
    while report is not None:
        written += sum(len(each.ids) for each in report.tokens)
        report = engine.step(())
    if written != count * tokens:
        raise RuntimeError(f"{written} tokens instead of {count * tokens}")
    return time.perf_counter() - began


def main() -> None:
    model_file, threads, prompt, out, long, *batches = sys.argv[1], *map(int, sys.argv[2:])
    quiet, ids = Quiet(), random.Random(1)
    config = EngineConfig(model_file=model_file, threads=threads, kv_bytes=KV_BYTES)
    engine = start(quiet, config, quiet)
    seconds(engine, ids, 1, 16, 4)  # warm
    found = {"prefill": long / seconds(engine, ids, 1, long, 1)}
    for count in batches:
        found[f"batch{count}"] = count * out / seconds(engine, ids, count, prompt, out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
