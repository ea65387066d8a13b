"""Which relays live: silence is judged, our own lateness is not."""

from services.gateway.lives import ROUND_S, Lives
from shared.limits import RELAY_ALIVE_S, RELAY_MISSED_MAX

SILENT_S = RELAY_ALIVE_S * RELAY_MISSED_MAX


def rounds(lives, since, until, every=ROUND_S):
    """Look from `since` to `until`; what was found silent, in order."""
    found, now = [], since + every
    while now <= until:
        found.append((now, lives.look(now)))
        now += every
    return found


def test_a_relay_is_dead_after_the_missed_words_and_not_before():
    """Exactly after RELAY_MISSED_MAX words that did not come; one that spoke meanwhile lives."""
    lives = Lives(0.0)
    lives.heard("a", 0.0)
    lives.heard("b", 0.0)
    lives.heard("b", 1.5)
    found = rounds(lives, 0.0, SILENT_S + ROUND_S)
    assert [dead for now, dead in found if now <= SILENT_S] == [set()] * len(found[:-1])
    assert found[-1][1] == {"a"}


def test_a_late_round_makes_patient():
    """When our own loop was late, a silence that may be ours is no verdict; once on time again it is."""
    lives = Lives(0.0)
    lives.heard("a", 0.0)
    assert lives.look(SILENT_S + 0.5) == set()
    assert lives.lag_s > 1.0
    found = rounds(lives, SILENT_S + 0.5, 60.0)
    verdicts = [now for now, dead in found if dead]
    assert verdicts
    assert SILENT_S + 1.0 < verdicts[0] < 20.0
    assert lives.lag_s < 0.1


def test_after_we_were_away_everybody_has_a_fresh_start():
    """A silence in which we could not hear counts for nobody."""
    lives = Lives(0.0)
    lives.heard("a", 0.0)
    rounds(lives, 0.0, 10.0)
    lives.away(10.0)
    assert [dead for _, dead in rounds(lives, 10.0, 10.0 + SILENT_S)] == [set()] * 8


def test_a_relay_that_is_long_gone_is_forgotten():
    """Names of relays are new at each of their starts, so old ones must not pile up."""
    lives = Lives(0.0)
    lives.heard("a", 0.0)
    rounds(lives, 0.0, 70.0)
    assert lives.relays == []
