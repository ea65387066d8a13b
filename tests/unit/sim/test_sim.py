"""A slice of the takeover worlds; `python -m sim` runs ten thousand."""

import pytest

from sim.rules import PLANTED
from sim.run import first_to_catch, run_batch, run_seed
from sim.scenarios import SCENARIOS

SLICE = 40
CATCH_MAX = 200


@pytest.mark.parametrize("first", range(0, 160, SLICE))
def test_every_check_holds_in_every_world(first: int) -> None:
    """Whatever is lost, doubled, late, crashed, paused or away: logs, screens, lanes, turns, blocks and ledger are right."""
    violations = [outcome for outcome in run_batch(range(first, first + SLICE)) if outcome.check is not None]
    assert not violations, "\n".join(str(outcome) for outcome in violations)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_noticed(bug: str) -> None:
    """A checker sees each planted bug within 200 worlds."""
    assert first_to_catch(bug, CATCH_MAX) is not None, f"nothing noticed {bug!r}"


def test_a_seed_is_a_world() -> None:
    """The same seed runs the same events to the same end."""
    assert [run_seed(seed) for seed in range(10)] == [run_seed(seed) for seed in range(10)]


def test_a_violation_says_how_to_see_it_again() -> None:
    """The printed command runs the same seed with the same bug."""
    caught = first_to_catch("a hole skipped", CATCH_MAX)
    assert caught is not None
    assert str(caught).endswith(f'python -m sim --seed {caught.seed} --plant "a hole skipped"')


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    """The incident goes as its story says."""
    SCENARIOS[name]()
