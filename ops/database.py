"""A connection of the operator's commands to PostgreSQL: one that starts again is waited for, not taken for absent."""

import asyncio
import sys
import time

import asyncpg

from shared.errors import ConfigError
from shared.storage import UNAVAILABLE_ERRORS

CONNECT_S = 10.0
_AGAIN_S = 0.2


async def connected(url: str) -> asyncpg.Connection:
    """A connection, within CONNECT_S; the wait is said once, on stderr. Raises ConfigError, with the server's word.

    A wrong password or address is said at once; refused, starting or stopping is asked again: a server that died is
    started again within seconds, and an operator's command should not fail in between.
    """
    give_up_s = time.monotonic() + CONNECT_S
    told = False
    while True:
        try:
            return await asyncpg.connect(url, timeout=max(give_up_s - time.monotonic(), _AGAIN_S))
        except ValueError as error:  # the driver's own family of errors holds it, too: first
            raise ConfigError(f"the PostgreSQL address cannot be read ({error}): check it") from error
        except UNAVAILABLE_ERRORS as error:
            why = str(error) or type(error).__name__
            if time.monotonic() + _AGAIN_S >= give_up_s:
                raise ConfigError(f"PostgreSQL does not answer ({why}): is `chorus up` running?") from error
            if not told:
                print(f"chorus: waiting for PostgreSQL, {CONNECT_S:g} s at most ({why})", file=sys.stderr)
                told = True
            await asyncio.sleep(_AGAIN_S)
        except asyncpg.PostgresError as error:
            raise ConfigError(f"PostgreSQL cannot be used ({error}): check its user and database") from error
