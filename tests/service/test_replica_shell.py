"""A replica alone on the in-memory bus, dispatched to by hand: what it answers, appends, extends and reports."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shared.errors import BusTimeoutError, StreamFullError
from shared.messages import (
    Ask,
    AttemptOver,
    BlocksChanged,
    Dispatch,
    Dispatched,
    DispatchRefused,
    Holding,
    Message,
    Open,
    ReplicaHealth,
    decoder,
    encode,
)
from shared.token_log import LogView
from tests.service.serving_plane import NAMES, Plane, Running, eventually, plane

_dispatch_answer = decoder(Dispatched | DispatchRefused)  # type: ignore[arg-type]
_over = decoder(AttemptOver)


@pytest.fixture
async def region() -> AsyncIterator[Plane]:
    async with plane() as made:
        yield made


class Hand:
    """A router's part, done by hand."""

    def __init__(self, region: Plane, name: str = "router-1") -> None:
        self.region, self.name = region, name

    async def listen(self) -> "Hand":
        self.overs = await self.region.bus.subscribe(NAMES.attempt_over(self.name))
        return self

    async def open(self, reply: str, attempt: int = 1) -> Dispatch:
        """Append the next `open` of a sent message and make its dispatch."""
        view = await self.region.log(reply)
        entry = Open(attempt=attempt, replica="replica-1", model_version="1", first_index=len(view.ids))
        seq = await self.region.store.append(reply, view.last_seq, encode(entry))
        return self.dispatch(reply, view, attempt, seq)

    def dispatch(self, reply: str, view: LogView, attempt: int, seq: int, *, delivered: int = 1) -> Dispatch:
        return Dispatch(
            request=self.region.request(reply),
            attempt=attempt,
            open_seq=seq,
            written=b"".join(token.to_bytes(4, "little") for token in view.ids),
            router=self.name,
            ack_subject=f"ack.{reply}.{self.name}.{delivered}",
            delivered=delivered,
            deadline_left_s=60.0,
        )

    async def send(self, dispatch: Dispatch) -> Dispatched | DispatchRefused:
        answer = await self.region.bus.request(NAMES.dispatch("replica-1"), encode(dispatch), timeout_s=5.0)
        return _dispatch_answer.decode(answer.data)

    async def ask(self, reply: str, delivered: int) -> Holding:
        ask = Ask(reply_id=reply, router=self.name, ack_subject=f"ack.{reply}.{self.name}", delivered=delivered)
        answer = await self.region.bus.request(NAMES.ask("replica-1"), encode(ask), timeout_s=5.0)
        return decoder(Holding).decode(answer.data)

    async def over(self) -> AttemptOver:
        message = await self.overs.next(10.0)
        assert message is not None, "no report"
        return _over.decode(message.data)


async def heard(region: Plane, kind: type[Message], subject: str, true) -> object:
    """The first message on `subject` for which `true` holds."""
    inbox = await region.bus.subscribe(subject)
    async with asyncio.timeout(10.0):
        async for message in inbox:
            said = decoder(kind).decode(message.data)
            if true(said):
                return said
    return None


async def begin(region: Plane, **settings) -> tuple[Running, Hand]:
    return await region.replica(**settings), await Hand(region).listen()


async def test_a_dispatch_sent_twice_runs_once(region: Plane):
    """A lost answer makes the router send it again: one sequence, one log, one report."""
    replica, hand = await begin(region)
    replica.engine.allow(5)
    reply = await region.send(budget=20)
    dispatch = await hand.open(reply)
    first, again = await hand.send(dispatch), await hand.send(dispatch)
    assert isinstance(first, Dispatched)
    assert again == first
    replica.engine.allow(float("inf"))
    over = await hand.over()
    assert (over.outcome, over.attempt) == ("ended", 1)
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    assert len(replica.engine.submitted) == 1
    late = await hand.send(dispatch)
    assert isinstance(late, DispatchRefused)
    assert late.reason == "over"


async def test_a_question_moves_the_lease(region: Plane):
    """A router with a newer delivery is answered, extended for and reported to; the other one is told."""
    replica, first = await begin(region)
    second = await Hand(region, "router-2").listen()
    replica.engine.allow(5)
    extended: list[str] = []

    async def extend(ack_subject: str) -> None:
        extended.append(ack_subject)

    replica.bus.extend = extend
    reply = await region.send(budget=20)
    await first.send(await first.open(reply))
    await eventually(lambda: f"ack.{reply}.router-1.1" in extended, "an extension")
    holding = await second.ask(reply, delivered=2)
    assert (holding.running, holding.attempt, holding.router) == (True, 1, "router-2")
    assert (await first.over()).outcome == "adopted"
    await eventually(lambda: f"ack.{reply}.router-2" in extended, "an extension of the newer delivery")
    replica.engine.allow(float("inf"))
    assert (await second.over()).outcome == "ended"
    assert (await second.ask(reply, delivered=3)).running is False


async def test_a_later_attempt_on_the_same_replica(region: Plane):
    """The earlier one is dropped, the later one continues from the log: the text is the same."""
    replica, hand = await begin(region)
    replica.engine.allow(6)
    reply = await region.send(budget=20)
    await hand.send(await hand.open(reply))
    await region.written(reply, 2)
    await hand.send(await hand.open(reply, 2))
    replica.engine.allow(float("inf"))
    outcomes = {(await hand.over()).outcome, (await hand.over()).outcome}
    assert outcomes == {"replaced", "ended"}
    assert (await region.log(reply)).ids == region.expected_ids(reply)


async def test_a_full_bucket_delays_and_loses_nothing(region: Plane):
    """An append that is refused for lack of room is tried again, byte-identical, until it stands."""
    replica, hand = await begin(region)
    real, refusals, sent = replica.bus.append, 3, []

    async def full(subject: str, data: bytes, **more) -> int:
        nonlocal refusals
        if subject.startswith("$KV."):
            sent.append(data)
            if refusals:
                refusals -= 1
                raise StreamFullError("full")
        return await real(subject, data, **more)

    replica.bus.append = full
    reply = await region.send(budget=20)
    await hand.send(await hand.open(reply))
    await hand.over()
    assert (await region.log(reply)).ids == region.expected_ids(reply)
    assert sent[0] == sent[1] == sent[2] == sent[3]


async def test_an_ack_that_was_lost(region: Plane):
    """The append landed and its answer did not: the same bytes again are refused, and recognised as its own."""
    replica, hand = await begin(region)
    real, lose = replica.bus.append, True

    async def lossy(subject: str, data: bytes, **more) -> int:
        nonlocal lose
        seq = await real(subject, data, **more)
        if subject.startswith("$KV.") and lose:
            lose = False
            raise BusTimeoutError("lost")
        return seq

    replica.bus.append = lossy
    reply = await region.send(budget=20)
    await hand.send(await hand.open(reply))
    assert (await hand.over()).outcome == "ended"
    view = await region.log(reply)
    assert (view.ids, view.attempts) == (region.expected_ids(reply), 1)


async def test_heartbeats_cover_the_dispatches_they_name(region: Plane):
    """Right after a dispatch the figures count it, though the engine has not stepped."""
    replica, hand = await begin(region)
    replica.engine.allow(0)
    reply = await region.send(tokens=40)
    taken = await hand.send(await hand.open(reply))
    assert isinstance(taken, Dispatched)
    health = await heard(region, ReplicaHealth, NAMES.health("replica-1"), lambda said: said.dispatches >= taken.number)
    assert (health.waiting, health.waiting_tokens) == (1, {"paid": 0, "free": 40, "background": 0})
    assert (health.running_max, health.blocks_free, health.accepting) == (8, 512, True)


async def test_a_stuck_engine_takes_nothing_new_and_lets_leases_lapse(region: Plane):
    """The heartbeat goes on and says how old the step is; readiness fails; deliveries are no longer extended."""
    replica, hand = await begin(region)
    replica.engine.allow(3)
    extended: list[str] = []

    async def extend(ack_subject: str) -> None:
        extended.append(ack_subject)

    replica.bus.extend = extend
    reply = await region.send(budget=40)
    await hand.send(await hand.open(reply))
    await eventually(lambda: len(extended) >= 2, "extensions")
    replica.engine.stuck = True
    health = await heard(region, ReplicaHealth, NAMES.health("replica-1"), lambda said: not said.accepting)
    assert health.step_age_s > 10.0
    assert "one step" in (replica.service.ready() or "")
    extended.clear()
    await heard(region, ReplicaHealth, NAMES.health("replica-1"), lambda said: True)
    for _ in range(4):
        await heard(region, ReplicaHealth, NAMES.health("replica-1"), lambda said: True)
    assert extended == []


async def test_prefix_blocks_are_told_and_can_be_asked_for(region: Plane):
    """A router that follows the changes and one that asks for a snapshot know the same blocks."""
    _, hand = await begin(region)
    changes = await region.bus.subscribe(NAMES.blocks("replica-1"))
    reply = await region.send(tokens=64, budget=4)
    await hand.send(await hand.open(reply))
    message = await changes.next(10.0)
    assert message is not None
    changed = decoder(BlocksChanged).decode(message.data)
    assert changed.number == 1
    assert len(changed.stored) == 4 * 16
    answer = await region.bus.request(NAMES.blocks_snapshot("replica-1"), b"", timeout_s=5.0)
    snapshot = decoder(BlocksChanged).decode(answer.data)
    assert (set(chunks(snapshot.stored)), snapshot.number) == (set(chunks(changed.stored)), 1)
    assert set(chunks(region.request(reply).block_hashes)) == set(chunks(changed.stored))


def chunks(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


async def test_undecodable_messages_hurt_nobody(region: Plane):
    """Garbage on any of its subjects is counted; the replica serves on."""
    _, hand = await begin(region)
    for subject in (NAMES.dispatch("replica-1"), NAMES.ask("replica-1"), NAMES.cancel("x"), NAMES.presence("x")):
        await region.bus.publish(subject, b"\xc1garbage")
    reply = await region.send(budget=4)
    await hand.send(await hand.open(reply))
    assert (await hand.over()).outcome == "ended"


async def test_an_ordered_drain(region: Plane):
    """The drain subject stops admission; what runs finishes; later dispatches are refused as draining."""
    replica, hand = await begin(region)
    replica.engine.allow(4)
    reply, later = await region.send(budget=20), await region.send(budget=20)
    await hand.send(await hand.open(reply))
    await region.written(reply, 1)
    await region.bus.publish(NAMES.drain("replica-1"), b"")
    await heard(region, ReplicaHealth, NAMES.health("replica-1"), lambda said: not said.accepting)
    refused = await hand.send(await hand.open(later))
    assert isinstance(refused, DispatchRefused)
    assert refused.reason == "draining"
    replica.engine.allow(float("inf"))
    assert (await hand.over()).outcome == "ended"


async def test_usage_of_each_attempt_is_stored_once(region: Plane):
    """Two attempts of a reply make two records that add up to its tokens."""
    replica, hand = await begin(region)
    replica.engine.allow(8)
    reply = await region.send(budget=20)
    await hand.send(await hand.open(reply))
    await region.written(reply, 3)
    await hand.send(await hand.open(reply, 2))
    replica.engine.allow(float("inf"))
    for _ in range(2):
        await hand.over()
    records: list = []
    async with asyncio.timeout(10.0):
        while len(records) < 2:
            records = await region.usage(reply)
            await asyncio.sleep(0.01)
    assert [record.attempt for record in records] == [1, 2]
    assert sum(record.output_tokens for record in records) == 20
    assert all(record.engine_s > 0 for record in records)


async def test_an_idle_replica_says_only_its_heartbeat(region: Plane):
    """Nothing else goes over the bus while nobody is served."""
    await begin(region)
    everything = await region.bus.subscribe(">")
    subjects = set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.8):
            async for message in everything:
                subjects.add(message.subject)
    assert subjects == {NAMES.health("replica-1")}
