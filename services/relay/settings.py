"""What a relay reads from its environment."""

from typing import Annotated

import msgspec

from shared.limits import PRESENCE_S, RELAY_STREAMS_MAX, SLOW_READER_S
from shared.settings import CommonSettings


class RelaySettings(CommonSettings, frozen=True, kw_only=True):
    streams_max: Annotated[int, msgspec.Meta(ge=1)] = RELAY_STREAMS_MAX
    presence_s: Annotated[float, msgspec.Meta(gt=0)] = PRESENCE_S
    slow_reader_s: Annotated[float, msgspec.Meta(gt=0)] = SLOW_READER_S
