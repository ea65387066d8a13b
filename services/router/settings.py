"""What a router reads from its environment."""

from pathlib import Path
from typing import Annotated

import msgspec

from shared.limits import IDLE_END_S, ROUTER_HELD_MAX
from shared.settings import CommonSettings


class RouterSettings(CommonSettings, frozen=True, kw_only=True):
    catalog: Path  # the models whose lanes it serves
    held_max: Annotated[int, msgspec.Meta(ge=1)] = ROUTER_HELD_MAX
    idle_end_s: Annotated[float, msgspec.Meta(gt=0)] = IDLE_END_S
