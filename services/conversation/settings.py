"""What a conversation service reads from its environment."""

from pathlib import Path
from typing import Annotated

import msgspec

from shared.limits import STORE_POOL_MAX
from shared.settings import CommonSettings, Secret


class ConversationSettings(CommonSettings, frozen=True, kw_only=True):
    """`safety_fail_open`: whether a message passes unchecked, journalled and counted, while no safety service answers.

    `isolate_tenants`: whether each org has block hashes of its own, so that nobody can time another's prefixes.
    """

    catalog: Path
    postgres_url: Secret
    postgres_pool: Annotated[int, msgspec.Meta(ge=2, le=64)] = STORE_POOL_MAX
    safety_fail_open: bool = True
    isolate_tenants: bool = False
