"""First steps of a fresh runner: they warm it, prove that it draws tokens, and measure how long steps take."""

import gc
import os
from collections.abc import Callable, Sequence

from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import SeqChunk, StepPlan, blocks_for
from services.replica.core.scheduler import Scheduler, SchedulerLimits
from services.replica.core.sequence import Demand
from services.replica.core.step_budget import tokens_s
from services.replica.core.step_fit import StepSample, tokens_within
from services.replica.runner import Runner
from shared.clock import computed_s, now_s
from shared.errors import EngineError
from shared.limits import BLOCK_TOKENS
from shared.messages import Sampling, StepModel
from shared.tiers import Tier

# (sequences, prompt tokens of each): enough to tell base, per token and per context apart.
SHAPES = ((1, 16), (1, 96), (8, 8), (1, 192))
MEASURE_S = 4.0  # on a machine too busy for all shapes, what was measured by then must do
DEEP, DEEP_TOKENS = 1024, 16
_DECODES = 2
STEP_TOKENS_MAX = 512


def step_clock(device: str, threads: int) -> Callable[[], float]:
    """The clock for steps that are measured at the start.

    On the processor it counts what is computed, shared out over the cores: replicas that start together on one machine,
    and the services beside them, would each find it half as fast as it is, and keep their steps small ever after.
    """
    if device != "cpu":
        return now_s
    cores = min(threads, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads)
    return lambda: computed_s() / cores


def warm_up(
    runner: Runner,
    vocabulary: Vocabulary,
    shapes: Sequence[tuple[int, int]],
    clock: Callable[[], float],
    *,
    now: Callable[[], float] = now_s,
) -> list[StepSample]:
    """Run the first shape to warm up, then measure each by `clock`, for MEASURE_S by `now`.

    What stands in the blocks afterwards, nobody will look up.
    """
    room = min(runner.info.blocks_total * BLOCK_TOKENS, runner.info.context_max)
    fitting = [(count, length) for count, length in shapes if count * (length + 1 + _DECODES) <= room]
    if not fitting:
        raise EngineError(f"the engine has room for {room} tokens, too few to run anything: give it more memory")
    _measure(runner, vocabulary, *fitting[0], clock)
    began = now()
    samples: list[StepSample] = []
    for count, length in fitting:
        if now() - began < MEASURE_S:
            samples += _measure(runner, vocabulary, count, length, clock)
    if room >= DEEP + DEEP_TOKENS:
        samples.append(_measure_deep(runner, clock))
    return samples


def _measure_deep(runner: Runner, clock: Callable[[], float]) -> StepSample:
    """A short chunk that attends to much: what stands there was never computed, and nothing is drawn from it."""
    blocks = tuple(range(blocks_for(DEEP + DEEP_TOKENS)))
    chunk = SeqChunk("deep", 1, DEEP, (0,) * DEEP_TOKENS, blocks, None)
    plan = StepPlan(1, (chunk,))
    began = clock()
    runner.run(plan)
    return StepSample(plan.tokens, plan.attended, clock() - began)


def settle_memory() -> None:
    """What stands after the start stays, and no step leaves cycles behind: the collector need not look often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def draw_test_token(runner: Runner, vocabulary: Vocabulary, clock: Callable[[], float]) -> None:
    """Draw one token, without measuring; EngineError when it is none."""
    _measure(runner, vocabulary, 1, 1, clock, decodes=0)


def _measure(
    runner: Runner,
    vocabulary: Vocabulary,
    count: int,
    length: int,
    clock: Callable[[], float],
    *,
    decodes: int = _DECODES,
) -> list[StepSample]:
    limits = SchedulerLimits(
        running_max=count,
        waiting_max=count,
        step_tokens_max=count * length + 1,
        mixed_tokens_max=1,
        reserve_blocks=0,
        context_max=runner.info.context_max,
    )
    scheduler = Scheduler(pool=BlockPool(runner.info.blocks_total), vocabulary=vocabulary, limits=limits)
    for number in range(count):
        prompt = [(number * 7919 + place * 104729) % len(vocabulary) for place in range(length)]
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        demand = Demand(
            sequence_id=str(number), tier=Tier.PAID, prompt=prompt, budget=1 + decodes, sampling=sampling, seed=0
        )
        if (answer := scheduler.submit(demand, 0.0)) is not None:
            raise EngineError(f"the engine takes no test prompt of {length} tokens: {answer}")
    samples = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        began = clock()
        result = runner.run(plan)
        samples.append(StepSample(plan.tokens, plan.attended, clock() - began))
        if not all(0 <= token < len(vocabulary) for token in result.sampled):
            raise EngineError("the test tokens are outside the vocabulary: model and tokenizer do not fit")
        scheduler.commit(plan, result, 0.0)
    return samples


def step_budgets(model: StepModel, running_max: int, alone: int, mixed: int) -> tuple[int, int]:
    """(step_tokens_max, mixed_tokens_max): as asked for, or what the measured step time allows, in whole blocks."""
    least = running_max + BLOCK_TOKENS
    alone_s, mixed_s = tokens_s(model)
    alone = max(least, alone or min(_blocks_down(tokens_within(model, alone_s)), STEP_TOKENS_MAX))
    mixed = mixed or _blocks_down(tokens_within(model, mixed_s))
    return alone, max(BLOCK_TOKENS, min(mixed, alone))


def _blocks_down(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
