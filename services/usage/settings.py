"""What the usage service reads from its environment."""

from typing import Annotated

import msgspec

from shared.limits import USAGE_BATCH_MAX
from shared.settings import CommonSettings, Secret


class UsageSettings(CommonSettings, frozen=True, kw_only=True):
    postgres_url: Secret
    batch_max: Annotated[int, msgspec.Meta(ge=1, le=USAGE_BATCH_MAX)] = USAGE_BATCH_MAX
