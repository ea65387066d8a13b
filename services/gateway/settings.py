"""What a gateway reads from its environment."""

from pathlib import Path
from typing import Annotated

import msgspec

from shared.limits import SSE_PING_S
from shared.settings import CommonSettings


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    catalog: Path  # the models of this region, as JSON
    ping_s: Annotated[float, msgspec.Meta(gt=0.0, le=SSE_PING_S)] = SSE_PING_S  # longest silence on an open stream
    web_dir: Path = Path(__file__).parent / "web"  # the chat page
