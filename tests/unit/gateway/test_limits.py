"""Requests a minute and in flight: who is let in, who is told when to come again."""

import pytest

from services.gateway.limits import Allowed, Entry, Verdict, Visitor, duration, rate_headers

ALLOWED = Allowed(per_min=60, in_flight=3)
LEASE_MS = 5_000


def test_a_minutes_requests_come_back_one_by_one():
    """Past the minute's requests a visitor is refused until the next one is there, and refusals cost nothing."""
    visitor = Visitor()
    for number in range(60):
        assert visitor.enter("r", ALLOWED, 0, LEASE_MS) == Entry(Verdict.LET_IN, 0, 59 - number, 1000 * (number + 1))
    for _ in range(5):
        assert visitor.enter("r", ALLOWED, 400, LEASE_MS) == Entry(Verdict.TOO_MANY_A_MINUTE, 600, 0, 59_600)
    assert visitor.enter("r", ALLOWED, 1000, LEASE_MS).verdict is Verdict.LET_IN


def test_places_in_flight_are_freed_by_leaving_or_by_time():
    """A place is one request's until it leaves, or until the lease of a gateway that died runs out."""
    visitor = Visitor()
    for name in "abc":
        assert visitor.enter(name, ALLOWED, 0, LEASE_MS).verdict is Verdict.LET_IN
    assert visitor.enter("d", ALLOWED, 1, LEASE_MS).verdict is Verdict.TOO_MANY_IN_FLIGHT
    visitor.leave("b")
    visitor.leave("b")
    assert visitor.enter("d", ALLOWED, 1, LEASE_MS).verdict is Verdict.LET_IN
    assert visitor.enter("e", ALLOWED, LEASE_MS - 1, LEASE_MS).verdict is Verdict.TOO_MANY_IN_FLIGHT
    assert visitor.enter("e", ALLOWED, LEASE_MS, LEASE_MS).verdict is Verdict.LET_IN


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (20.0, "20s"), (60.0, "1m0s"), (367.2, "6m7s"), (7260.0, "2h1m0s")],
)
def test_durations_are_said_as_openai_says_them(seconds, said):
    """Milliseconds below a second, seconds below a minute, whole ones above."""
    assert duration(seconds) == said
    assert rate_headers("tokens", 5, 4, seconds)["x-ratelimit-reset-tokens"] == said
