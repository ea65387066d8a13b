"""A step's cost split over its sequences."""

import random

import pytest

from services.replica.core.plan import SeqChunk, StepPlan
from services.replica.core.step_cost import BY_TOKENS, cost_rates
from shared.messages import StepModel
from tests.unit.replica.machine import Machine, demand


def plan(*parts: tuple[int, int]) -> StepPlan:
    """Of chunks (start, tokens)."""
    return StepPlan(
        1, tuple(SeqChunk(str(at), 1, start, (1,) * count, (), None) for at, (start, count) in enumerate(parts))
    )


def costs(step: StepPlan, model: StepModel, seconds: float) -> list[float]:
    each_s, per_token_s, per_attended_s = cost_rates(step, model, seconds)
    pairs = [sum(range(chunk.start + 1, chunk.end + 1)) for chunk in step.chunks]
    return [
        each_s + per_token_s * len(chunk.ids) + per_attended_s * attended
        for chunk, attended in zip(step.chunks, pairs, strict=True)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_costs_of_a_step_sum_to_what_it_took(seed: int):
    """Whatever the step, the model and the time measured, nothing is lost and nobody pays less than nothing."""
    rng = random.Random(seed)
    step = plan(*((rng.randrange(3000), rng.choice([1, 1, 1, 300])) for _ in range(rng.randrange(1, 70))))
    model = StepModel(
        base_s=rng.choice([0.0, 0.02]), per_token_s=rng.choice([0.0, 1e-3]), per_attended_s=rng.choice([0.0, 1e-6])
    )
    found = costs(step, model, 0.07)
    assert sum(found) == pytest.approx(0.07)
    assert min(found) >= 0


def test_each_part_is_paid_by_who_causes_it():
    """Weights are read once for all; tokens and context are paid by number."""
    step = plan((0, 100), (900, 1))
    assert costs(step, StepModel(base_s=0.1, per_token_s=0.0), 1.0) == pytest.approx([0.5, 0.5])
    assert costs(step, StepModel(base_s=0.0, per_token_s=0.1), 1.01) == pytest.approx([1.0, 0.01])
    by_context = costs(plan((0, 9), (954, 1)), StepModel(base_s=0.0, per_token_s=0.0, per_attended_s=1.0), 1.0)
    assert by_context == pytest.approx([0.045, 0.955])
    assert costs(step, StepModel(base_s=0.0, per_token_s=0.0), 1.0) == pytest.approx([0.5, 0.5]), "nothing is known"


def test_the_scheduler_splits_as_the_model_says():
    """A prompt beside a decode pays for its tokens, and for half of the weights."""
    for model, share in ((BY_TOKENS, 31 / 32), (StepModel(base_s=1.0, per_token_s=0.0), 1 / 2)):
        machine = Machine()
        machine.submit(demand("a", 1, budget=2))
        machine.step()
        machine.submit(demand("b", 31, budget=1))
        step = machine.scheduler.plan(0.0)
        result = machine.runner.run(step)
        outputs = machine.scheduler.commit(step, result, 1.0, model)
        of_b = next(output for output in outputs if output.sequence_id == "b")
        assert of_b.engine_s == pytest.approx(share * result.seconds)
