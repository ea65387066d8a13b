"""The twin's own handles: an injected clock, lost messages, a lost client. Its semantics are in tests/contract."""

import asyncio

import pytest

from shared.bus import ConsumerSpec, StreamSpec
from shared.bus.memory import MemoryServer
from shared.bus.memory_streams import subject_matches
from shared.errors import BusTimeoutError

LANE = StreamSpec(name="LANE", subjects=("lane.>",), work_queue=True)
CONSUMER = ConsumerSpec("LANE", "c", "lane.a", ack_wait_s=2.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_an_injected_clock_rules_ack_wait_age_and_deduplication():
    """With the clock moved by hand, what waits on time happens at once and not before."""
    clock = Clock()
    server = MemoryServer(clock)
    bus = server.bus()
    await bus.apply([LANE, StreamSpec("KEPT", ("kept",), max_age_s=60.0, deduplication_s=10.0)], [CONSUMER])
    await bus.append("lane.a", b"1", timeout_s=1)
    puller = bus.puller("LANE", "c")
    assert [one.stored_s for one in await puller.pull(1, 1)] == [1000.0]
    waiting = asyncio.create_task(puller.pull(1, 60))
    clock.now_s += 1.9
    server.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.now_s += 0.2
    server.wake()
    assert [one.delivered for one in await asyncio.wait_for(waiting, 5)] == [2]
    first = await bus.append("kept", b"1", message_id="m", timeout_s=1)
    clock.now_s += 9.9
    assert await bus.append("kept", b"1", message_id="m", timeout_s=1) == first
    clock.now_s += 0.2
    assert await bus.append("kept", b"1", message_id="m", timeout_s=1) == first + 1
    clock.now_s += 50.0
    assert [entry.seq for entry in await bus.read("KEPT", "kept", from_seq=1, most=9)] == [first + 1]


async def test_lose_decides_which_messages_never_arrive():
    """Messages that `lose` picks reach nobody; streams keep what they captured all the same."""
    server = MemoryServer()
    bus = server.bus()
    await bus.apply([StreamSpec("KV_b", ("$KV.b.>",), history=9, republish_to="live.>")], [])
    inbox = await bus.subscribe("live.>")
    server.lose = lambda message: message.data == b"2"
    for data in (b"1", b"2", b"3"):
        await bus.append("$KV.b.a", data, timeout_s=1)
    assert [message.data for message in inbox.take_ready(9)] == [b"1", b"3"]
    assert len(await bus.read("KV_b", "$KV.b.a", from_seq=1, most=9)) == 3


async def test_one_client_may_lose_its_connection():
    """A disconnected client hears and says nothing; the others go on; afterwards it hears again."""
    server = MemoryServer()
    bus, other = server.bus(), server.bus()
    inbox, theirs = await bus.subscribe("x"), await other.subscribe("x")
    bus.disconnect()
    await bus.publish("x", b"dropped")
    await other.publish("x", b"unheard")
    with pytest.raises(BusTimeoutError):
        await bus.request("x", b"", timeout_s=0.01)
    asking = asyncio.create_task(bus.last("NONE", "x"))
    await asyncio.sleep(0)
    assert not asking.done()
    bus.reconnect()
    await other.publish("x", b"heard")
    assert [message.data for message in inbox.take_ready(9)] == [b"heard"]
    assert [message.data for message in theirs.take_ready(9)] == [b"unheard", b"heard"]
    assert (bus.counts.published_dropped, bus.counts.disconnects) == (1, 1)
    asking.cancel()
    await asyncio.wait([asking])


@pytest.mark.parametrize(
    ("pattern", "subject", "hit"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("*.b", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        (">", "a", True),
        ("a.>", "a", False),
        ("a.b", "a", False),
        ("a", "a.b", False),
    ],
)
def test_wildcards(pattern, subject, hit):
    """`*` is one token, a last `>` one or more."""
    assert subject_matches(pattern, subject) is hit
