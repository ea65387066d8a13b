"""Conversation while PostgreSQL is away, frozen or cut off mid-call: honest refusals, no mixed-up answers, then it goes on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.conversation.store import Store, StoreAwayError
from shared.messages import Principal
from shared.outcomes import EndReason, RefusalKind
from shared.storage import borrow
from shared.tiers import Tier
from tests.integration.servers import RunningPostgres, held
from tests.service.conversation_world import ANN, World, a_world, ref, until


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[RunningPostgres]:
    """One that this test alone kills."""
    running = RunningPostgres(tmp_path)
    for _ in held(running):
        yield running


@pytest.fixture
async def world(own_postgres: RunningPostgres) -> AsyncIterator[World]:
    async with a_world(own_postgres.url) as made:
        await made.service()
        yield made


async def test_running_replies_do_not_notice_a_killed_database(world: World, own_postgres: RunningPostgres) -> None:
    """While it is away sends are refused with a time to come again, running replies are read and stopped, and what
    ended meanwhile is archived when it is back.
    """
    running = (await world.send("one")).reply_id
    ended = (await world.send("two")).reply_id
    await world.write(running, ["so far"], reason=None)
    await own_postgres.kill()
    refused = await world.send("three")
    assert refused.refusal.kind is RefusalKind.UNAVAILABLE
    assert refused.refusal.retry_after_s
    assert (await world.ask("get", ref(running))).text == "so far"
    await world.ask("cancel", ref(running))
    assert (await world.logs.read(running)).ended.reason is EndReason.USER_STOP
    await world.write(ended, ["done"])
    await world.publish_ended(running)
    await until(lambda: _missing(world), "not ready")
    await own_postgres.start()
    assert (await world.archived(ended)).text == "done"
    assert (await world.archived(running)).text == "so far"
    await until(lambda: _told(world, ended), "its end is told")
    await until(lambda: _ready(world), "ready again")
    assert (await world.send("four")).reply_id


async def _missing(world: World) -> bool:
    return world.services[0].ready() is not None


async def _told(world: World, reply_id: str) -> bool:
    return len(world.finished(reply_id)) == 1


async def _ready(world: World) -> bool:
    return world.services[0].ready() is None


async def test_a_frozen_database_is_an_honest_refusal(world: World, own_postgres: RunningPostgres) -> None:
    """A database that accepts and never answers: sends are refused, at last without asking it, and it recovers."""
    await world.send("one")
    pids = _family(own_postgres.child.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert (await world.send("two")).refusal.kind is RefusalKind.UNAVAILABLE
        await until(lambda: _missing(world), "the watch has noticed")
        async with asyncio.timeout(2.5):  # a call to the database is waited for 3 to 8 s
            assert (await world.send("three")).refusal.kind is RefusalKind.UNAVAILABLE
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await until(lambda: _ready(world), "ready again")
    assert (await world.send("four")).reply_id


def _family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]


async def test_a_cancelled_call_never_answers_the_next_one(world: World) -> None:
    """Thousands of calls cut off mid-flight on few connections: each answer is its asker's own, never a neighbour's."""
    people = [Principal(org="acme", user=f"user{number}", tier=Tier.PAID, key_id="k") for number in range(20)]
    replies = {who.user: (await world.send(f"canary-{who.user}", who=who)).reply_id for who in people}
    store, patience_s = world.store, (0.0, 0.001, 0.003, 0.01, 0.05, 5.0)

    async def look(number: int) -> bool:
        who = people[number % len(people)]
        try:
            async with asyncio.timeout(patience_s[number % len(patience_s)]):
                items = await store.input_items(who, replies[who.user])
        except (TimeoutError, StoreAwayError):
            return False
        assert [item.text for item in items] == [f"canary-{who.user}"]
        return True

    answered = 0
    for start in range(0, 3000, 100):
        answered += sum(await asyncio.gather(*(look(number) for number in range(start, start + 100))))
    async with borrow(world.pool) as conn:
        assert await conn.fetchval("SELECT 7") == 7
    assert 0 < answered < 3000


async def test_a_store_says_away_when_the_database_is_gone(world: World, own_postgres: RunningPostgres) -> None:
    """Every call of the store raises StoreAwayError, whatever the driver raised."""
    store = Store(world.pool)
    await own_postgres.kill()
    for call in (store.watch(), store.claim_of(ANN, "k"), store.purges(now_s=0.0, most=1), store.history(ANN, "x", 10)):
        with pytest.raises(StoreAwayError):
            await call


async def test_a_busy_database_is_not_away(world: World) -> None:
    """A probe that waits behind a burst of calls, all of them answered, makes nobody else be refused."""
    store = Store(world.pool)

    async def call() -> None:
        async with store.connection(deadline_s=30.0) as conn:
            await conn.execute("SELECT pg_sleep(0.05)")

    burst = [asyncio.create_task(call()) for _ in range(400)]  # two seconds and a half through eight connections
    await asyncio.sleep(0)
    for _ in range(2):
        await store.watch()
    assert not all(task.done() for task in burst)
    assert store.away is None
    await asyncio.gather(*burst)
