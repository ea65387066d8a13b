"""Router and replica on a real NATS server, each under its own user: what the in-memory twin cannot vouch for."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ops.permissions import inbox_prefix
from shared.bus import Bus
from shared.bus.nats import connect
from shared.outcomes import EndReason
from shared.tiers import Tier
from tests.integration.servers import RunningNats
from tests.service.serving_plane import NAMES, PATIENCE_S, Plane, eventually, plane


class NatsPlane(Plane):
    def __init__(self, nats: RunningNats) -> None:
        super().__init__()
        self.nats = nats

    async def connect(self, user: str) -> Bus:
        name, password = self.nats.user(user)
        return await connect(
            self.nats.url, user=name, password=password, name=f"test-{user}", inbox_prefix=inbox_prefix(user)
        )

    async def emptied(self) -> None:
        """Until no lane holds a message: all were acked."""
        async with asyncio.timeout(PATIENCE_S):
            for tier in Tier:
                stream, subject = NAMES.lane_stream(tier), NAMES.lane_filter(tier)
                while await self.bus.read(stream, subject, from_seq=1, most=1):
                    await asyncio.sleep(0.02)


@pytest.fixture
async def region(fresh_nats: RunningNats) -> AsyncIterator[NatsPlane]:
    made = NatsPlane(fresh_nats)
    async with plane(made):
        yield made


async def test_replies_of_all_tiers(region: NatsPlane):
    """Each reply is whole, opened once, archived and billed; every lane is empty afterwards."""
    for name in ("replica-1", "replica-2"):
        await region.replica(name)
    await region.router()
    replies = [await region.send(budget=16, tier=list(Tier)[n % 3], user=f"u{n}") for n in range(18)]
    for reply in replies:
        ended = await region.ended(reply)
        assert (ended.reason, ended.attempts) == (EndReason.MAX_TOKENS, 1)
        assert (await region.log(reply)).ids == region.expected_ids(reply)
        assert ended.first_token_s is not None
    await region.emptied()
    for one in region.running.values():
        if one.engine is not None:
            await eventually(lambda one=one: one.engine.stats.blocks_free == one.engine.stats.blocks_total, "blocks")


async def test_a_router_dies_and_the_next_one_archives(region: NatsPlane):
    """The replica's extensions keep the delivery; when they stop it comes to the next router, which finds the end."""
    replica = await region.replica()
    first = await region.router("router-1")
    replica.engine.allow(5)
    reply = await region.send(budget=40)
    await region.written(reply, 2)
    await first.kill()
    await region.router("router-2")
    replica.engine.allow(float("inf"))
    ended = await region.ended(reply)
    assert (ended.reason, ended.attempts) == (EndReason.MAX_TOKENS, 1)
    assert len(replica.engine.submitted) == 1


async def test_a_lapsed_lease_is_adopted(region: NatsPlane):
    """Without extensions the server redelivers; the router asks, and what runs goes on undisturbed."""
    replica = await region.replica()
    await region.router()
    replica.engine.allow(5)

    async def lost(_: str) -> None:
        pass

    replica.bus.extend = lost
    reply = await region.send(budget=40)
    await region.written(reply, 2)
    router = region.running["router-1"].service
    await eventually(lambda: router._table.get(reply)._delivered >= 2, "a redelivery")
    replica.engine.allow(float("inf"))
    ended = await region.ended(reply)
    assert ended.attempts == 1
    assert len(replica.engine.submitted) == 1
    assert await region.journal("router", "adopted")


async def test_a_replica_dies(region: NatsPlane):
    """Another one writes on from the next token."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.allow(12)
    reply = await region.send(budget=40)
    await region.written(reply, 5)
    await region.replica("replica-2")
    await first.kill()
    ended = await region.ended(reply)
    assert ended.attempts == 2
    assert (await region.log(reply)).ids == region.expected_ids(reply)


async def test_the_server_dies_and_comes_back(region: NatsPlane):
    """Logs and lanes are on disk: what ran goes on, what waited is served, each once."""
    replica = await region.replica()
    await region.router()
    replica.engine.allow(5)
    running = await region.send(budget=40)
    await region.written(running, 2)
    await region.nats.kill()
    replica.engine.allow(float("inf"))
    await region.nats.start()
    await eventually(lambda: region.bus.connected, "the bus")
    later = await region.send(budget=8)
    for reply in (running, later):
        assert (await region.ended(reply)).reason is EndReason.MAX_TOKENS
        assert (await region.log(reply)).ids == region.expected_ids(reply)
