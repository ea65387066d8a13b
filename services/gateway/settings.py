"""What a gateway reads from its environment."""

from pathlib import Path
from typing import Annotated

import msgspec

from services.gateway.limits import Allowed
from shared.limits import (
    IN_FLIGHT_BACKGROUND,
    IN_FLIGHT_FREE,
    IN_FLIGHT_PAID,
    REQUESTS_PER_MIN_BACKGROUND,
    REQUESTS_PER_MIN_FREE,
    REQUESTS_PER_MIN_PAID,
    SSE_PING_S,
)
from shared.settings import CommonSettings, Secret
from shared.tiers import Tier

Most = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    catalog: Path  # the models of this region, as JSON
    ping_s: Annotated[float, msgspec.Meta(gt=0.0, le=SSE_PING_S)] = SSE_PING_S  # longest silence on an open stream
    web_dir: Path = Path(__file__).parent / "web"  # the chat page
    redis_url: Secret = Secret("")  # Valkey, where requests are counted; without one nobody is limited
    requests_per_min_paid: Most = REQUESTS_PER_MIN_PAID
    requests_per_min_free: Most = REQUESTS_PER_MIN_FREE
    requests_per_min_background: Most = REQUESTS_PER_MIN_BACKGROUND
    in_flight_paid: Most = IN_FLIGHT_PAID
    in_flight_free: Most = IN_FLIGHT_FREE
    in_flight_background: Most = IN_FLIGHT_BACKGROUND

    @property
    def allowed(self) -> dict[Tier, Allowed]:
        """By the tier of a user's key."""
        return {
            Tier.PAID: Allowed(self.requests_per_min_paid, self.in_flight_paid),
            Tier.FREE: Allowed(self.requests_per_min_free, self.in_flight_free),
            Tier.BACKGROUND: Allowed(self.requests_per_min_background, self.in_flight_background),
        }
