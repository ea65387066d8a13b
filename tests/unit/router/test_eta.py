"""Positions and rates are said only as far as they are known."""

from services.router.eta import ServedRate, queue_view
from shared.limits import QUEUE_VIEW_REPLIES_MAX, SERVED_RATE_MARKS_MAX, SERVED_RATE_WINDOW_S
from shared.tiers import Tier


def test_rate_is_departures_over_the_time_somebody_waited():
    """Four left in ten seconds of waiting: 0.4 a second."""
    rate = ServedRate()
    rate.waiting(5, 100.0)
    for at in (101.0, 103.0, 105.0, 109.0):
        rate.left(at)
    assert rate.per_s(110.0) == 0.4


def test_an_idle_queue_has_no_rate():
    """Nobody waiting says nothing about speed, and old departures do not count for the next queue."""
    rate = ServedRate()
    rate.waiting(1, 0.0)
    rate.left(1.0)
    rate.waiting(0, 1.0)
    assert rate.per_s(2.0) == 0.0
    rate.waiting(1, 50.0)
    assert rate.per_s(51.0) == 0.0


def test_old_departures_fall_out_of_the_window():
    """The rate is that of the window, not of all time."""
    rate = ServedRate()
    rate.waiting(9, 0.0)
    for at in range(1, 11):
        rate.left(float(at))
    assert rate.per_s(10.0 + SERVED_RATE_WINDOW_S) == 1 / SERVED_RATE_WINDOW_S


def test_a_fast_queue_is_not_underestimated():
    """More departures than are remembered shorten the window instead of lowering the rate."""
    rate = ServedRate()
    rate.waiting(9, 0.0)
    for n in range(SERVED_RATE_MARKS_MAX * 2):
        rate.left(n / 200)
    assert 190 < rate.per_s(SERVED_RATE_MARKS_MAX * 2 / 200) < 210


def test_a_view_names_a_bounded_few():
    """A long queue is counted whole and named in part."""
    order = [f"r{n}" for n in range(QUEUE_VIEW_REPLIES_MAX + 50)]
    view = queue_view(router="router-1", tier=Tier.FREE, model="m", order=order, waiting=len(order), served_per_s=2.0)
    assert view.waiting == QUEUE_VIEW_REPLIES_MAX + 50
    assert view.reply_ids == tuple(order[:QUEUE_VIEW_REPLIES_MAX])
