"""Tiers (a user's plan) and lanes (the queue of a tier), in the order they are served."""

from enum import StrEnum


class Tier(StrEnum):
    PAID = "paid"
    FREE = "free"
    BACKGROUND = "background"


# Served first to last. A key's tier is a ceiling: a request may ask for a later lane, never an earlier one.
LANE_ORDER: tuple[Tier, ...] = (Tier.PAID, Tier.FREE, Tier.BACKGROUND)
_RANK = {tier: rank for rank, tier in enumerate(LANE_ORDER)}

# OpenAI's `service_tier` values -> the lane asked for. `auto` and `default` mean the key's own.
_SERVICE_TIERS: dict[str, Tier | None] = {
    "auto": None,
    "default": None,
    "priority": Tier.PAID,
    "flex": Tier.BACKGROUND,
}
SERVICE_TIERS = tuple(_SERVICE_TIERS)


def rank(tier: Tier) -> int:
    """0 is served first."""
    return _RANK[tier]


def lane_for(key_tier: Tier, service_tier: str | None) -> Tier:
    """The lane of a request: what was asked for, but never ahead of the key's own tier. Unknown names ask nothing."""
    asked = _SERVICE_TIERS.get(service_tier or "auto")
    return key_tier if asked is None or rank(asked) < rank(key_tier) else asked
