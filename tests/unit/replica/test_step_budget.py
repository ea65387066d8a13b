"""How much of a step prompts may take."""

import random

import pytest

from services.replica.core.step_budget import (
    ALONE_STEP_S_MAX,
    CHUNK_ROWS,
    MIXED_STEP_S,
    PROTECTED_STEP_S,
    StepBudget,
    attended,
    chunk_s,
    room_s,
)
from shared.messages import StepModel
from shared.tiers import Tier
from tests.unit.replica.machine import Machine, demand

MODEL = StepModel(base_s=0.008, per_token_s=0.001, per_attended_s=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_a_chunk_is_the_longest_that_fits(seed: int):
    """Taken rows cost no more than what is left, and as many more as kernels compute together would; a step with room
    always moves a prompt on."""
    rng = random.Random(seed)
    start, seconds = rng.choice([0, 5, 900, 8000]), rng.choice([0.01, 0.04, 0.24])
    model = rng.choice(
        [MODEL, StepModel(base_s=0.0, per_token_s=0.002), StepModel(base_s=0, per_token_s=0, per_attended_s=1e-5)]
    )
    count = StepBudget(10_000, seconds, model).take(start, 10_000)
    assert count >= CHUNK_ROWS
    assert count % CHUNK_ROWS == 0
    if count > CHUNK_ROWS:
        assert chunk_s(model, start, count) <= seconds * (1 + 1e-9)
    assert chunk_s(model, start, count + CHUNK_ROWS + 1) > seconds
    assert StepBudget(10_000, seconds, model).take(start, 3) == 3, "a prompt's last tokens"


def test_tokens_bound_it_where_time_does_not():
    """A model that costs nothing, or none: the token budget alone, over all chunks of the step."""
    for budget in (StepBudget(50, None, MODEL), StepBudget(50, 1.0, StepModel(base_s=0.02, per_token_s=0.0))):
        assert [budget.take(0, 30), budget.take(0, 30)] == [30, 20]
        assert not budget.open


def test_pairs_are_counted_as_they_are():
    """Each token attends to all before it and to itself."""
    assert attended(0, 1) == 1
    assert attended(7, 3) == 8 + 9 + 10


def test_the_many_are_not_slowed_for_the_few():
    """Far more decodes than prompts: a step is at most twice the decodes' own; with more prompts it may be longer."""
    assert room_s(MODEL, decodes_s=0.0, decodes=0, prompts=1) == pytest.approx(ALONE_STEP_S_MAX - 0.008)
    assert room_s(MODEL, decodes_s=0.06, decodes=16, prompts=1) == pytest.approx(0.054)
    assert room_s(MODEL, decodes_s=0.01, decodes=5, prompts=1) == pytest.approx(PROTECTED_STEP_S - 0.01)
    assert room_s(MODEL, decodes_s=0.06, decodes=16, prompts=4) == pytest.approx(MIXED_STEP_S - 0.008)
    grown = [room_s(MODEL, decodes_s=0.06, decodes=16, prompts=1, grown_s=seconds) for seconds in (0.01, 0.02, 0.05)]
    assert grown == pytest.approx([0.035, 0.016, 0.015]), (
        "what they wrote meanwhile is not added to, and a rest is left"
    )
    slow = StepModel(base_s=0.5, per_token_s=0.0)
    assert room_s(slow, decodes_s=0.5, decodes=0, prompts=1) == room_s(slow, decodes_s=0.5, decodes=1, prompts=1) == 0.5


@pytest.mark.parametrize("per_token_s", [0.003, 0.0004])
def test_a_long_prompt_beside_many_decodes_keeps_their_steps_short(per_token_s: float):
    """Every step that holds a piece of it is predicted within twice what the decodes' own was when it came, though they
    grow meanwhile; and it comes to its end."""
    machine = Machine(blocks=1400, running_max=20, step_tokens_max=600, mixed_tokens_max=512)
    model = StepModel(base_s=0.008, per_token_s=per_token_s, per_attended_s=4e-7)

    def step() -> tuple[float, float]:
        """(predicted seconds, those of its decodes alone)."""
        plan = machine.scheduler.plan(0.0, model)
        machine.scheduler.commit(plan, machine.runner.run(plan), 0.0, model)
        whole = [chunk_s(model, chunk.start, len(chunk.ids)) for chunk in plan.chunks]
        decodes = [cost for cost, chunk in zip(whole, plan.chunks, strict=True) if len(chunk.ids) == 1]
        return model.base_s + sum(whole), model.base_s + sum(decodes)

    for number in range(16):
        machine.submit(demand(chr(97 + number), 8, budget=900))
    while any(sequence.remaining > 1 for sequence in machine.scheduler._running) or not machine.scheduler._running:
        step()
    machine.submit(demand("z", 4000, budget=1))
    steps = [step()]
    while "z" in machine.scheduler._sequences:
        steps.append(step())
    before = steps[0][1]
    assert steps[-1][1] > before
    assert all(whole <= max(2 * before, PROTECTED_STEP_S, 1.25 * decodes) for whole, decodes in steps)
    assert len(steps) < 900


def test_a_prompt_that_was_held_back_takes_nothing_from_a_better_lane():
    """What the decodes wrote while it waited is not held against a prompt of a higher lane that came later."""
    model = StepModel(base_s=0.008, per_token_s=0.0004, per_attended_s=2e-6)

    def second_chunk(*, held_back: bool) -> int:
        machine = Machine(blocks=1400, running_max=20, step_tokens_max=600, mixed_tokens_max=512)

        def step() -> dict[str, int]:
            plan = machine.scheduler.plan(0.0, model)
            machine.scheduler.commit(plan, machine.runner.run(plan), 0.0, model)
            return {chunk.sequence_id: len(chunk.ids) for chunk in plan.chunks}

        for number in range(16):
            machine.submit(demand(chr(97 + number), 8, budget=900))
            step()
        if held_back:
            machine.submit(demand("y", 4000, budget=1, tier=Tier.BACKGROUND))
        for _ in range(100):
            step()
        machine.submit(demand("z", 2000, budget=1))
        step()
        return step()["z"]

    assert second_chunk(held_back=True) == second_chunk(held_back=False)
