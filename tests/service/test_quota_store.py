"""The quota script in a real Valkey: equal to the pure code, atomic, and honest when Valkey is not there."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.conversation.quota_store import BucketName, QuotaStore, Settlement
from shared import valkey as valkey_calls
from shared.errors import ValkeyAwayError
from shared.quota import Bucket, Limit
from shared.tiers import Tier
from shared.valkey import Valkey

BUCKET = BucketName("acme", "ann", "stub", Tier.PAID)
LEASE_S = 5.0
ID = st.sampled_from(["a", "b", "c", "d"])
LIMIT = st.builds(Limit, st.integers(1, 300), st.integers(1, 700))
STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "reserve", "settle"]), ID, st.integers(-5, 400), LIMIT, st.integers(-500, 9_000)),
    max_size=30,
)  # fmt: skip


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_script_is_the_pure_code(valkey_url: str, loop: asyncio.Runner, steps: list) -> None:
    """The same operations in the same order give the same answers, the same totals and the same level, to the unit."""

    async def body() -> None:
        valkey, pure, now_ms = Valkey(valkey_url, call_s=10.0), Bucket(), 1_700_000_000_000
        store = QuotaStore(valkey, "local", lease_s=LEASE_S)
        try:
            await valkey.call("FLUSHALL")
            for verb, key, amount, limit, passed_ms in steps:
                now_ms += passed_ms
                if verb == "reserve":
                    wanted = pure.reserve(key, abs(amount), limit, now_ms, round(LEASE_S * 1000))
                    assert await store.reserve(BUCKET, limit, key, amount=abs(amount), now_s=now_ms / 1000) == wanted
                else:
                    known = pure.settle(key, amount, limit, now_ms)
                    assert await store.settle([Settlement(BUCKET, limit, key, amount)], now_ms / 1000) == [known]
                assert await store.totals(BUCKET) == pure.totals
                level = await valkey.call("HGET", "local:quota:{acme:ann:stub:paid}", "level")
                assert (None if level is None else int(level)) == pure.level
            leased = sum(lease.amount for lease in pure.leases.values())
            assert pure.totals.reserved == pure.totals.settled + pure.totals.refunded + leased
        finally:
            await valkey.close()

    loop.run(body())


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[Valkey]:
    made = Valkey(valkey_url, call_s=10.0)
    yield made
    await made.close()


async def test_of_fifty_at_once_one_fits(valkey: Valkey) -> None:
    """Fifty parallel reservations against tokens for one, over two clients: exactly one is admitted."""
    stores = [QuotaStore(valkey, "local"), QuotaStore(valkey, "local")]
    limit = Limit(100, 1)
    grants = await asyncio.gather(
        *(
            stores[number % 2].reserve(BUCKET, limit, f"r{number}", amount=60, now_s=1_700_000_000.0)
            for number in range(50)
        )
    )
    assert [grant.wait_ms for grant in grants].count(0) == 1
    assert {grant.remaining for grant in grants} == {40}


async def test_names_cannot_meet(valkey: Valkey) -> None:
    """Users whose names hold separators and braces have buckets of their own."""
    store, limit = QuotaStore(valkey, "local"), Limit(10, 1)
    names = [("a", "b:c"), ("a:b", "c"), ("a}", "{b"), ("a", "b}:{c"), ("ä", "b")]
    for org, user in names:
        grant = await store.reserve(BucketName(org, user, "m", Tier.FREE), limit, "r", amount=10, now_s=1_700_000_000.0)
        assert grant.wait_ms == 0


async def test_a_server_that_forgot_everything_goes_on(valkey: Valkey) -> None:
    """After a flush of data and scripts a reservation works, and a settlement of before is unknown, not an error."""
    store, limit = QuotaStore(valkey, "local"), Limit(100, 1)
    assert (await store.reserve(BUCKET, limit, "a", amount=60, now_s=1_700_000_000.0)).wait_ms == 0
    await valkey.call("FLUSHALL")
    await valkey.call("SCRIPT", "FLUSH")
    assert await store.settle([Settlement(BUCKET, limit, "a", 5)], 1_700_000_000.0) == [False]
    assert (await store.reserve(BUCKET, limit, "b", amount=60, now_s=1_700_000_000.0)).wait_ms == 0


async def test_one_that_is_not_there_is_away() -> None:
    """Nobody at the address: each call says so at once, and it is told once."""
    told: list[bool] = []
    away = Valkey("redis://127.0.0.1:1/0", changed=lambda gone, why: told.append(gone))
    store = QuotaStore(away, "local")
    for _ in range(5):
        with pytest.raises(ValkeyAwayError):
            await store.reserve(BUCKET, Limit(1, 1), "a", amount=1, now_s=1_700_000_000.0)
    assert told == [True]


async def test_one_that_is_frozen_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and says nothing. Who finds that out waits; whoever asks later waits a fraction of it."""
    monkeypatch.setattr(valkey_calls, "VALKEY_PROBE_S", 0.02)
    monkeypatch.setattr(valkey_calls, "VALKEY_AWAY_S", 0.0)
    gone: list[asyncio.StreamWriter] = []

    async def frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.append(writer)

    server = await asyncio.start_server(frozen, "127.0.0.1", 0)
    client = Valkey(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", call_s=1.0)
    for _ in range(2):
        with pytest.raises(ValkeyAwayError):
            await client.call("PING")
    assert client.away
    async with asyncio.timeout(0.9):
        for _ in range(3):
            with pytest.raises(ValkeyAwayError):
                await client.call("PING")
    await client.close()
    async with asyncio.timeout(5.0):
        while len(gone) < 5:
            await asyncio.sleep(0.01)
    server.close()
    await asyncio.gather(*(writer.wait_closed() for writer in gone), return_exceptions=True)
