"""A lane message becomes a log with one end and one archived reply, whatever happens to routers and replicas meanwhile."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.limits import ATTEMPTS_MAX
from shared.messages import QueueView, decoder
from shared.outcomes import EndReason
from shared.tiers import Tier
from tests.service.serving_plane import NAMES, PlaceEngine, Plane, eventually, plane


@pytest.fixture
async def region() -> AsyncIterator[Plane]:
    async with plane() as made:
        yield made


async def waits(region: Plane, count: int, router: str = "router-1") -> None:
    """Until so many requests wait for a replica in a router's hands."""
    await eventually(lambda: len(region.running[router].service._room) == count, f"{count} waiting")


# --- the way of a message ------------------------------------------------------------------------------------


async def test_a_lane_message_becomes_an_ended_reply(region: Plane):
    """Queued, placed, opened, dispatched, written, ended, archived, acked; usage and blocks add up."""
    await region.replica()
    await region.router()
    reply = await region.send(tokens=40, budget=24)
    ended = await region.ended(reply)
    view = await region.log(reply)
    assert view.ids == region.expected_ids(reply)
    assert ended.reason is EndReason.MAX_TOKENS
    assert ended.checked
    assert ended.attempts == 1
    assert ended.first_token_s is not None
    assert ended.usage.output_tokens == 24
    await region.calm()
    await eventually(lambda: len(region.server.stream("local_USAGE").entries) == 1, "one usage record")
    (usage,) = await region.usage(reply)
    assert (usage.input_tokens, usage.output_tokens, usage.replica) == (40, 24, "replica-1")


async def test_many_messages_over_two_replicas(region: Plane):
    """Each of forty replies of all tiers is whole, was opened once, and leaves nothing behind."""
    for name in ("replica-1", "replica-2"):
        await region.replica(name)
    await region.router()
    replies = [
        await region.send(tokens=20 + n, budget=8 + n % 9, tier=list(Tier)[n % 3], user=f"u{n % 7}") for n in range(40)
    ]
    for reply in replies:
        ended = await region.ended(reply)
        assert ended.attempts == 1
        assert (await region.log(reply)).ids == region.expected_ids(reply)
    await region.calm()
    used = {replica for reply in replies for replica in {(await region.log(reply)).opened.replica}}
    assert used == {"replica-1", "replica-2"}


async def test_the_next_turn_goes_where_its_prefix_is(region: Plane):
    """A prompt whose blocks a replica holds is placed there, and the prompt tokens it saved are told in its log."""
    for name in ("replica-1", "replica-2"):
        await region.replica(name)
    router = (await region.router()).service
    first = await region.send(tokens=64, budget=4)
    await region.ended(first)
    replica = (await region.log(first)).opened.replica
    await eventually(lambda: len(router._fleet.get(replica).prefix) >= 4, "prefix blocks told")
    again = await region.send(tokens=64, budget=4, like=first)
    ended = await region.ended(again)
    assert (await region.log(again)).opened.replica == replica
    assert ended.usage.cached_tokens == 48, "the last block is computed again"


async def test_waiting_requests_hear_where_they_stand(region: Plane):
    """While requests wait, each router says once a second who stands where."""
    await region.router()
    heard = await region.bus.subscribe(NAMES.queue(Tier.FREE, "stub"))
    replies = [await region.send(user=f"u{n}") for n in range(3)]
    await waits(region, 3)
    message = await heard.next(5.0)
    assert message is not None
    view = decoder(QueueView).decode(message.data)
    assert (view.waiting, set(view.reply_ids)) == (3, set(replies))


# --- endings ----------------------------------------------------------------------------------------------------


async def test_stop_while_queued(region: Plane):
    """A queued reply that is stopped is archived and acked without ever being opened."""
    await region.router()
    reply = await region.send()
    await waits(region, 1)
    await region.cancel(reply)
    ended = await region.ended(reply)
    assert (ended.reason, ended.attempts, ended.text) == (EndReason.USER_STOP, 0, "")
    await region.calm()


async def test_stop_while_running(region: Plane):
    """The engine drops it at its next step, late tokens are dropped, and the partial reply is archived."""
    engine = (await region.replica()).engine
    await region.router()
    engine.allow(10)
    reply = await region.send(budget=400)
    before = await region.written(reply, 1)
    await region.cancel(reply)
    ended = await region.ended(reply)
    assert ended.reason is EndReason.USER_STOP
    assert ended.usage.output_tokens >= len(before.ids)
    await region.calm()


async def test_a_stop_is_seen_though_the_control_message_is_lost(region: Plane):
    """`end` is the cancel: the replica's next append is refused, and it drops the sequence."""
    await region.replica()
    await region.router()
    region.server.lose = lambda message: ".control.cancel." in message.subject
    reply = await region.send(budget=4000)
    await region.written(reply, 1)
    await region.cancel(reply)
    assert (await region.ended(reply)).reason is EndReason.USER_STOP
    await region.calm()


async def test_nobody_listens(region: Plane):
    """A reply without a client ends as idle; one with a client, or in the background, goes on."""
    engine = (await region.replica(idle_end_s=0.6)).engine
    await region.router()
    engine.allow(6)
    left, watched, background = await region.send(), await region.send(), await region.send(background=True)
    for reply in (left, watched, background):
        await region.written(reply, 1)

    async def watch() -> None:
        while True:
            await region.present(watched)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    assert (await region.ended(left)).reason is EndReason.IDLE
    engine.allow(float("inf"))
    assert (await region.ended(watched)).reason is EndReason.MAX_TOKENS
    assert (await region.ended(background)).reason is EndReason.MAX_TOKENS
    watching.cancel()
    await region.calm()


@pytest.mark.parametrize("running", [False, True])
async def test_a_deadline_passes(region: Plane, running: bool):
    """A reply past its deadline ends as expired, whether it waits or runs."""
    await region.router()
    if running:
        (await region.replica()).engine.allow(3)
    reply = await region.send(deadline_s=0.8)
    ended = await region.ended(reply)
    assert ended.reason is EndReason.EXPIRED
    assert ended.detail
    assert ended.attempts == int(running)
    await region.calm()


async def test_too_large_for_any_replica(region: Plane):
    """A request that no replica could ever run ends at once with a sentence that says so."""
    await region.replica(engine=PlaceEngine(blocks=8))
    await region.router()
    ended = await region.ended(await region.send(tokens=100, budget=100))
    assert ended.reason is EndReason.FAILED
    assert "200 tokens" in ended.detail
    await region.calm()


async def test_the_last_window_is_flagged(region: Plane):
    """A natural end waits for the verdict on its last window; flagged, the reply ends as safety."""
    region.flagged = True
    await region.replica()
    await region.router()
    ended = await region.ended(await region.send())
    assert ended.reason is EndReason.SAFETY
    assert ended.usage.output_tokens == 24
    await region.calm()


async def test_no_verdict_in_time(region: Plane):
    """Without an answer from safety the reply ends all the same, and is marked unchecked."""
    region.server.lose = lambda message: message.subject == NAMES.safety_check
    await region.replica()
    await region.router()
    ended = await region.ended(await region.send())
    assert ended.reason is EndReason.MAX_TOKENS
    assert not ended.checked


# --- replicas come and go -------------------------------------------------------------------------------------


async def test_a_replica_dies_with_a_reply_in_flight(region: Plane):
    """Another replica writes on from the next token: nothing is lost, repeated or changed."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.allow(12)
    reply = await region.send(budget=40)
    before = await region.written(reply, 5)
    await region.replica("replica-2")
    await first.kill()
    ended = await region.ended(reply)
    view = await region.log(reply)
    assert view.ids == region.expected_ids(reply)
    assert (view.attempts, view.opened.replica) == (2, "replica-2")
    assert view.opened.first_index >= len(before.ids)
    assert ended.reason is EndReason.MAX_TOKENS
    del region.running["replica-1"]
    await region.calm()
    assert await region.journal("router", "suspected")
    assert len(await region.journal("router", "resubmitted")) == 1


async def test_a_replica_that_only_seems_dead_writes_on(region: Plane):
    """Lost heartbeats alone move nothing: the log grows, so the attempt stands."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.step_s = 0.02
    reply = await region.send(budget=60)
    await region.written(reply, 2)
    await region.replica("replica-2")
    region.server.lose = lambda message: message.subject == NAMES.health("replica-1")
    ended = await region.ended(reply)
    assert ended.attempts == 1
    assert (await region.log(reply)).ids == region.expected_ids(reply)


async def test_a_zombie_cannot_write(region: Plane):
    """A replica cut off and given up, whose engine goes on, is refused by the log and drops the sequence."""
    zombie = await region.replica("replica-1")
    await region.router()
    zombie.engine.allow(8)
    reply = await region.send(budget=60)
    await region.written(reply, 3)
    unheard = (NAMES.health("replica-1"), NAMES.ask("replica-1"))
    region.server.lose = lambda message: message.subject in unheard
    await region.replica("replica-2")
    await region.opened(reply, 2)
    zombie.engine.allow(float("inf"))
    ended = await region.ended(reply)
    assert ended.attempts == 2
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    await region.calm()
    overs = await region.journal("replica", "attempt_over")
    outcomes = {record.data["replica"]: record.data["outcome"] for record in overs}
    assert outcomes == {"replica-1": "replaced", "replica-2": "ended"}


async def test_an_engine_is_stuck(region: Plane):
    """Its heartbeats come and say how old its step is: another replica goes on, and the log refuses what comes late."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.allow(10)
    reply = await region.send(budget=30)
    await region.written(reply, 4)
    await region.replica("replica-2")
    first.engine.stuck = True
    ended = await region.ended(reply)
    view = await region.log(reply)
    assert (ended.attempts, view.opened.replica) == (2, "replica-2")
    first.engine.stuck = False
    first.engine.allow(float("inf"))
    await region.calm()
    assert (await region.log(reply)).ids == region.expected_ids(reply)


async def test_a_replica_is_started_again_under_its_name(region: Plane):
    """Another boot of the same replica has lost what it ran: it is asked, and gets the reply anew."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.allow(10)
    reply = await region.send(budget=30)
    await region.written(reply, 4)
    await first.kill()
    await region.replica("replica-1")
    ended = await region.ended(reply)
    assert ended.attempts == 2
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    await region.calm()


async def test_an_engine_dies(region: Plane):
    """The shell writes what was sampled, reports the attempt failed, and another replica goes on at once."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.allow(10)
    reply = await region.send(budget=30)
    await region.written(reply, 4)
    await region.replica("replica-2")
    first.engine.die()
    ended = await region.ended(reply)
    assert ended.attempts == 2
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    await eventually(first.task.done, "the replica has ended itself")
    assert first.task.exception() is not None


async def test_a_reply_that_kills_every_engine(region: Plane):
    """Attempts that write nothing are bounded: after the last one the reply ends as failed, and leaves its lane."""
    await region.router()
    replica = await region.replica("replica-1")
    replica.engine.allow(0)
    reply = await region.send(budget=30)
    for n in range(1, ATTEMPTS_MAX + 1):
        await eventually(lambda one=replica: one.engine.submitted, f"dispatch {n}")
        dying, replica = replica, await region.replica(f"replica-{n + 1}")
        replica.engine.allow(0)
        dying.engine.die()
        await eventually(dying.task.done, "the replica has ended itself")
    ended = await region.ended(reply)
    assert (ended.reason, ended.attempts) == (EndReason.FAILED, ATTEMPTS_MAX)
    assert ended.detail
    assert not replica.engine.submitted


async def test_a_full_replica_refuses(region: Plane):
    """A refused dispatch moves the request to another replica and is not held against it."""
    full = await region.replica("replica-1")
    full.engine.full = True
    await region.router()
    reply = await region.send(budget=8)
    await region.opened(reply, 1)
    await region.replica("replica-2")
    ended = await region.ended(reply)
    view = await region.log(reply)
    assert view.opened.replica == "replica-2"
    assert view.returned == ended.attempts - 1


async def test_a_replica_drains(region: Plane):
    """It takes nothing new, hands back what it cannot finish in time, and another replica writes on."""
    first = await region.replica("replica-1")
    await region.router()
    first.engine.allow(10)
    reply = await region.send(budget=30)
    await region.written(reply, 3)
    await region.replica("replica-2")
    await first.service.drain(2.2)
    ended = await region.ended(reply)
    view = await region.log(reply)
    assert view.ids == region.expected_ids(reply)
    assert (view.opened.replica, view.returned, ended.attempts) == ("replica-2", 1, 2)
    await region.calm()


# --- routers come and go -----------------------------------------------------------------------------------------


async def test_a_redelivery_while_running_is_adopted_not_doubled(region: Plane):
    """A delivery that came back is a question: the replica runs it, so the lease is taken over and nothing is opened."""
    replica = await region.replica()
    await region.router()
    replica.engine.allow(5)
    reply = await region.send(budget=40)
    await region.written(reply, 2)

    async def lost(_: str) -> None:
        pass

    replica.bus.extend = lost
    await eventually(lambda: region.deliveries(reply) >= 2, "a redelivery")
    replica.engine.allow(float("inf"))
    ended = await region.ended(reply)
    assert ended.attempts == 1
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    assert await region.journal("router", "adopted")
    assert len(replica.engine.submitted) == 1
    await region.calm()


async def test_a_router_dies_while_a_reply_runs(region: Plane):
    """The replica keeps the lease and writes on; when the attempt is over the next router archives it."""
    replica = await region.replica()
    router = await region.router("router-1")
    replica.engine.allow(5)
    reply = await region.send(budget=40)
    await region.written(reply, 2)
    await router.kill()
    await region.router("router-2")
    replica.engine.allow(float("inf"))
    ended = await region.ended(reply)
    assert (ended.reason, ended.attempts) == (EndReason.MAX_TOKENS, 1)
    assert len(replica.engine.submitted) == 1
    await region.calm()


async def test_a_router_drains(region: Plane):
    """What waits goes back to its lane and to the other router; nothing ends because of it."""
    first = await region.router("router-1")
    reply = await region.send(budget=8)
    await waits(region, 1)
    await first.service.drain(2.0)
    await first.kill()
    await region.router("router-2")
    await region.replica()
    ended = await region.ended(reply)
    assert (ended.reason, ended.attempts) == (EndReason.MAX_TOKENS, 1)
    await region.calm()


async def test_two_routers_share_the_lanes(region: Plane):
    """Each reply is served once, whoever of the routers holds it."""
    for n in (1, 2):
        await region.router(f"router-{n}")
        await region.replica(f"replica-{n}")
    replies = [await region.send(budget=12, user=f"u{n}") for n in range(24)]
    for reply in replies:
        ended = await region.ended(reply)
        view = await region.log(reply)
        assert ended.attempts - view.returned == 1, "what two routers sent to one last place was refused, not lost"
        assert view.ids == region.expected_ids(reply)
    await region.calm()


# --- the bus comes and goes -----------------------------------------------------------------------------------------


async def test_the_bus_is_away_for_a_moment(region: Plane):
    """Appends are tried again byte-identical; the reply ends whole."""
    replica = await region.replica()
    await region.router()
    replica.engine.step_s = 0.01
    reply = await region.send(budget=60)
    await region.written(reply, 3)
    region.server.stop()
    await asyncio.sleep(0.3)
    region.server.start()
    ended = await region.ended(reply)
    assert ended.reason is EndReason.MAX_TOKENS
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    await region.calm()
