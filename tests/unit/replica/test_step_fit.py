"""The step model fitted to samples."""

import os
import random
import time

import pytest

from services.replica.core.step_budget import ALONE_STEP_S, ALONE_STEP_S_MAX
from services.replica.core.step_fit import StepSample, StepTimes, fit, predict, tokens_within
from services.replica.warm_up import draw_test_token, step_budgets, step_clock, warm_up
from shared.errors import EngineError
from shared.messages import StepModel
from tests.unit.replica.machine import VOCABULARY, Script


def measured(
    base: float, per_token: float, per_attended: float, noise: float = 0.0, count: int = 200
) -> list[StepSample]:
    rng = random.Random(4)
    shapes = [(rng.randrange(1, 200), rng.randrange(1, 5_000)) for _ in range(count)]
    return [
        StepSample(
            tokens, context, (base + per_token * tokens + per_attended * context) * (1 + rng.uniform(-noise, noise))
        )
        for tokens, context in shapes
    ]


def test_an_exact_model_is_found_again():
    """From steps that follow a model, that model comes out."""
    model = fit(measured(0.02, 0.003, 2e-6))
    assert (model.base_s, model.per_token_s, model.per_attended_s) == pytest.approx((0.02, 0.003, 2e-6), rel=1e-4)


def test_noise_moves_it_little():
    """With a fifth of noise the prediction is within a tenth."""
    model = fit(measured(0.02, 0.003, 2e-6, noise=0.2))
    assert predict(model, 50, 1_000) == pytest.approx(0.02 + 0.15 + 0.002, rel=0.1)


def test_no_part_is_ever_negative():
    """Where more context happened to be faster, context counts nothing; where time is constant, so does all but the base."""
    faster = [StepSample(1, context, 0.02 - context * 1e-6) for context in (10, 1_000, 5_000)]
    assert fit(faster).per_attended_s == 0
    constant = fit([StepSample(1, 1, 0.02), StepSample(64, 8192, 0.02)])
    assert predict(constant, 500, 100) == pytest.approx(0.02, rel=0.01)
    assert min(constant.base_s, constant.per_token_s, constant.per_attended_s) >= 0


def test_one_sample_is_enough_to_start():
    """The model of a single step predicts that step."""
    assert predict(fit([StepSample(8, 100, 0.05)]), 8, 100) == pytest.approx(0.05, rel=1e-3)
    with pytest.raises(ValueError):
        fit([])


def test_a_running_engine_follows_its_machine_and_forgets_neither_kind_of_step():
    """After many slower decodes the decode is predicted slower, while prompts are still known from warm-up."""
    times = StepTimes(measured(0.01, 0.002, 0.0))
    for _ in range(300):
        times.observe(StepSample(1, 100, 0.03), only_decodes=True)
    assert predict(times.model, 1, 100) == pytest.approx(0.03, rel=0.35)
    assert predict(times.model, 150, 150) > 0.2


def test_budgets_follow_the_measured_step():
    """A fast machine computes long chunks, a slow one short ones, in whole blocks; what was asked for stands."""
    slow = StepModel(base_s=0.01, per_token_s=0.003)
    alone, mixed = step_budgets(slow, running_max=8, alone=0, mixed=0)
    assert (alone % 16, mixed) == (0, 16)
    assert predict(slow, alone, 0) <= ALONE_STEP_S
    assert step_budgets(StepModel(base_s=0.0, per_token_s=0.0), running_max=8, alone=0, mixed=0) == (512, 512)
    assert step_budgets(slow, running_max=64, alone=0, mixed=0)[0] == 80, "all decodes and a block"
    assert step_budgets(slow, running_max=8, alone=100, mixed=50) == (100, 50)
    assert step_budgets(slow, running_max=8, alone=2048, mixed=0)[0] == 2048
    assert tokens_within(slow, 0.01) == 0


def test_a_step_that_is_long_anyway_still_takes_prompts():
    """Where a step of one token lasts as long as a mixed one may, prompts are not starved to a block a step."""
    long = StepModel(base_s=0.1, per_token_s=0.0005)
    assert step_budgets(long, running_max=8, alone=0, mixed=0)[1] >= 128
    assert step_budgets(fit([StepSample(1, 1, 0.1), StepSample(64, 8192, 0.1)]), 8, 0, 0) == (512, 512)


def test_a_costly_base_is_shared_by_many_tokens():
    """Weights read in float32: prompts alone are computed in steps that are mostly work, within what a cancel may take."""
    costly = StepModel(base_s=0.03, per_token_s=0.002)
    alone, mixed = step_budgets(costly, running_max=8, alone=0, mixed=0)
    assert 12 * costly.base_s < predict(costly, alone, 0) <= ALONE_STEP_S_MAX
    assert predict(costly, mixed, 0) > 3 * costly.base_s
    worse = StepModel(base_s=0.1, per_token_s=0.002)
    assert all(predict(worse, tokens, 0) <= ALONE_STEP_S_MAX for tokens in step_budgets(worse, 8, 0, 0))


def test_warm_up_measures_every_shape_that_fits():
    """Each shape gives its prompt step and its decodes; what does not fit is left out, and nothing fitting is an error."""
    ticks = iter(range(10_000))
    samples = warm_up(Script(), VOCABULARY, [(1, 16), (4, 8)], lambda: next(ticks) * 1e-4)
    assert [(sample.tokens, sample.attended) for sample in samples] == [
        (16, 16 * 17 // 2),
        (1, 17),
        (1, 18),
        (32, 4 * 8 * 9 // 2),
        (4, 36),
        (4, 40),
        (16, 16 * 1024 + 16 * 17 // 2),
    ]
    assert all(sample.seconds > 0 for sample in samples)
    with pytest.raises(EngineError, match="memory"):
        warm_up(Script(), VOCABULARY, [(1 << 20, 16)], lambda: 0.0)


def test_a_busy_start_is_no_slow_machine():
    """On the processor the first steps are measured by what they compute, not by how long others kept them waiting."""
    clock, began, now = step_clock("cpu", 1), [], time.monotonic()
    began.append(clock())
    time.sleep(0.2)
    waited = clock() - began[0]
    while time.process_time() - began[0] < 0.2:
        sum(range(1000))
    assert waited < 0.1
    assert clock() - began[0] >= 0.2
    assert step_clock("cuda", 1)() >= now + 0.4, "a GPU computes while this process waits"


def test_work_is_shared_out_over_the_cores():
    """Two threads on two cores compute twice as much in the same time; on one core they do not."""
    there = len(os.sched_getaffinity(0))
    one, all_of_them = step_clock("cpu", 1), step_clock("cpu", 4 * there)
    spent = one()
    assert spent > 0
    assert all_of_them() == pytest.approx(spent / there, rel=0.2)


def test_a_test_token_outside_the_vocabulary_is_no_readiness():
    """A model that draws ids its tokenizer does not know fails at the start, not in front of a user."""
    with pytest.raises(EngineError, match="do not fit"):
        draw_test_token(Script({"0": [len(VOCABULARY)]}), VOCABULARY, lambda: 0.0)
