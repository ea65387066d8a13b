"""One behaviour suite for the bus port, run on a real nats-server and on its in-memory twin."""

import asyncio
import itertools

import pytest

from shared.bus import BusMessage, ConsumerSpec, StreamSpec
from shared.errors import (
    BusClosedError,
    BusError,
    BusTimeoutError,
    NoRespondersError,
    StreamFullError,
    WrongLastSequenceError,
)
from shared.limits import CATCH_UP_BATCH, CATCH_UP_BYTES_MAX, KIB, PAYLOAD_BYTES_MAX
from tests.contract.conftest import until

S = 2.0  # long enough for anything that must happen
SOON = 0.25  # how long we look for what must not happen
LONG = 30.0  # an ack wait that never runs out in a test


def bucket(world, **changes) -> StreamSpec:
    name = f"{world.region}_b"
    settings = {"history": 1024, "republish_to": f"{world.region}.live.>"} | changes
    return StreamSpec(name=f"KV_{name}", subjects=(f"$KV.{name}.>",), **settings)


def key(world, name: str) -> str:
    return f"$KV.{world.region}_b.{name}"


def lane(world, **changes) -> StreamSpec:
    return StreamSpec(
        name=f"{world.region}_LANE", subjects=(f"{world.region}.lane.>",), **{"work_queue": True, **changes}
    )


def consumer(world, name: str = "c", last: str = "a", ack_wait_s: float = LONG) -> ConsumerSpec:
    return ConsumerSpec(f"{world.region}_LANE", name, f"{world.region}.lane.{last}", ack_wait_s)


async def lane_with(world, contents, ack_wait_s=LONG):
    """A lane with one consumer and some messages: (bus, puller)."""
    bus = await world.bus()
    await bus.apply([lane(world)], [consumer(world, ack_wait_s=ack_wait_s)])
    for data in contents:
        await bus.append(f"{world.region}.lane.a", data, timeout_s=S)
    return bus, bus.puller(f"{world.region}_LANE", "c")


async def pull_all(puller, count, timeout_s=S):
    """Exactly `count` deliveries, in the order they came."""
    found = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            found += await puller.pull(count - len(found), timeout_s)
    return found


# --- core subjects ------------------------------------------------------------------------------------------


async def test_a_publish_reaches_every_plain_subscriber_and_one_of_each_group(world):
    """Plain subscribers all get a message; of a queue group exactly one member does."""
    bus, other = await world.bus(), await world.bus()
    subject = f"{world.region}.news"
    plain = [await bus.subscribe(subject), await other.subscribe(f"{world.region}.*")]
    members = [await one.subscribe(subject, queue="g") for one in (bus, other, other)]
    for number in range(20):
        await bus.publish(subject, b"%d" % number)
    for inbox in plain:
        assert [(await inbox.next(S)).data for _ in range(20)] == [b"%d" % number for number in range(20)]
    got = []
    await until(lambda: got.extend(m for member in members for m in member.take_ready(99)) or len(got) >= 20)
    assert sorted(int(message.data) for message in got) == list(range(20))


async def test_a_subscription_stands_when_it_returns(world):
    """What another client publishes after `subscribe` has returned is never missed."""
    bus, other = await world.bus(), await world.bus()
    for number in range(200):
        inbox = await bus.subscribe(f"{world.region}.{number}")
        await other.publish(f"{world.region}.{number}", b"x")
        assert await inbox.next(S), f"round {number}"
        await inbox.close()


@pytest.mark.parametrize(
    ("pattern", "subject", "hit"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a", "a.b", False),
    ],
)
async def test_wildcards(world, pattern, subject, hit):
    """`*` stands for one token, `>` for one or more."""
    bus = await world.bus()
    inbox, marker = await bus.subscribe(f"{world.region}.{pattern}"), await bus.subscribe(f"{world.region}_marker")
    await bus.publish(f"{world.region}.{subject}", b"x")
    await bus.publish(f"{world.region}_marker", b"after")
    assert (await marker.next(S)).data == b"after"
    assert len(inbox.take_ready(9)) == hit


async def test_headers_and_reply_travel(world):
    """A core message arrives with its headers and its reply subject."""
    bus = await world.bus()
    inbox = await bus.subscribe(f"{world.region}.x")
    await bus.publish(f"{world.region}.x", b"1", reply="somewhere", headers={"Chorus-Id": "r 1"})
    assert await inbox.next(S) == BusMessage(f"{world.region}.x", b"1", "somewhere", {"Chorus-Id": "r 1"})


async def test_a_request_gets_its_own_answer(world):
    """Many requests at once on one connection each get the answer to themselves."""
    bus, server = await world.bus(), await world.bus()
    inbox = await server.subscribe(f"{world.region}.double", queue="g")

    async def serve():
        waiting = []
        async for message in inbox:
            waiting.append(message)
            if len(waiting) == 50:
                for one in reversed(waiting):
                    await server.publish(one.reply, one.data + one.data)
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        asked = [group.create_task(bus.request(f"{world.region}.double", b"%d" % n, timeout_s=S)) for n in range(50)]
    assert [task.result().data for task in asked] == [b"%d%d" % (n, n) for n in range(50)]


async def test_cancelled_requests_leave_no_answer_behind(world):
    """After many requests cancelled mid-flight, the next asker still gets its own answer."""
    bus, server = await world.bus(), await world.bus()
    inbox = await server.subscribe(f"{world.region}.echo")

    async def serve():
        async for message in inbox:
            await server.publish(message.reply, message.data)

    async def ask(number):
        assert (await bus.request(f"{world.region}.echo", b"%d" % number, timeout_s=S)).data == b"%d" % number

    serving = asyncio.create_task(serve())
    for number in range(0, 300, 3):
        tasks = [asyncio.create_task(ask(number + k)) for k in range(3)]
        for _ in range(number % 5):
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.gather(tasks[2])
        await asyncio.gather(*tasks, return_exceptions=True)
    await inbox.close()
    await serving


async def test_nobody_listening_is_said_at_once(world):
    """A request, and an append no stream captures, raise NoRespondersError without waiting for the deadline."""
    bus = await world.bus()
    with pytest.raises(NoRespondersError):
        await bus.request(f"{world.region}.nobody", b"", timeout_s=LONG)
    with pytest.raises(NoRespondersError):
        await bus.append(f"{world.region}.nobody", b"", timeout_s=LONG)
    with pytest.raises(NoRespondersError):
        await bus.read(f"{world.region}_NONE", "x", from_seq=1, most=1)


async def test_a_silent_responder_costs_the_deadline(world):
    """A request that nobody answers raises BusTimeoutError."""
    bus = await world.bus()
    await bus.subscribe(f"{world.region}.silent")
    with pytest.raises(BusTimeoutError):
        await bus.request(f"{world.region}.silent", b"", timeout_s=0.05)


async def test_a_full_inbox_drops_the_newest_and_counts(world):
    """An inbox keeps its oldest messages, drops what overflows and counts it."""
    bus = await world.bus()
    inbox, marker = await bus.subscribe(f"{world.region}.x", inbox_max=10), await bus.subscribe(f"{world.region}.y")
    for number in range(500):
        await bus.publish(f"{world.region}.x", b"%d" % number)
    await bus.publish(f"{world.region}.y", b"")
    assert await marker.next(S)
    await until(lambda: inbox.dropped == 490)
    assert [message.data for message in inbox.take_ready(99)] == [b"%d" % number for number in range(10)]
    await bus.publish(f"{world.region}.x", b"again")
    assert (await inbox.next(S)).data == b"again"


async def test_next_gives_none_after_its_time(world):
    """`next` waits its time and says None; `take_ready` never waits."""
    bus = await world.bus()
    inbox = await bus.subscribe(f"{world.region}.x")
    assert await inbox.next(0.01) is None
    assert inbox.take_ready(5) == []


async def test_a_closed_subscription_ends_its_iteration_and_takes_nothing(world):
    """Closing ends `async for`; later messages go nowhere."""
    bus = await world.bus()
    inbox, marker = await bus.subscribe(f"{world.region}.x"), await bus.subscribe(f"{world.region}.y")

    async def loop():
        return [message.data async for message in inbox]

    running = asyncio.create_task(loop())
    await bus.publish(f"{world.region}.x", b"1")
    await bus.publish(f"{world.region}.y", b"")
    assert await marker.next(S)
    await asyncio.sleep(0)
    await inbox.close()
    await inbox.close()
    assert await asyncio.wait_for(running, S) == [b"1"]
    with pytest.raises(NoRespondersError):
        await bus.request(f"{world.region}.x", b"", timeout_s=S)
    await bus.publish(f"{world.region}.x", b"2")
    await bus.publish(f"{world.region}.y", b"")
    assert await marker.next(S)
    assert inbox.take_ready(5) == []


async def test_a_closed_bus_says_so_everywhere(world):
    """After close every call and every waiting loop raises BusClosedError."""
    bus = await world.bus()
    await bus.apply([lane(world)], [consumer(world)])
    inbox, puller = await bus.subscribe(f"{world.region}.x"), bus.puller(f"{world.region}_LANE", "c")
    waiting = [
        asyncio.create_task(anext(inbox)),
        asyncio.create_task(puller.pull(1, LONG)),
    ]
    await asyncio.sleep(0.02)
    await bus.close()
    await bus.close()
    assert not bus.connected
    for task in waiting:
        with pytest.raises(BusClosedError):
            await asyncio.wait_for(task, S)
    for call in (
        lambda: bus.publish("x", b""),
        lambda: bus.request("x", b"", timeout_s=S),
        lambda: bus.append("x", b"", timeout_s=S),
        lambda: bus.subscribe("x"),
        lambda: puller.pull(1, S),
        lambda: bus.last("x", "x"),
    ):
        with pytest.raises(BusClosedError):
            await call()


async def test_close_flushes_what_was_published(world):
    """What was published before close has reached the others."""
    bus, other = await world.bus(), await world.bus()
    inbox = await other.subscribe(f"{world.region}.x")
    for number in range(500):
        await bus.publish(f"{world.region}.x", b"%d" % number)
    await bus.close()
    assert [(await inbox.next(S)).data for _ in range(500)] == [b"%d" % number for number in range(500)]


async def test_what_is_too_large_is_refused_here(world):
    """More bytes than the bus takes raise BusError, and the connection lives on."""
    bus = await world.bus()
    await bus.apply([lane(world)], [])
    with pytest.raises(BusError):
        await bus.publish(f"{world.region}.x", bytes(PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(BusError):
        await bus.append(f"{world.region}.lane.a", bytes(PAYLOAD_BYTES_MAX + 1), timeout_s=S)
    assert await bus.append(f"{world.region}.lane.a", b"fits", timeout_s=S) == 1


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB evil 0\r\n", "a\tb", "x" * 5000])
async def test_what_is_no_subject_is_refused_here(world, subject):
    """A subject with blanks or line breaks, or without an end, never reaches the wire, whatever the call."""
    bus = await world.bus()
    for call in (
        lambda: bus.publish(subject, b""),
        lambda: bus.request(subject, b"", timeout_s=S),
        lambda: bus.append(subject, b"", timeout_s=S),
        lambda: bus.subscribe(subject),
    ):
        with pytest.raises(BusError, match="subject"):
            await call()


async def test_a_request_in_flight_fails_with_its_connection(world):
    """A request that waits for a silent responder learns of a lost connection long before its own deadline."""
    bus = await world.bus()
    inbox = await bus.subscribe(f"{world.region}.silent")
    asking = asyncio.create_task(bus.request(f"{world.region}.silent", b"", timeout_s=LONG))
    assert await inbox.next(S)
    world.down()
    with pytest.raises(BusTimeoutError):
        await asyncio.wait_for(asking, S)
    world.up()
    assert bus.counts.disconnects == 1


# --- streams ------------------------------------------------------------------------------------------------


async def test_apply_is_idempotent_and_updates(world):
    """The same specs may be applied by many at once and again; a changed bound takes effect and loses nothing."""
    buses = [await world.bus() for _ in range(3)]
    specs = ([bucket(world), lane(world)], [consumer(world)])
    await asyncio.gather(*(bus.apply(*specs) for bus in buses))
    await buses[0].append(f"{world.region}.lane.a", b"1", timeout_s=S)
    created = await buses[0].stream_created_s(lane(world).name)
    await buses[1].apply([lane(world, max_messages=2)], [consumer(world)])
    await buses[0].append(f"{world.region}.lane.a", b"2", timeout_s=S)
    with pytest.raises(StreamFullError):
        await buses[0].append(f"{world.region}.lane.a", b"3", timeout_s=S)
    assert await buses[2].stream_created_s(lane(world).name) == created


async def test_read_and_last(world):
    """A subject's messages come in stream order from any sequence on, at most so many; its last one alone."""
    bus = await world.bus()
    await bus.apply([bucket(world)], [])
    sequences = {name: [] for name in "ab"}
    for number, name in zip(range(20), itertools.cycle("ab"), strict=False):
        sequences[name].append(await bus.append(key(world, name), b"%d" % number, timeout_s=S))
    stream = bucket(world).name
    whole = await bus.read(stream, key(world, "b"), from_seq=0, most=100)
    assert [entry.seq for entry in whole] == sequences["b"]
    assert [entry.data for entry in whole] == [b"%d" % number for number in range(1, 20, 2)]
    assert {entry.subject for entry in whole} == {key(world, "b")}
    some = await bus.read(stream, key(world, "b"), from_seq=sequences["b"][2] + 1, most=3)
    assert [entry.seq for entry in some] == sequences["b"][3:6]
    assert await bus.read(stream, key(world, "b"), from_seq=sequences["b"][-1] + 1, most=3) == []
    assert await bus.read(stream, key(world, "none"), from_seq=1, most=3) == []
    last = await bus.last(stream, key(world, "a"))
    assert (last.seq, last.data) == (sequences["a"][-1], b"18")
    assert await bus.last(stream, key(world, "none")) is None
    assert whole == sorted(whole, key=lambda entry: entry.stored_s)


async def test_reads_of_several_batches(world):
    """A read goes on over several batches, by count and by bytes; fewer than asked means the end was reached."""
    bus = await world.bus()
    await bus.apply([bucket(world)], [])
    count = CATCH_UP_BATCH * 2 + 10
    await asyncio.gather(*(bus.append(key(world, "a"), b"x", timeout_s=S) for _ in range(count)))
    stream = bucket(world).name
    assert len(await bus.read(stream, key(world, "a"), from_seq=1, most=10_000)) == count
    assert len(await bus.read(stream, key(world, "a"), from_seq=1, most=CATCH_UP_BATCH * 2)) == CATCH_UP_BATCH * 2
    large = 100 * KIB
    for _ in range(12):
        await bus.append(key(world, "large"), bytes(large), timeout_s=S)
    assert 12 * large > 2 * CATCH_UP_BYTES_MAX
    assert len(await bus.read(stream, key(world, "large"), from_seq=1, most=100)) == 12


async def test_an_append_is_conditional_on_the_entry_before_it(world):
    """The first append expects 0, each later one its predecessor; another expectation is refused with what stands."""
    bus = await world.bus()
    await bus.apply([bucket(world)], [])
    first = await bus.append(key(world, "a"), b"1", expected_last_seq=0, timeout_s=S)
    await bus.append(key(world, "other"), b"1", expected_last_seq=0, timeout_s=S)
    second = await bus.append(key(world, "a"), b"2", expected_last_seq=first, timeout_s=S)
    for stale in (0, first, second + 1):
        with pytest.raises(WrongLastSequenceError) as refused:
            await bus.append(key(world, "a"), b"zombie", expected_last_seq=stale, timeout_s=S)
        assert refused.value.last_sequence == second
    entries = await bus.read(bucket(world).name, key(world, "a"), from_seq=1, most=9)
    assert [entry.data for entry in entries] == [b"1", b"2"]


async def test_of_many_writers_one_wins_each_place(world):
    """Many writers racing for the same place: one is stored, all others are refused."""
    buses = [await world.bus() for _ in range(4)]
    await buses[0].apply([bucket(world)], [])
    last = 0
    for _ in range(10):
        tries = [
            buses[n % 4].append(key(world, "a"), b"%d" % n, expected_last_seq=last, timeout_s=S) for n in range(12)
        ]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        won = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(won) == 1
        assert sum(isinstance(outcome, WrongLastSequenceError) for outcome in outcomes) == 11
        last = won[0]
    assert len(await buses[0].read(bucket(world).name, key(world, "a"), from_seq=1, most=99)) == 10


async def test_accepted_entries_are_republished_in_order_with_their_places(world):
    """Each accepted entry is republished under its key, in stream order, naming its own and its key's previous place."""
    bus, reader = await world.bus(), await world.bus()
    await bus.apply([bucket(world)], [])
    inbox = await reader.subscribe(f"{world.region}.live.a")
    everything = await reader.subscribe(f"{world.region}.live.>")
    last, places = {"a": 0, "b": 0}, []
    for name in "abaabba":
        seq = await bus.append(key(world, name), name.encode(), expected_last_seq=last[name], timeout_s=S)
        places.append((f"{world.region}.live.{name}", seq, last[name]))
        last[name] = seq
        with pytest.raises(WrongLastSequenceError):
            await bus.append(key(world, name), b"zombie", expected_last_seq=seq + 1, timeout_s=S)

    def place(message):
        return message.subject, int(message.headers["Nats-Sequence"]), int(message.headers["Nats-Last-Sequence"])

    assert [place(await everything.next(S)) for _ in places] == places
    assert [place(await inbox.next(S)) for _ in range(4)] == [one for one in places if one[0].endswith(".a")]
    assert await everything.next(0.05) is None, "a refused append was republished"


async def test_the_captured_subject_shows_refused_writes(world):
    """Why readers use the republished subject: a plain subscription on the captured one sees what was refused."""
    bus, reader = await world.bus(), await world.bus()
    await bus.apply([bucket(world)], [])
    inbox = await reader.subscribe(key(world, "a"))
    await bus.append(key(world, "a"), b"1", expected_last_seq=0, timeout_s=S)
    with pytest.raises(WrongLastSequenceError):
        await bus.append(key(world, "a"), b"zombie", expected_last_seq=0, timeout_s=S)
    assert [(await inbox.next(S)).data for _ in range(2)] == [b"1", b"zombie"]


async def test_a_repeated_message_id_is_acked_and_its_new_content_dropped(world):
    """The trap of deduplication: the same id with other content is acked with the first one's place, and lost."""
    bus = await world.bus()
    await bus.apply([bucket(world, deduplication_s=1.0)], [])
    first = await bus.append(key(world, "a"), b"1", message_id="m", timeout_s=S)
    assert await bus.append(key(world, "a"), b"1 and more", message_id="m", timeout_s=S) == first
    assert await bus.append(key(world, "b"), b"elsewhere", message_id="m", timeout_s=S) == first
    other = await bus.append(key(world, "a"), b"2", message_id="n", timeout_s=S)
    entries = await bus.read(bucket(world).name, key(world, "a"), from_seq=1, most=9)
    assert [(entry.seq, entry.data) for entry in entries] == [(first, b"1"), (other, b"2")]

    async def again():
        return await bus.append(key(world, "a"), b"3", message_id="m", timeout_s=S) > other

    async with asyncio.timeout(5):
        while not await again():
            await asyncio.sleep(0.05)


async def test_history_overflow_drops_the_oldest_without_an_error(world):
    """A key past its history loses its first entry; the append succeeds."""
    bus = await world.bus()
    await bus.apply([bucket(world, history=5)], [])
    last = 0
    for number in range(8):
        last = await bus.append(key(world, "a"), b"%d" % number, expected_last_seq=last, timeout_s=S)
    entries = await bus.read(bucket(world, history=5).name, key(world, "a"), from_seq=1, most=99)
    assert [entry.data for entry in entries] == [b"%d" % number for number in range(3, 8)]


async def test_age_cuts_the_head(world):
    """Past its age an entry goes, while later ones of the same key stay; a whole expired key expects 0 again."""
    bus = await world.bus()
    await bus.apply([bucket(world, max_age_s=0.8, deduplication_s=0.5)], [])
    stream = bucket(world).name
    first = await bus.append(key(world, "a"), b"old", timeout_s=S)
    await asyncio.sleep(0.5)
    await bus.append(key(world, "a"), b"new", timeout_s=S)

    async def standing():
        return [entry.data for entry in await bus.read(stream, key(world, "a"), from_seq=1, most=9)]

    seen = []
    async with asyncio.timeout(8):
        while now := await standing():
            seen.append(now)
            await asyncio.sleep(0.02)
    assert [b"new"] in seen
    assert [b"old"] not in seen
    assert await bus.append(key(world, "a"), b"anew", expected_last_seq=0, timeout_s=S) > first


async def test_a_purged_key_is_empty_and_expects_zero(world):
    """Purging one key removes its entries and no other's; the next append expects 0."""
    bus = await world.bus()
    await bus.apply([bucket(world)], [])
    stream = bucket(world).name
    for name in "aabb":
        await bus.append(key(world, name), b"x", timeout_s=S)
    await bus.purge(stream, key(world, "a"))
    assert await bus.read(stream, key(world, "a"), from_seq=1, most=9) == []
    assert await bus.last(stream, key(world, "a")) is None
    assert len(await bus.read(stream, key(world, "b"), from_seq=1, most=9)) == 2
    assert await bus.append(key(world, "a"), b"x", expected_last_seq=0, timeout_s=S) == 5


async def test_a_full_bucket_refuses_and_keeps_what_it_has(world):
    """A bucket past its bytes says StreamFullError; nothing already stored is lost."""
    bus = await world.bus()
    await bus.apply([bucket(world, max_bytes=64 * KIB)], [])
    stored = []
    with pytest.raises(StreamFullError):
        for _ in range(100):
            stored += [await bus.append(key(world, "a"), bytes(2 * KIB), timeout_s=S)]
    assert 20 < len(stored) <= 32
    entries = await bus.read(bucket(world).name, key(world, "a"), from_seq=1, most=99)
    assert [entry.seq for entry in entries] == stored
    used = await bus.stream_bytes(bucket(world).name)
    assert len(stored) * 2 * KIB < used <= 64 * KIB


async def test_a_full_lane_refuses_until_one_leaves(world):
    """A work queue at its bound refuses an append and silently drops a core publish; an ack makes room."""
    bus = await world.bus()
    await bus.apply([lane(world, max_messages=2)], [consumer(world)])
    subject = f"{world.region}.lane.a"
    await bus.append(subject, b"1", timeout_s=S)
    await bus.publish(subject, b"2")
    await until_stored(bus, lane(world).name, subject, 2)
    with pytest.raises(StreamFullError):
        await bus.append(subject, b"3", timeout_s=S)
    await bus.publish(subject, b"dropped without a word")
    puller = bus.puller(lane(world).name, "c")
    held = await pull_all(puller, 2)
    with pytest.raises(StreamFullError):
        await bus.append(subject, b"delivered is not done", timeout_s=S)
    await bus.ack(held[0].ack_subject)
    await bus.append(subject, b"4", timeout_s=S)
    assert [one.data for one in await pull_all(puller, 1)] == [b"4"]


async def until_stored(bus, stream, subject, count):
    async with asyncio.timeout(S):
        while len(await bus.read(stream, subject, from_seq=1, most=count)) < count:
            await asyncio.sleep(0.005)


# --- deliveries ---------------------------------------------------------------------------------------------


async def test_a_pull_returns_what_is_there_at_most_so_many(world):
    """Messages come in order, with their place, count and time; never more than asked."""
    bus, puller = await lane_with(world, [b"1", b"2", b"3"])
    first = await pull_all(puller, 2)
    assert [(one.data, one.seq, one.delivered, one.subject) for one in first] == [
        (b"1", 1, 1, f"{world.region}.lane.a"),
        (b"2", 2, 1, f"{world.region}.lane.a"),
    ]
    assert [one.data for one in await puller.pull(5, S)] == [b"3"]
    stored = await bus.read(lane(world).name, f"{world.region}.lane.a", from_seq=1, most=1)
    assert first[0].stored_s == pytest.approx(stored[0].stored_s, abs=0.001)
    assert await puller.pull(5, 0.02) == []


async def test_a_waiting_pull_picks_up_what_comes(world):
    """A pull that waits returns with the first message, long before its time."""
    bus, puller = await lane_with(world, [])
    waiting = asyncio.create_task(puller.pull(10, LONG))
    await asyncio.sleep(0.02)
    await bus.append(f"{world.region}.lane.a", b"1", timeout_s=S)
    assert [one.data for one in await asyncio.wait_for(waiting, S)] == [b"1"]


async def test_nothing_falls_between_two_pulls(world):
    """Messages sent around the moment a pull expires are each delivered once, the first time, without a stall."""
    bus, puller = await lane_with(world, [])
    got = []

    async def pull():
        while len(got) < 60:
            got.extend(await puller.pull(3, 0.03))

    async def send():
        for number in range(60):
            await asyncio.sleep(0.0297 if number % 4 == 0 else 0.0007 * (number % 9))
            await bus.append(f"{world.region}.lane.a", b"%d" % number, timeout_s=S)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(pull())
        group.create_task(send())
    assert [(one.data, one.delivered) for one in got] == [(b"%d" % number, 1) for number in range(60)]


async def test_a_cancelled_pull_loses_nothing(world):
    """A pull cancelled while messages arrive: each message still comes to the next pulls, delivered once."""
    bus, puller = await lane_with(world, [])
    got = []
    for number in range(30):
        waiting = asyncio.create_task(puller.pull(5, LONG))
        await asyncio.sleep(0.001)
        sending = asyncio.create_task(bus.append(f"{world.region}.lane.a", b"%d" % number, timeout_s=S))
        for _ in range(number % 6):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            got += waiting.result()
        await sending
    async with asyncio.timeout(S):
        while len(got) < 30:
            got += await puller.pull(30, S)
    assert [(one.data, one.delivered) for one in got] == [(b"%d" % number, 1) for number in range(30)]


async def test_a_silent_delivery_comes_back_ahead_of_newer_ones(world):
    """After the ack wait an un-acked message is delivered again, before one that was never delivered."""
    bus, puller = await lane_with(world, [b"1"], ack_wait_s=0.3)
    assert [one.delivered for one in await pull_all(puller, 1)] == [1]
    assert await puller.pull(1, 0.02) == []
    await asyncio.sleep(0.4)
    await bus.append(f"{world.region}.lane.a", b"2", timeout_s=S)
    assert [(one.data, one.delivered) for one in await pull_all(puller, 2)] == [(b"1", 2), (b"2", 1)]


async def test_silent_deliveries_come_back_in_order(world):
    """Several messages whose ack wait ran out come back oldest first, before what is new."""
    bus, puller = await lane_with(world, [b"1", b"2", b"3"], ack_wait_s=0.3)
    await pull_all(puller, 3)
    await asyncio.sleep(0.45)
    await bus.append(f"{world.region}.lane.a", b"4", timeout_s=S)
    again = await pull_all(puller, 4)
    assert [(one.data, one.delivered) for one in again] == [(b"1", 2), (b"2", 2), (b"3", 2), (b"4", 1)]


async def test_a_waiting_pull_wakes_for_what_comes_back(world):
    """A pull that waits gets a message whose ack wait runs out meanwhile."""
    _, puller = await lane_with(world, [b"1"], ack_wait_s=0.2)
    await pull_all(puller, 1)
    assert [one.delivered for one in await puller.pull(1, 5.0)] == [2]


async def test_extending_keeps_a_delivery(world):
    """A delivery extended in time does not come back; when extensions stop, it does."""
    bus, puller = await lane_with(world, [b"1"], ack_wait_s=1.0)
    held = (await pull_all(puller, 1))[0]
    for _ in range(9):
        await bus.extend(held.ack_subject)
        assert await puller.pull(1, 0.15) == []
    assert [one.delivered for one in await puller.pull(1, 5.0)] == [2]


async def test_a_nak_gives_back_at_once_and_ahead(world):
    """A message given back is delivered again at once, before newer ones."""
    bus, puller = await lane_with(world, [b"1", b"2"])
    held = (await pull_all(puller, 1))[0]
    await bus.nak(held.ack_subject)
    await bus.append(f"{world.region}.lane.a", b"3", timeout_s=S)  # the nak has arrived before it
    assert [(one.data, one.delivered) for one in await pull_all(puller, 3)] == [(b"1", 2), (b"2", 1), (b"3", 1)]


async def test_several_naks_come_back_in_their_order(world):
    """Messages given back come again in the order in which they were given back."""
    bus, puller = await lane_with(world, [b"1", b"2", b"3", b"4"])
    held = await pull_all(puller, 3)
    for one in (held[2], held[0], held[1]):
        await bus.nak(one.ack_subject)
    await bus.last(lane(world).name, f"{world.region}.lane.a")  # the naks have arrived before its answer
    assert [one.data for one in await pull_all(puller, 4)] == [b"3", b"1", b"2", b"4"]


async def test_a_nak_with_a_delay_comes_back_after_it(world):
    """A delayed nak holds the message back for its delay and no longer."""
    bus, puller = await lane_with(world, [b"1"])
    held = (await pull_all(puller, 1))[0]
    await bus.nak(held.ack_subject, delay_s=0.3)
    assert await puller.pull(1, 0.1) == []
    assert [one.delivered for one in await puller.pull(1, 5.0)] == [2]


async def test_acks_are_not_fenced(world):
    """From an old delivery: extend keeps what another now holds, nak gives it back, ack removes it."""
    bus, puller = await lane_with(world, [b"1"], ack_wait_s=0.8)
    old = (await pull_all(puller, 1))[0]
    newer = (await puller.pull(1, 5.0))[0]
    assert (newer.delivered, newer.ack_subject == old.ack_subject) == (2, False)
    for _ in range(7):
        await bus.extend(old.ack_subject)
        assert await puller.pull(1, 0.15) == []
    await bus.nak(old.ack_subject)
    assert [one.delivered for one in await puller.pull(1, 0.5)] == [3]
    await bus.ack(old.ack_subject)
    assert await puller.pull(1, 1.0) == []
    assert await bus.read(lane(world).name, f"{world.region}.lane.a", from_seq=1, most=1) == []
    await bus.ack(newer.ack_subject)  # a second ack is answered like the first


async def test_two_pullers_share_a_consumer(world):
    """Of one consumer each message goes to one puller; each user bucket's consumer sees only its own."""
    bus, other = await world.bus(), await world.bus()
    await bus.apply([lane(world)], [consumer(world, "a", "m.0"), consumer(world, "b", "m.1")])
    pullers = [one.puller(lane(world).name, "a") for one in (bus, other)]
    for number in range(20):
        await bus.append(f"{world.region}.lane.m.{number % 2}", b"%d" % number, timeout_s=S)
    got = []
    for puller in itertools.islice(itertools.cycle(pullers), 8):
        got += await puller.pull(2, 0.3)
    assert sorted(int(one.data) for one in got) == list(range(0, 20, 2))
    rest = await pull_all(bus.puller(lane(world).name, "b"), 10)
    assert [int(one.data) for one in rest] == list(range(1, 20, 2))


async def test_overlapping_consumers_of_a_work_queue_are_refused(world):
    """A second consumer whose filter overlaps the first's is refused."""
    bus = await world.bus()
    await bus.apply([lane(world)], [consumer(world, "a", "m.0")])
    with pytest.raises(BusError):
        await bus.apply([], [consumer(world, "all", "m.*")])


async def test_a_closed_puller_gives_back_what_nobody_took(world):
    """What had arrived for a puller and was not taken goes at once to another when it closes."""
    bus, puller = await lane_with(world, [b"1"])
    assert len(await puller.pull(10, S)) == 1
    for number in range(2, 5):
        await bus.append(f"{world.region}.lane.a", b"%d" % number, timeout_s=S)
    await asyncio.sleep(0.05)
    await puller.close()
    other = bus.puller(lane(world).name, "c")
    assert sorted(one.data for one in await pull_all(other, 3)) == [b"2", b"3", b"4"]
    with pytest.raises(BusClosedError):
        await puller.pull(1, S)


async def test_a_closed_bus_gives_back_what_its_pullers_had(world):
    """Leaving the bus gives back what had arrived for its pullers and was not taken."""
    bus, puller = await lane_with(world, [b"1"])
    other = await world.bus()
    held = await puller.pull(10, S)
    for number in range(2, 5):
        await other.append(f"{world.region}.lane.a", b"%d" % number, timeout_s=S)
    await asyncio.sleep(0.05)
    await bus.close()
    again = await pull_all(other.puller(lane(world).name, "c"), 3)
    assert sorted(one.data for one in again) == [b"2", b"3", b"4"]
    assert held[0].data == b"1"  # what was taken is its taker's


async def test_pulling_from_nobody_is_an_error(world):
    """A consumer that does not exist raises NoRespondersError, at the latest at the end of the pull."""
    bus = await world.bus()
    await bus.apply([lane(world)], [])
    with pytest.raises(NoRespondersError):
        await bus.puller(lane(world).name, "none").pull(1, 0.3)


async def test_a_kept_stream_delivers_and_stays(world):
    """A consumer on an ordinary stream delivers each message until acked; the stream keeps it."""
    bus = await world.bus()
    kept = StreamSpec(name=f"{world.region}_ENDED", subjects=(f"{world.region}.ended.>",))
    await bus.apply([kept], [ConsumerSpec(kept.name, "archive", f"{world.region}.ended.>", 0.3)])
    await bus.append(f"{world.region}.ended.r1", b"1", message_id="r1", timeout_s=S)
    puller = bus.puller(kept.name, "archive")
    await pull_all(puller, 1)
    again = (await puller.pull(1, 5.0))[0]
    assert again.delivered == 2
    await bus.ack(again.ack_subject)
    assert await puller.pull(1, 0.5) == []
    assert [entry.data for entry in await bus.read(kept.name, f"{world.region}.ended.r1", from_seq=1, most=9)] == [b"1"]


# --- a server that dies -------------------------------------------------------------------------------------


async def test_a_restart_is_survived(world):
    """Killed and started again: files keep all; subscriptions, waiting pulls, appends and requests go on."""
    bus, other = await world.bus(), await world.bus()
    await bus.apply([bucket(world), lane(world)], [consumer(world)])
    first = await bus.append(key(world, "a"), b"1", expected_last_seq=0, timeout_s=S)
    live, puller = await other.subscribe(f"{world.region}.live.>"), bus.puller(lane(world).name, "c")
    waiting = asyncio.create_task(puller.pull(1, LONG))
    await asyncio.sleep(0.05)
    world.down()
    await until(lambda: not bus.connected and not other.connected)
    await bus.publish(f"{world.region}.x", b"dropped")
    appending = asyncio.create_task(bus.append(key(world, "a"), b"2", expected_last_seq=first, timeout_s=LONG))
    await asyncio.sleep(0.02)
    world.up()
    assert await asyncio.wait_for(appending, 5) == first + 1
    await until(lambda: other.connected)
    third = await other.append(key(world, "a"), b"3", expected_last_seq=first + 1, timeout_s=S)
    async with asyncio.timeout(S):
        while int((await live.next(S)).headers["Nats-Sequence"]) != third:
            pass
    await other.append(f"{world.region}.lane.a", b"job", timeout_s=S)
    assert [one.data for one in await asyncio.wait_for(waiting, 5)] == [b"job"]
    entries = await bus.read(bucket(world).name, key(world, "a"), from_seq=1, most=9)
    assert [entry.data for entry in entries] == [b"1", b"2", b"3"]


async def test_while_down_a_wait_is_bounded(world):
    """With no server, calls raise BusTimeoutError at their deadline, a pull gives nothing, a publish is dropped."""
    bus = await world.bus()
    await bus.apply([lane(world)], [consumer(world)])
    puller = bus.puller(lane(world).name, "c")
    world.down()
    try:
        await until(lambda: not bus.connected)
        for call in (
            lambda: bus.append(f"{world.region}.lane.a", b"", timeout_s=0.05),
            lambda: bus.request(f"{world.region}.x", b"", timeout_s=0.05),
        ):
            with pytest.raises(BusTimeoutError):
                await call()
        assert await puller.pull(1, 0.05) == []
        await bus.publish(f"{world.region}.x", b"lost")
        assert bus.counts.published_dropped == 1
    finally:
        world.up()
    await until(lambda: bus.connected)
    inbox = await bus.subscribe(f"{world.region}.x")
    await bus.publish(f"{world.region}.x", b"kept")
    assert (await inbox.next(S)).data == b"kept"


async def test_an_append_in_flight_fails_with_its_connection(world):
    """An append that waits for its ack learns of a lost connection long before its own deadline."""
    bus = await world.bus()
    await bus.apply([bucket(world)], [])
    appends = [asyncio.create_task(bus.append(key(world, "a"), b"x", timeout_s=LONG)) for _ in range(200)]
    await asyncio.sleep(0)
    world.down()
    await until(lambda: not bus.connected)
    world.up()
    outcomes = await asyncio.wait_for(asyncio.gather(*appends, return_exceptions=True), 10)
    assert all(isinstance(outcome, int | BusTimeoutError) for outcome in outcomes)
    known = {outcome for outcome in outcomes if isinstance(outcome, int)}
    standing = {entry.seq for entry in await bus.read(bucket(world).name, key(world, "a"), from_seq=1, most=999)}
    assert known <= standing, "an acked entry is gone after a kill"


async def test_un_acked_deliveries_outlive_the_server(world):
    """What was held un-acked when the server died comes back after its ack wait."""
    bus, puller = await lane_with(world, [b"1", b"2"], ack_wait_s=0.5)
    held = await pull_all(puller, 2)
    await bus.ack(held[0].ack_subject)
    world.down()
    await until(lambda: not bus.connected)
    world.up()
    again = await puller.pull(2, 5.0)
    assert [(one.data, one.delivered > 1) for one in again] == [(b"2", True)]


async def test_a_memory_stream_is_lost_and_shows_it(world):
    """A memory stream is gone after the server died; made again, its `created` differs and places start at 1."""
    bus = await world.bus()
    spec = bucket(world, in_memory=True)
    await bus.apply([spec], [])
    for _ in range(3):
        await bus.append(key(world, "a"), b"x", timeout_s=S)
    created = await bus.stream_created_s(spec.name)
    world.down()
    await until(lambda: not bus.connected)
    world.up()
    await until(lambda: bus.connected)
    await bus.apply([spec], [])
    assert await bus.stream_created_s(spec.name) != created
    assert await bus.append(key(world, "a"), b"x", expected_last_seq=0, timeout_s=S) == 1
