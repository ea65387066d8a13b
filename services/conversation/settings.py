"""What a conversation service reads from its environment."""

from pathlib import Path
from typing import Annotated

import msgspec

from shared.limits import (
    STORE_POOL_MAX,
    TOKENS_PER_MIN_BACKGROUND,
    TOKENS_PER_MIN_FREE,
    TOKENS_PER_MIN_PAID,
)
from shared.settings import CommonSettings, Secret
from shared.tiers import Tier

PerMinute = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class ConversationSettings(CommonSettings, frozen=True, kw_only=True):
    """`safety_fail_open`: whether a message passes unchecked, journalled and counted, while no safety service answers.

    `isolate_tenants`: whether each org has block hashes of its own, so that nobody can time another's prefixes.
    `redis_url`: Valkey, where users' tokens are counted; without one nobody is metered.
    """

    catalog: Path
    postgres_url: Secret
    postgres_pool: Annotated[int, msgspec.Meta(ge=2, le=64)] = STORE_POOL_MAX
    safety_fail_open: bool = True
    isolate_tenants: bool = False
    redis_url: Secret = Secret("")
    tokens_per_min_paid: PerMinute = TOKENS_PER_MIN_PAID
    tokens_per_min_free: PerMinute = TOKENS_PER_MIN_FREE
    tokens_per_min_background: PerMinute = TOKENS_PER_MIN_BACKGROUND

    @property
    def tokens_per_min(self) -> dict[Tier, int]:
        """By lane."""
        return {
            Tier.PAID: self.tokens_per_min_paid,
            Tier.FREE: self.tokens_per_min_free,
            Tier.BACKGROUND: self.tokens_per_min_background,
        }
