"""Token logs on the bus, on a real nats-server and on the twin: races, cancels, followers, lost messages, restarts."""

import asyncio
import random

import pytest

from shared import clock
from shared.errors import (
    BusTimeoutError,
    LogGoneError,
    StreamFullError,
    TokenLogError,
    WrongLastSequenceError,
)
from shared.limits import FOLLOW_INBOX_MAX, KIB
from shared.log_store import LogStore
from shared.messages import Accepted, Chunk, End, Open, RequestEcho, encode
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import LogWriter, WriterState
from shared.topology import log_bucket
from tests.contract.conftest import until

S = 2.0
SHARD = 1
STOP = End(reason=EndReason.USER_STOP, by="canceller")
DONE = End(reason=EndReason.STOP_TOKEN, by="r1")


class Log:
    """One reply's log in a world, with stores for as many parties as a test wants."""

    def __init__(self, world) -> None:
        self.world = world
        self.reply = clock.new_reply_id(world.region, SHARD)
        self.seq = 0

    async def store(self, wrap=lambda bus: bus) -> LogStore:
        return LogStore(wrap(await self.world.bus()), self.world.names)

    async def declare(self, **changes):
        spec = log_bucket(self.world.names, SHARD)
        bus = await self.world.bus()
        await bus.apply([type(spec)(**{**vars(spec), **changes})], [])

    async def accept(self, store):
        entry = Accepted(
            reply_id=self.reply,
            org="o",
            user="u",
            created_s=1.0,
            model="m",
            tier=Tier.FREE,
            budget=4096,
            seed=1,
            input_tokens=3,
            deadline_s=60.0,
            echo=RequestEcho(),
        )
        return await store.append(self.reply, 0, encode(entry))

    async def open(self, store, attempt=1, replica="r1", after=None, first_index=0) -> LogWriter:
        """An `open` entry, and the writer it gives the right to write."""
        after = (await store.last(self.reply)).seq if after is None else after
        entry = Open(attempt=attempt, replica=replica, model_version="1", first_index=first_index)
        seq = await store.append(self.reply, after, encode(entry))
        return LogWriter(attempt=attempt, open_seq=seq, first_index=first_index)

    async def opened(self) -> tuple[LogStore, LogWriter]:
        """A declared bucket with an accepted and opened log."""
        await self.declare()
        store = await self.store()
        await self.accept(store)
        return store, await self.open(store)

    async def write(self, store, writer, count, first=0, interval_s=None) -> WriterState:
        """`count` chunks of one token each, as fast as the bus takes them or at an interval."""
        for number in range(first, first + count):
            writer.offer([number], [f"{number} "])
            if await store.append_writer(self.reply, writer) is not WriterState.WRITING:
                break
            if interval_s is not None:
                await asyncio.sleep(interval_s)
        return writer.state


@pytest.fixture
def log(world):
    return Log(world)


class Wrapped:
    """A bus that passes everything on; tests override what should go wrong."""

    def __init__(self, bus) -> None:
        self.bus = bus

    def __getattr__(self, name):
        return getattr(self.bus, name)


class LostAnswers(Wrapped):
    """Appends and reads whose answer, or whose request, is lost as `plan` says: one letter per call.

    `.` answered   `a` done, answer lost   `r` never arrived
    """

    def __init__(self, bus, plan: str) -> None:
        super().__init__(bus)
        self.plan = list(plan)

    async def _through(self, call):
        step = self.plan.pop(0) if self.plan else "."
        if step == "r":
            call.close()
            raise BusTimeoutError("the request was lost")
        done = await call
        if step == "a":
            raise BusTimeoutError("the answer was lost")
        return done

    async def append(self, *args, **kwargs):
        return await self._through(self.bus.append(*args, **kwargs))

    async def last(self, *args):
        return await self._through(self.bus.last(*args))

    async def read(self, *args, **kwargs):
        return await self._through(self.bus.read(*args, **kwargs))


class LossyLive(Wrapped):
    """A bus whose subscriptions lose messages."""

    def __init__(self, bus, lose) -> None:
        super().__init__(bus)
        self.lose = lose

    async def subscribe(self, *args, **kwargs):
        inbox = await self.bus.subscribe(*args, **kwargs)
        put = inbox.put
        inbox.put = lambda message: None if self.lose(message) else put(message)
        return inbox


async def collect(follower):
    async with follower:
        return [item async for item in follower]


# --- writing ------------------------------------------------------------------------------------------------


async def test_a_log_is_read_as_it_was_written(log):
    """accepted, open, chunks, end: read back whole, in order, with text, usage and its last entry."""
    store, writer = await log.opened()
    writer.offer([5, 6], ["Hel", "lo"], cached_tokens=2)
    assert await store.append_writer(log.reply, writer) is WriterState.WRITING
    await log.write(store, writer, 600, first=7)
    writer.finish(DONE)
    assert await store.append_writer(log.reply, writer) is WriterState.ENDED
    assert await store.append_writer(log.reply, writer) is WriterState.ENDED  # nothing left to say
    view = await store.read(log.reply)
    assert view.text == "Hello" + "".join(f"{n} " for n in range(7, 607))
    assert (view.ids[:3], view.usage.output_tokens, view.usage.cached_tokens) == ([5, 6, 7], 602, 2)
    assert (await store.last(log.reply)).entry == DONE == view.ended
    entries = await store.read_entries(log.reply)
    assert [item.seq for item in entries] == sorted(item.seq for item in entries)
    assert await store.read_entries(log.reply, entries[-3].seq) == entries[-2:]


async def test_an_unknown_log_is_empty(log):
    """What was never accepted reads as empty; what is not a reply id of the region is a ValueError."""
    await log.declare()
    store = await log.store()
    view = await store.read(log.reply)
    assert (view.accepted, view.last_seq, await store.last(log.reply)) == (None, 0, None)
    for wrong in ("resp_x", clock.new_reply_id("elsewhere", SHARD), "*"):
        with pytest.raises(ValueError, match="is not a reply"):
            await store.read(wrong)


async def test_of_two_writers_of_one_attempt_one_is_replaced(log):
    """Two replicas given the same right (a dispatch told twice): one writes on, the other is refused and drops."""
    one, writer = await log.opened()
    other = await log.store()
    twin = LogWriter(attempt=1, open_seq=writer._expected, first_index=0)
    writer.offer([1], ["a"])
    twin.offer([2], ["b"])
    states = await asyncio.gather(one.append_writer(log.reply, writer), other.append_writer(log.reply, twin))
    assert sorted(state.value for state in states) == ["replaced", "writing"]
    assert (await one.read(log.reply)).text == ("a" if writer.state is WriterState.WRITING else "b")
    assert one.counts.refused + other.counts.refused == 1


async def test_a_replaced_writer_is_refused(log):
    """After a second `open` the first writer's next append is refused, whenever it comes; the new one goes on."""
    store, writer = await log.opened()
    await log.write(store, writer, 3)
    second = await log.open(await log.store(), attempt=2, replica="r2", first_index=3)
    assert await log.write(store, writer, 1, first=666) is WriterState.REPLACED
    await log.write(store, second, 2, first=3)
    assert writer.next_append() is None
    view = await store.read(log.reply)
    assert (view.ids, view.attempts) == ([0, 1, 2, 3, 4], 2)


@pytest.mark.parametrize("plan", ["a", "r", "aa", "ra", "arar", "a.ra"])
async def test_lost_answers_repeat_and_lose_nothing(log, plan):
    """Whether a request or its answer is lost: the same bytes go again, and the log holds each token once."""
    store, writer = await log.opened()
    flaky = await log.store(lambda bus: LostAnswers(bus, plan))
    assert await log.write(flaky, writer, 4) is WriterState.WRITING
    writer.finish(DONE)
    assert await flaky.append_writer(log.reply, writer) is WriterState.ENDED
    view = await store.read(log.reply)
    assert (view.ids, view.ended) == ([0, 1, 2, 3], DONE)


async def test_a_writer_whose_deadline_passed_goes_on_later(log):
    """Past its deadline the append stays in flight; the next call brings it to its outcome."""
    store, writer = await log.opened()
    flaky = await log.store(lambda bus: LostAnswers(bus, "aaaaaaaa"))
    writer.offer([1], ["a"])
    with pytest.raises(BusTimeoutError):
        await flaky.append_writer(log.reply, writer, deadline_s=0.0)
    assert writer.in_flight is not None
    assert await store.append_writer(log.reply, writer) is WriterState.WRITING
    assert (await store.read(log.reply)).ids == [1]


async def test_a_full_bucket_is_said_and_survived(log):
    """A full bucket raises StreamFullError with the append kept; when there is room it goes on, byte-identical."""
    await log.declare(max_bytes=8 * KIB)
    store = await log.store()
    await log.accept(store)
    writer = await log.open(store)
    other = Log(log.world)
    await other.accept(store)
    padding = await other.open(store)
    with pytest.raises(StreamFullError):
        for number in range(100):
            padding.offer([number], ["x" * 500])
            await store.append_writer(other.reply, padding, deadline_s=0.0)
    writer.offer([1], ["y" * 600])
    with pytest.raises(StreamFullError):
        await store.append_writer(log.reply, writer, deadline_s=0.15)
    going_on = asyncio.create_task(store.append_writer(log.reply, writer))
    await store.purge(other.reply)
    assert await asyncio.wait_for(going_on, S) is WriterState.WRITING
    assert (await store.read(log.reply)).ids == [1]


# --- ending -------------------------------------------------------------------------------------------------


async def test_a_canceller_against_a_writer(log):
    """A canceller ends the log under a busy writer: one end, the writer replaced, all acked tokens before it.

    (The chunk interval is what lets it in: it needs two round trips between two appends.)
    """
    store, writer = await log.opened()
    writing = asyncio.create_task(log.write(store, writer, 100_000, interval_s=0.002))
    await until(lambda: writer.appended > 20)
    view = await (await log.store()).end(log.reply, STOP)
    assert await asyncio.wait_for(writing, S) is WriterState.REPLACED
    standing = await store.read(log.reply)
    assert standing.ended == view.ended == STOP
    assert standing.ids == view.ids == list(range(writer.appended))


async def test_of_many_enders_all_see_the_same_end(log):
    """Cancellers and the writer's own end race: one end stands, and everybody reports that one."""
    store, writer = await log.opened()
    await log.write(store, writer, 3)
    writer.finish(DONE)
    ends = [End(reason=reason, by="c") for reason in (EndReason.USER_STOP, EndReason.IDLE, EndReason.SUPERSEDED)]
    stores = [await log.store() for _ in ends]
    views = await asyncio.gather(
        *(one.end(log.reply, end) for one, end in zip(stores, ends, strict=True)),
        store.append_writer(log.reply, writer),
    )
    standing = (await store.read(log.reply)).ended
    assert [view.ended for view in views[:3]] == [standing] * 3
    assert writer.state is (WriterState.ENDED if standing == DONE else WriterState.REPLACED)
    assert (await store.end(log.reply, STOP)).ended == standing  # again, later: nothing changes
    assert len(await store.read_entries(log.reply)) == 6


@pytest.mark.parametrize("plan", ["r", ".a", ".r", ".a.r", "r.ar"])
async def test_an_end_with_lost_answers_stands_once(log, plan):
    """A canceller that loses answers reads again and again until an `end` stands; it never writes two."""
    store, writer = await log.opened()
    await log.write(store, writer, 2)
    flaky = await log.store(lambda bus: LostAnswers(bus, plan))
    view = await flaky.end(log.reply, STOP)
    assert (view.ended, view.ids) == (STOP, [0, 1])
    assert len(await store.read_entries(log.reply)) == 5


async def test_an_end_is_bounded_by_its_deadline(log):
    """Without answers a canceller gives up at its deadline with BusTimeoutError."""
    await log.opened()
    flaky = await log.store(lambda bus: LostAnswers(bus, "r" * 100_000))
    with pytest.raises(BusTimeoutError):
        await flaky.end(log.reply, STOP, deadline_s=0.05)


async def test_what_was_never_accepted_cannot_end(log):
    """Ending an unknown reply is a TokenLogError, and writes nothing."""
    await log.declare()
    store = await log.store()
    with pytest.raises(TokenLogError):
        await store.end(log.reply, STOP)
    assert await store.last(log.reply) is None


# --- what is gone or broken ---------------------------------------------------------------------------------


async def test_a_log_without_its_head_is_gone(log):
    """When history overflow took the head, reading, ending and following say LogGoneError."""
    await log.declare(history=6)
    store = await log.store()
    await log.accept(store)
    writer = await log.open(store)
    await log.write(store, writer, 8)
    calls = (
        lambda: store.read(log.reply),
        lambda: store.end(log.reply, STOP),
        lambda: collect(store.follow(log.reply)),
    )
    for call in calls:
        with pytest.raises(LogGoneError):
            await asyncio.wait_for(call(), S)


async def test_an_undecodable_entry_is_an_error_and_counted(log):
    """Bytes that are no entry: readers and followers raise TokenLogError, and it is counted."""
    store, writer = await log.opened()
    await log.write(store, writer, 1)
    last = await store.last(log.reply)
    await store.append(log.reply, last.seq, b"\xc1 not msgpack")
    calls = (
        lambda: store.read(log.reply),
        lambda: store.last(log.reply),
        lambda: collect(store.follow(log.reply)),
    )
    for call in calls:
        with pytest.raises(TokenLogError, match="cannot be read"):
            await asyncio.wait_for(call(), S)
    assert store.counts.undecodable == 3


async def test_a_purged_log_ends_its_followers(log):
    """A follower of a log that is removed learns LogGoneError instead of waiting for ever."""
    store, writer = await log.opened()
    await log.write(store, writer, 3)
    follower = store.follow(log.reply)
    for _ in range(5):
        await anext(follower)
    await store.purge(log.reply)
    with pytest.raises(LogGoneError):
        await asyncio.wait_for(anext(follower), 6)


# --- following ----------------------------------------------------------------------------------------------


async def test_followers_see_every_entry_once_in_order(log):
    """Followers that start before, during and after the writing, from any place, see the same log, and stop at its end."""
    await log.declare()
    store = await log.store()
    early = asyncio.create_task(collect(store.follow(log.reply)))
    await asyncio.sleep(0)
    await log.accept(store)
    writer = await log.open(store)
    during = []
    for number in range(0, 60, 20):
        await log.write(store, writer, 20, first=number)
        during.append(asyncio.create_task(collect((await log.store()).follow(log.reply))))
    writer.finish(DONE)
    await store.append_writer(log.reply, writer)
    entries = await store.read_entries(log.reply)
    assert len(entries) == 63
    for following in (early, *during):
        assert await asyncio.wait_for(following, S) == entries
    assert await collect(store.follow(log.reply)) == entries
    assert await collect(store.follow(log.reply, entries[30].seq)) == entries[31:]


@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
async def test_lost_live_messages_are_fetched(log, share):
    """Whatever share of live messages is lost, the last one included, a follower has the whole log in order."""
    draw = random.Random(7)
    store, writer = await log.opened()
    lossy = await log.store(lambda bus: LossyLive(bus, lambda _: draw.random() < share))
    following = asyncio.create_task(collect(lossy.follow(log.reply)))
    for number in range(40):
        await log.write(store, writer, 1, first=number)
        await asyncio.sleep(0.001)
    writer.finish(DONE)
    await store.append_writer(log.reply, writer)
    assert await asyncio.wait_for(following, 10) == await store.read_entries(log.reply)


async def test_a_follower_waits_for_a_bus_that_does_not_answer(log):
    """A follower whose catch-up gets no answer asks again, and still has the whole log in order."""
    store, writer = await log.opened()
    await log.write(store, writer, 3)
    writer.finish(DONE)
    await store.append_writer(log.reply, writer)
    flaky = await log.store(lambda bus: LostAnswers(bus, "ra"))
    assert await asyncio.wait_for(collect(flaky.follow(log.reply)), 6) == await store.read_entries(log.reply)
    assert flaky.counts.fetches == 3


async def test_a_follower_that_stalls_catches_up(log):
    """A follower that takes nothing while its inbox overflows still gets each entry once, in order."""
    store, writer = await log.opened()
    reader = await log.store()
    follower = reader.follow(log.reply)
    first = await anext(follower)
    await log.write(store, writer, FOLLOW_INBOX_MAX * 2)
    writer.finish(DONE)
    await store.append_writer(log.reply, writer)
    rest = await asyncio.wait_for(collect(follower), S)
    assert [first, *rest] == await store.read_entries(log.reply)
    assert reader.counts.live_lost > 0


async def test_ready_entries_come_as_one_batch(log):
    """A reader that is behind takes what is here at once, in order, without waiting."""
    store, writer = await log.opened()
    follower = store.follow(log.reply)
    got = [await anext(follower), await anext(follower)]
    await log.write(store, writer, 30)
    await asyncio.sleep(0.05)
    got.append(await anext(follower))
    got += follower.take_ready(20)
    assert len(got) == 23
    got += follower.take_ready(20)
    assert got == await store.read_entries(log.reply)
    assert follower.take_ready(20) == []
    await follower.aclose()


async def test_a_reader_may_look_away(log):
    """Cancelled waits on a follower lose nothing: the next one goes on where it was."""
    store, writer = await log.opened()
    writing = asyncio.create_task(log.write(store, writer, 150))
    follower = store.follow(log.reply)
    got = []
    async with asyncio.timeout(10):
        for turn in range(100_000):
            waiting = asyncio.create_task(anext(follower))
            for _ in range(turn % 7):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                got.append(waiting.result())
            if writing.done():
                break
            await asyncio.sleep(0)
        writer.finish(DONE)
        await store.append_writer(log.reply, writer)
        got += [item async for item in follower]
    assert got == await store.read_entries(log.reply)


async def test_a_follower_leaves_nothing_behind(memory_world):
    """After the end, after an error and after aclose a follower's subscription is closed."""
    log = Log(memory_world)
    store, writer = await log.opened()
    bus = store._bus
    await log.write(store, writer, 2)
    left = store.follow(log.reply)
    await anext(left)
    ended = asyncio.create_task(collect(store.follow(log.reply)))
    await until(lambda: len(bus._inboxes) == 2)
    await left.aclose()
    assert [item async for item in left] == []
    writer.finish(DONE)
    await store.append_writer(log.reply, writer)
    await asyncio.wait_for(ended, S)
    assert bus._inboxes == set()


async def test_a_restart_under_a_follower_and_a_writer(log):
    """The server is killed twice while a reply streams: no token is lost, repeated or reordered for either side."""
    store, writer = await log.opened()
    reader = await log.store()
    following = asyncio.create_task(collect(reader.follow(log.reply)))

    async def write():
        for number in range(150):
            await log.write(store, writer, 1, first=number)
            await asyncio.sleep(0.004)
        writer.finish(DONE)
        return await store.append_writer(log.reply, writer)

    writing = asyncio.create_task(write())
    for mark in (30, 90):
        await until(lambda mark=mark: writer.appended > mark)
        log.world.down()
        await until(lambda: not store._bus.connected and not reader._bus.connected)
        log.world.up()
    assert await asyncio.wait_for(writing, 15) is WriterState.ENDED
    entries = await asyncio.wait_for(following, 15)
    assert entries == await store.read_entries(log.reply)
    assert [item.entry.first_index for item in entries if isinstance(item.entry, Chunk)] == list(range(150))


async def test_a_lost_bucket_is_seen_by_its_follower(log):
    """When a memory bucket is lost and made again, a follower learns LogGoneError, a stale writer is refused."""
    await log.declare(in_memory=True)
    store = await log.store()
    await log.accept(store)
    writer = await log.open(store)
    await log.write(store, writer, 3)
    follower = store.follow(log.reply)
    for _ in range(5):
        await anext(follower)
    log.world.down()
    await until(lambda: not store._bus.connected)
    log.world.up()
    await log.declare(in_memory=True)
    with pytest.raises(LogGoneError):
        await asyncio.wait_for(anext(follower), 8)
    with pytest.raises(WrongLastSequenceError):
        await store.append(log.reply, writer._expected, b"x")
    assert await log.write(store, writer, 1) is WriterState.REPLACED
