"""Every reply is the one it is alone: random schedules on tiny models and on the real one, in full.

    python -m tests.exactness [SCHEDULES]          500 in float32, as many over the kinds of quantised weights;
                                                    ends with an error at the first difference

admit, chunk, preempt, cancel, cache hit, continue; audited after every step, all blocks free at the end. `make test`
plays fewer of them (tests/unit/replica/test_schedules.py, test_native_schedules.py, tests/integration/test_native_real.py).
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from shared.tokenizer import load_tokenizer
from tests.exactness.real import Real, same_logits
from tests.integration.test_native_real import MODEL_FILE, TEXT, built
from tests.unit.replica import test_schedules
from tests.unit.replica.machine import Machine
from tests.unit.replica.native_models import KINDS, VARIANTS, kernel_model, tiny_file
from tests.unit.replica.test_native_schedules import BLOCKS_MAX, Bench

REAL_SCHEDULES, LOGIT_TRIALS = 20, 60


def count(told: Counter[str], machine: Machine) -> None:
    told["schedules"] += 1
    told["sequences"] += len(machine.records)
    told["preemptions"] += len(machine.preempted)
    told["cancelled"] += sum(record.freed for record in machine.records.values())
    told["cached_tokens"] += sum(record.cached_tokens or 0 for record in machine.records.values())


def floats(schedules: int) -> Counter[str]:
    """The torch path in float32, against the oracle that recomputes everything for every token."""
    told: Counter[str] = Counter()
    for seed in range(schedules):
        count(told, test_schedules.play(seed, torch.float32))
    return told


def quantised(kind: str, *, precise: bool, schedules: int) -> Counter[str]:
    """The native kernels on one kind of weights, against the same engine with nothing else to do."""
    told: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_file(Path(folder) / "tiny.gguf", KINDS[kind])
        with (
            kernel_model(path, VARIANTS[0], precise=precise, threads=2, blocks=BLOCKS_MAX) as busy,
            kernel_model(path, VARIANTS[0], precise=precise, blocks=BLOCKS_MAX) as quiet,
        ):
            bench = Bench(busy, quiet)
            for seed in range(schedules):
                count(told, bench.play(seed))
    return told


def real() -> Counter[str]:
    tokenizer, models = load_tokenizer(str(MODEL_FILE)), (built(), built())
    try:
        player, told = Real(*models, tokenizer), Counter[str]()
        for seed in range(REAL_SCHEDULES):
            player.play(seed, told)
        told["logits_bit_identical"] = same_logits(models[0], tokenizer.encode(TEXT), LOGIT_TRIALS)
    finally:
        for model in models:
            model.close()
    return told


def main() -> int:
    schedules = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    torch.set_num_threads(1)
    say("float32", floats(schedules))
    for kind in KINDS:
        for precise in (False, True):
            each = -(-schedules // (2 * len(KINDS)))
            say(f"{kind}, {'precise' if precise else 'fast'}", quantised(kind, precise=precise, schedules=each))
    if MODEL_FILE.exists():
        say(MODEL_FILE.name, real())
    return 0


def say(what: str, told: Counter[str]) -> None:
    print(json.dumps({"weights": what, **told}), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
