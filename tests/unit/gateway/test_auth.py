"""API keys: what is remembered, for how long, and what is forgotten at once."""

import asyncio
import hashlib

import pytest

from services.gateway.auth import KeyCache, Keys
from services.gateway.http import ProblemError
from shared.errors import BusTimeoutError, RefusedError
from shared.limits import KEY_FRESH_S, KEY_STALE_S_MAX, KEY_UNKNOWN_S
from shared.messages import Principal
from shared.outcomes import Refusal, RefusalKind
from shared.tiers import Tier

ALICE = Principal(org="acme", user="alice", tier=Tier.PAID, key_id="k1")
HEADERS = {"Authorization": "Bearer sk-alice"}
DIGEST = hashlib.sha256(b"sk-alice").digest()


class Desk:
    """Answers lookups, or does not; counts them; may be held up."""

    def __init__(self):
        self.known = {DIGEST: ALICE}
        self.up = True
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.now = 1000.0
        self.keys = Keys(self, lambda: self.now)

    async def key(self, digest, *, patient):
        self.asked += 1
        self.patient = patient
        known = self.known.get(digest)
        await self.gate.wait()
        if not self.up:
            raise BusTimeoutError("nobody")
        if known is None:
            raise RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message="no such key"))
        return known

    async def status(self, headers=HEADERS):
        try:
            await self.keys.principal(headers)
        except ProblemError as error:
            return error.problem.status
        except RefusedError as error:
            return error.refusal.status
        return 200


async def test_a_fresh_key_is_not_asked_about_and_an_older_one_is():
    """One lookup serves KEY_FRESH_S; then the next request asks again."""
    desk = Desk()
    assert await desk.keys.principal(HEADERS) == ALICE
    desk.now += KEY_FRESH_S - 0.1
    assert await desk.status() == 200
    assert desk.asked == 1
    desk.now += 0.2
    assert await desk.status() == 200
    assert desk.asked == 2


async def test_a_known_key_outlives_the_database_for_a_while_and_an_unknown_one_is_no_401():
    """While nobody can be asked a known key stays valid until KEY_STALE_S_MAX, asked about seldom; others get 503."""
    desk = Desk()
    await desk.status()
    desk.up = False
    desk.now += KEY_FRESH_S + 1
    assert [await desk.status() for _ in range(10)] == [200] * 10
    assert desk.asked == 2
    assert await desk.status({"Authorization": "Bearer other"}) == 503
    desk.now += KEY_STALE_S_MAX
    assert await desk.status() == 503
    desk.up = True
    assert await desk.status() == 200


async def test_an_unknown_key_is_remembered_for_seconds_only():
    """A client in a loop with a wrong key costs one lookup per KEY_UNKNOWN_S; a key made a moment later works."""
    desk = Desk()
    del desk.known[DIGEST]
    assert [await desk.status() for _ in range(5)] == [401] * 5
    assert desk.asked == 1
    desk.known[DIGEST] = ALICE
    desk.now += KEY_UNKNOWN_S
    assert await desk.status() == 200


async def test_no_key_is_a_401_without_a_question():
    """What cannot be a key is not looked up."""
    desk = Desk()
    assert [await desk.status(h) for h in ({}, {"Authorization": "Basic x"})] == [401, 401]
    assert desk.asked == 0


async def test_a_revoked_key_is_forgotten_at_once():
    """After the word on the bus the next request asks, and is told no."""
    desk = Desk()
    await desk.status()
    del desk.known[DIGEST]
    desk.keys.revoked("k1")
    assert await desk.status() == 401


async def test_a_yes_under_way_when_the_key_is_revoked_does_not_count():
    """A lookup answered from before the revocation must not let the key live another minute."""
    desk = Desk()
    desk.gate.clear()
    asking = asyncio.create_task(desk.status())
    while not desk.asked:
        await asyncio.sleep(0)
    desk.keys.revoked("k1")
    desk.gate.set()
    assert await asking == 401
    assert await desk.status() == 401


async def test_a_crowd_with_one_key_asks_once():
    """Requests that arrive together before the key is known share one lookup."""
    desk = Desk()
    desk.gate.clear()
    crowd = [asyncio.create_task(desk.status()) for _ in range(50)]
    while not desk.asked:
        await asyncio.sleep(0)
    desk.gate.set()
    assert await asyncio.gather(*crowd) == [200] * 50
    assert desk.asked == 1


async def test_while_one_asks_about_an_ageing_key_the_others_do_not_wait():
    """Revalidation is one impatient question; requests beside it go on with what was true a minute ago."""
    desk = Desk()
    await desk.status()
    assert desk.patient
    desk.now += KEY_FRESH_S + 1
    desk.gate.clear()
    first = asyncio.create_task(desk.status())
    while desk.asked < 2:
        await asyncio.sleep(0)
    assert not desk.patient
    assert [await desk.status() for _ in range(5)] == [200] * 5
    assert desk.asked == 2
    desk.gate.set()
    assert await first == 200


def test_the_cache_is_bounded_and_forgets_the_least_recently_used():
    """Past its bound the key that nobody used longest goes, together with its place in the revocation index."""
    cache = KeyCache(most=2)
    for n in range(3):
        who = Principal(org="o", user=f"u{n}", tier=Tier.FREE, key_id=f"k{n}")
        cache.found(bytes([n]), who, 0.0)
        cache.get(bytes([0]), 0.0)
    assert [cache.get(bytes([n]), 0.0) is not None for n in range(3)] == [True, False, True]
    cache.revoke("k1")
    cache.revoke("k2")
    assert cache.get(bytes([2]), 0.0) is None


@pytest.mark.parametrize("age_s", [0.0, KEY_UNKNOWN_S - 0.01])
def test_an_unknown_key_never_becomes_valid_by_age(age_s):
    """A remembered no is a no for as long as it is remembered."""
    cache = KeyCache()
    cache.absent(b"x", 0.0)
    known = cache.get(b"x", age_s)
    assert known is not None
    assert known.principal is None
