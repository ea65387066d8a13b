"""Calls that are cut off in flight: nobody is ever handed another's answer (as happened elsewhere in March 2023).

In full: CHORUS_CUT_CALLS=8000 CHORUS_CUT_DELAY_S=0.1 pytest -s tests/service/test_cancelled_calls.py
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest

from shared.errors import ValkeyAwayError
from shared.storage import UNAVAILABLE_ERRORS, borrow, open_pool
from shared.valkey import Script, Valkey
from tests.service.delay_proxy import delayed

pytestmark = pytest.mark.timeout(600)
DELAY_S = float(os.environ.get("CHORUS_CUT_DELAY_S", "0.01"))
CALLS = int(os.environ.get("CHORUS_CUT_CALLS", "400"))
_READ = Script("return redis.call('GET', KEYS[1])")


async def cut_off(read: Callable[[int], Awaitable[object]], calls: int = CALLS) -> Counter[str]:
    """`read(n)` answers with n's canary; every other call is cancelled after a while that may be too short."""
    chance = random.Random(20230320)
    told: Counter[str] = Counter()
    room = asyncio.Semaphore(24)

    async def one(number: int) -> None:
        async with room:
            try:
                async with asyncio.timeout(chance.choice([5.0, chance.uniform(0.0, 5 * DELAY_S)])):
                    canary = await read(number)
            except TimeoutError:
                told["cut off"] += 1
            except (ValkeyAwayError, *UNAVAILABLE_ERRORS) as error:
                told[type(error).__name__] += 1
            else:
                told["own" if canary == f"canary-{number}" else "foreign"] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(calls):
            group.create_task(one(number))
    print(dict(told))  # noqa: T201 - for whoever runs it in full
    return told


async def test_a_cancelled_valkey_call_leaves_nothing_to_the_next(valkey_url: str) -> None:
    """Commands, scripts and pipelines cut off at random moments: every answer that comes is the caller's own."""
    place = urlsplit(valkey_url)
    direct = Valkey(valkey_url, call_s=10.0)
    await direct.many([("SET", f"canary-{number}", f"canary-{number}") for number in range(CALLS)])
    await direct.close()
    async with delayed(place.hostname or "", place.port or 0, DELAY_S) as port:
        valkey = Valkey(f"redis://:{place.password}@127.0.0.1:{port}/0", call_s=10.0)

        async def read(number: int) -> object:
            key = f"canary-{number}"
            if number % 3 == 0:
                found = await valkey.call("GET", key)
            elif number % 3 == 1:
                found = (await valkey.run(_READ, [([key], [])]))[0]
            else:
                found = (await valkey.many([("PING",), ("GET", key), ("PING",)]))[1]
            return found.decode()

        told = await cut_off(read)
        assert told["foreign"] == 0
        assert told["cut off"] > CALLS / 10
        assert told["own"] > CALLS / 10
        assert set(told) <= {"own", "cut off"}
        assert (await valkey.call("GET", "canary-7")).decode() == "canary-7"
        await valkey.close()


async def test_a_cancelled_query_leaves_nothing_to_the_next(postgres_url: str) -> None:
    """The same for PostgreSQL: a connection whose query was cut off is not handed on."""
    place = urlsplit(postgres_url)
    async with delayed(place.hostname or "", place.port or 0, DELAY_S) as port, AsyncExitStack() as stack:
        url = place._replace(netloc=f"{place.username}:{place.password}@127.0.0.1:{port}").geturl()
        pool = await open_pool(url, name="cut", stack=stack)

        async def read(number: int) -> object:
            async with borrow(pool) as conn:
                return await conn.fetchval("SELECT 'canary-' || $1::int", number)

        told = await cut_off(read, CALLS // 2)
        assert told["foreign"] == 0
        assert told["cut off"] > 20
        async with borrow(pool) as conn:
            assert await conn.fetchval("SELECT 'canary-' || $1::int", 7) == "canary-7"
