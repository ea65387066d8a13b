"""A slice of the model check; `python -m tests.model` runs 100,000 interleavings."""

import pytest

from tests.model.rules import TAKEN_AWAY
from tests.model.run import first_to_catch, run_batch, run_seed

SLICE = 500
CATCH_MAX = 1_500


@pytest.mark.parametrize("first", range(0, 5_000, SLICE))
def test_every_rule_holds_in_every_interleaving(first: int) -> None:
    """Whatever is lost, doubled, late, crashed or paused: tokens, ends, leases and screens stay right."""
    violations = [outcome for outcome in run_batch(range(first, first + SLICE)) if outcome.check is not None]
    assert not violations, "\n".join(str(outcome) for outcome in violations)


@pytest.mark.parametrize("rule", TAKEN_AWAY)
def test_a_rule_taken_away_is_noticed(rule: str) -> None:
    """Each rule is needed: without it some interleaving breaks a check."""
    assert first_to_catch(rule, CATCH_MAX) is not None, f"nothing noticed that {rule!r} is gone"


def test_a_seed_is_an_interleaving() -> None:
    """The same seed runs the same events to the same end."""
    assert [run_seed(seed) for seed in range(50)] == [run_seed(seed) for seed in range(50)]
