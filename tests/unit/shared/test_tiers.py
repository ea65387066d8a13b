"""Which lane a request goes to."""

import pytest

from shared.tiers import Tier, lane_for


@pytest.mark.parametrize(
    ("key", "asked", "lane"),
    [
        (Tier.PAID, None, Tier.PAID),
        (Tier.FREE, "auto", Tier.FREE),
        (Tier.FREE, "priority", Tier.FREE),
        (Tier.PAID, "flex", Tier.BACKGROUND),
        (Tier.PAID, "a name of tomorrow", Tier.PAID),
    ],
)
def test_a_lane_is_what_was_asked_for_below_the_key(key: Tier, asked: str | None, lane: Tier) -> None:
    """Nobody gets ahead of the own key by asking; a name we do not know asks for nothing."""
    assert lane_for(key, asked) is lane
