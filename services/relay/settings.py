"""What a relay reads from its environment."""

from typing import Annotated

import msgspec

from shared.limits import RELAY_STREAMS_MAX
from shared.settings import CommonSettings


class RelaySettings(CommonSettings, frozen=True, kw_only=True):
    streams_max: Annotated[int, msgspec.Meta(ge=1)] = RELAY_STREAMS_MAX
