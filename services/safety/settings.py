"""What a safety service reads from its environment."""

from pathlib import Path
from typing import Annotated

import msgspec

from shared.limits import SAFETY_WATCHES_MAX
from shared.settings import CommonSettings


class SafetySettings(CommonSettings, frozen=True, kw_only=True):
    """`safety_rules` is a JSON list of rules that takes the place of the built-in ones."""

    safety_rules: Path | None = None
    watches_max: Annotated[int, msgspec.Meta(ge=1)] = SAFETY_WATCHES_MAX
