"""The `generate` of transformers on the same weights in fp32, in one process: the bar of our torch path.

python bench/transformers_generate.py FOLDER THREADS PROMPT_TOKENS OUT_TOKENS LONG_TOKENS BATCH...

Run by the environment of `make bench-peers vllm`, which has the package and the weights. Prints one line of JSON with
the figures of `bench.engine` that it has: batch N, single and prefill, in tokens a second.
"""

import json
import random
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, threads, prompt, out, long, *batches = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = random.Random(1)

    def seconds(count: int, length: int, tokens: int) -> float:
        rows = [[ids.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]
        asked = torch.tensor(rows)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                asked,
                attention_mask=torch.ones_like(asked),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    seconds(1, 16, 4)  # warm
    found = {"prefill": long / seconds(1, long, 1)}
    for count in batches:
        found[f"batch{count}"] = count * out / seconds(count, prompt, out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
