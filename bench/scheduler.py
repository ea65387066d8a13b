"""What the scheduler and the block pool cost a step: plan, commit, load and the pool's changes, with a scripted model.

python -m bench.scheduler [--running 256] [--steps 2000] [--out bench/results/scheduler.json]

Every case keeps `running` sequences in the batch and `waiting` in the lanes: who finishes is followed by an arrival, so
that admission, chunks, growth, publishing and eviction are all in the steps. The cost must follow what is scheduled:
the same with 100 waiting as with 10,000, and in proportion with the batch.

figure           from                                     to
step_ms          plan called                              pool's changes taken, the model's time left out
submit_us        a sequence handed in                     it waits

`step_ms_quiet` is the median of the quietest hundred steps in a row: on a machine that others use, the nearest to what
the code costs; `step_ms_p50` is the median of all steps, whatever else ran.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from bench.hardware import describe
from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import StepPlan, StepResult
from services.replica.core.scheduler import Scheduler, SchedulerLimits
from services.replica.core.sequence import Demand
from services.replica.stub_runner import scripted_token
from services.replica.warm_up import settle_memory
from shared.messages import Sampling, StepModel
from shared.tiers import LANE_ORDER
from shared.tokenizer import StubTokenizer

ROOT = Path(__file__).resolve().parents[1]
PROMPT, SHARED, OUT_MIN, OUT_MAX = 128, 64, 64, 192  # tokens
MIXED = 256  # prompt tokens beside decodes
WARM_STEPS = 400  # until finishes and arrivals are spread evenly
TARGET_MS = 1.0
MODEL = StepModel(base_s=0.005, per_token_s=0.0004, per_attended_s=4e-7)  # as two cores have it with SmolLM2
_ROUND = 100


class Crowd:
    """A scheduler that is kept full."""

    def __init__(self, running: int, waiting: int, seed: int) -> None:
        tokenizer = StubTokenizer()
        limits = SchedulerLimits(
            running_max=running,
            waiting_max=waiting + running + 1,
            step_tokens_max=running + MIXED,
            mixed_tokens_max=MIXED,
            reserve_blocks=running // 8,
            context_max=4096,
        )
        blocks = running * (PROMPT + OUT_MAX) // 16 * 5 // 4
        self.scheduler = Scheduler(
            pool=BlockPool(blocks), vocabulary=Vocabulary(tokenizer.token_bytes, tokenizer.stop_ids), limits=limits
        )
        self.submit_s: list[float] = []
        self._rng, self._number = random.Random(seed), 0
        self._heads = [[self._rng.randrange(90) for _ in range(SHARED)] for _ in range(8)]
        for _ in range(running + waiting):
            self.arrive()

    def arrive(self) -> None:
        rng = self._rng
        self._number += 1
        own = [rng.randrange(90) for _ in range(PROMPT - SHARED)]
        demand = Demand(
            sequence_id=f"resp_{self._number:026d}.1",
            tier=rng.choice(LANE_ORDER),
            prompt=[*rng.choice(self._heads), *own],
            budget=rng.randrange(OUT_MIN, OUT_MAX),
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            seed=self._number,
        )
        began = perf_counter()
        self.scheduler.submit(demand, 0.0)
        self.submit_s.append(perf_counter() - began)

    def step(self) -> tuple[float, int]:
        """(seconds without the model, sequences scheduled); as many arrive as finished."""
        scheduler = self.scheduler
        began = perf_counter()
        plan = scheduler.plan(0.0, MODEL)
        planned = perf_counter()
        result = _scripted(plan)
        ran = perf_counter()
        outputs = scheduler.commit(plan, result, 0.0, MODEL)
        scheduler.load()
        scheduler.pool.take_changes()
        seconds = perf_counter() - ran + planned - began
        for output in outputs:
            if output.finish is not None:
                self.arrive()
        return seconds, len(plan.chunks)


def _scripted(plan: StepPlan) -> StepResult:
    return StepResult(
        [scripted_token(c.sample.seed, c.sample.position) for c in plan.sampled_chunks if c.sample is not None], 0.01
    )


def measure(running: int, waiting: int, steps: int, seed: int) -> dict[str, float | int]:
    crowd = Crowd(running, waiting, seed)
    for _ in range(WARM_STEPS):
        crowd.step()
    settle_memory()  # as the engine does
    taken = [crowd.step() for _ in range(steps)]
    crowd.scheduler.check()
    cost_ms = [1e3 * seconds for seconds, _ in taken]
    scheduled = statistics.mean(count for _, count in taken)
    return {
        "running": running,
        "waiting": waiting,
        "step_ms_quiet": round(min(map(statistics.median, batched(cost_ms, _ROUND))), 4),
        "step_ms_p50": round(statistics.median(cost_ms), 4),
        "step_ms_p95": round(_percentile(cost_ms, 95), 4),
        "step_ms_max": round(max(cost_ms), 4),
        "scheduled_mean": round(scheduled, 1),
        "us_per_scheduled": round(1e3 * statistics.median(cost_ms) / scheduled, 3),
        "submit_us_p50": round(1e6 * statistics.median(crowd.submit_s), 2),
    }


def batched(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[at : at + size] for at in range(0, len(values) - size + 1, size)]


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/scheduler.json")
    args = parser.parse_args()
    cases = [(args.running, 10_000), (args.running, 100), (args.running // 4, 10_000), (args.running // 4, 100)]
    rows = [measure(running, waiting, args.steps, args.seed) for running, waiting in cases]
    result = {
        "target_ms_p50": TARGET_MS,
        "cases": rows,
        "many_waiting_to_few": round(float(rows[0]["step_ms_quiet"]) / float(rows[1]["step_ms_quiet"]), 3),
        "steps": args.steps,
        "load_average": os.getloadavg(),
        "hardware": describe(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
