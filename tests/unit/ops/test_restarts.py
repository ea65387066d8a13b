import pytest

from ops.restarts import DELAY_S_MAX, DELAY_S_MIN, EXIT_CONFIG, FIRST_TRIES, STEADY_S, Restarts


def test_a_first_start_is_tried_a_few_times():
    """What never became ready is given up after FIRST_TRIES tries."""
    story = Restarts()
    delays = [story.died(ready_s=None, status=1) for _ in range(FIRST_TRIES)]
    assert delays[:-1] == [DELAY_S_MIN * 2**n for n in range(FIRST_TRIES - 1)]
    assert delays[-1] is None


def test_wrong_settings_are_given_up_at_once():
    """A program that says its settings are wrong is not started again."""
    assert Restarts().died(ready_s=None, status=EXIT_CONFIG) is None


@pytest.mark.parametrize("status", [0, 1, EXIT_CONFIG, -9])
def test_what_once_was_ready_is_never_given_up(status):
    """After the first readiness every death leads to another start, at bounded distances that grow."""
    story = Restarts()
    delays = [story.died(ready_s=1.0, status=status), *(story.died(ready_s=None, status=status) for _ in range(20))]
    assert None not in delays
    assert delays == sorted(delays)
    assert delays[0] == DELAY_S_MIN
    assert delays[-1] == DELAY_S_MAX


def test_a_steady_run_clears_the_story():
    """After a long ready run the next start comes quickly again."""
    story = Restarts()
    for _ in range(10):
        story.died(ready_s=1.0, status=-9)
    assert story.died(ready_s=STEADY_S, status=-9) == DELAY_S_MIN
