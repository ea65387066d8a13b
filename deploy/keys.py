"""`python -m deploy.keys`: the first API keys, one per tier; made once, shown at each start."""

import asyncio
import sys

from deploy.start import RUN, variables
from ops.local_keys import local_keys
from shared.errors import ConfigError


def main() -> None:
    laid_out = variables((RUN / "ops.env").read_text())
    keys = asyncio.run(local_keys(laid_out["CHORUS_POSTGRES_URL"], RUN / "keys" / "keys.json"))
    for tier, key in keys.items():
        sys.stdout.write(f"{tier + ' key':<16}{key}\n")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"keys: {error}")
