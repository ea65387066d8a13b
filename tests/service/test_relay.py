"""The relay on the in-memory bus, seen by a gateway: what arrives is the log, whatever is lost, late or slow."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import structlog

from services.relay.service import RelayService
from services.relay.settings import RelaySettings
from shared import clock, ids
from shared.bus import BusMessage
from shared.bus.memory import MemoryServer
from shared.limits import LOG_AGE_S
from shared.log_store import LogStore
from shared.messages import (
    Accepted,
    Chunk,
    Credit,
    End,
    Entry,
    Frame,
    Open,
    OpenStream,
    Presence,
    QueueView,
    Refused,
    RelayAlive,
    RequestEcho,
    SequencedEntry,
    StreamOpened,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason, RefusalKind
from shared.subjects import Names
from shared.telemetry import Metrics
from shared.tiers import Tier
from shared.topology import topology

NAMES = Names("local")
PATIENCE_S = 20.0
_answer = decoder(StreamOpened | Refused)  # type: ignore[arg-type]
_frame = decoder(Frame)


class Region:
    """A bus, its token logs, and a writer of one reply at a time."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = self.server.bus()
        self.store = LogStore(self.bus, NAMES)
        self.written: dict[str, list[SequencedEntry]] = {}

    async def append(self, reply: str, entry: Entry) -> None:
        log = self.written.setdefault(reply, [])
        seq = await self.store.append(reply, log[-1].seq if log else 0, encode(entry))
        log.append(SequencedEntry(seq=seq, entry=entry))

    async def accept(self, reply: str) -> None:
        await self.append(
            reply,
            Accepted(
                reply_id=reply,
                org="o",
                user="u",
                created_s=clock.wall_s(),
                model="m",
                tier=Tier.FREE,
                budget=4096,
                seed=1,
                input_tokens=3,
                deadline_s=600.0,
                echo=RequestEcho(),
            ),
        )

    async def begin(self, tokens: int = 0) -> str:
        reply = clock.new_reply_id("local", 1)
        await self.accept(reply)
        await self.append(reply, Open(attempt=1, replica="r1", model_version="1", first_index=0))
        await self.tokens(reply, tokens)
        return reply

    async def tokens(self, reply: str, count: int) -> None:
        for _ in range(count):
            index = len(self.written[reply]) - 2
            await self.append(
                reply,
                Chunk(
                    attempt=1, first_index=index, ids=pack_ids([index]), text=f"{index} ", text_ends=(len(f"{index} "),)
                ),
            )

    async def end(self, reply: str) -> None:
        await self.append(reply, End(reason=EndReason.STOP_TOKEN, by="r1/1"))


class Client:
    """One stream as a gateway keeps it: numbered frames in, one credit back per frame while it reads."""

    def __init__(self, region: Region, stream_id: str) -> None:
        self.region, self.stream_id = region, stream_id
        self.items: list[SequencedEntry] = []
        self.frames: list[Frame] = []
        self.closing: str | None = None
        self.credit_subject = ""
        self.relay = ""
        self.opening: OpenStream | None = None

    async def open(self, reply: str, **fields) -> StreamOpened | Refused:
        self.inbox = await self.region.bus.subscribe(NAMES.frames("g1", self.stream_id))
        return await self.ask(reply, **fields)

    async def ask(self, reply: str, **fields) -> StreamOpened | Refused:
        inbox = NAMES.frames("g1", self.stream_id)
        request = OpenStream(reply_id=reply, stream_id=self.stream_id, inbox=inbox, **fields)
        answer = _answer.decode((await self.region.bus.request(NAMES.relay_open, encode(request))).data)
        if isinstance(answer, StreamOpened):
            self.credit_subject, self.relay = answer.credit_subject, answer.relay
        return answer

    async def take(self, *, credit: bool = True, timeout_s: float = PATIENCE_S) -> Frame:
        message = await self.inbox.next(timeout_s)
        assert message is not None, f"no frame for {self.stream_id} in time"
        frame = _frame.decode(message.data)
        self.frames.append(frame)
        assert frame.number == len(self.frames)
        assert frame.stream_id == self.stream_id
        self.items.extend(frame.entries)
        self.closing = frame.closing
        if credit:
            await self.credit(1)
        return frame

    async def credit(self, count: int) -> None:
        await self.region.bus.publish(self.credit_subject, encode(Credit(stream_id=self.stream_id, count=count)))

    async def leave(self) -> None:
        await self.region.bus.publish(self.credit_subject, encode(Credit(stream_id=self.stream_id, close=True)))

    async def until(self, done: Callable[["Client"], bool]) -> None:
        while not done(self):
            await self.take()

    async def until_closed(self) -> str | None:
        await self.until(lambda client: client.closing is not None)
        return self.closing


async def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


@asynccontextmanager
async def running(region: Region, name: str = "relay-1", **settings) -> AsyncIterator[RelayService]:
    bus = region.server.bus()
    log = structlog.get_logger()
    service = RelayService(RelaySettings(name=name, **settings), bus, LogStore(bus, NAMES), Metrics(), log)
    await service.start()
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for subscription in service._subscriptions.values():
            await subscription.close()
        await bus.close()
        assert task.cancelled() or task.exception() is None, task


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.bus.apply(*topology(NAMES, ["m"]))
    yield made
    await made.bus.close()


@pytest.fixture
async def relay(region: Region) -> AsyncIterator[RelayService]:
    async with running(region) as service:
        yield service


@pytest.fixture
async def hasty(region: Region) -> AsyncIterator[RelayService]:
    """A relay of little patience: presence at each tick, a client is slow after a fifth of a second."""
    async with running(region, presence_s=0.01, slow_reader_s=0.2) as service:
        yield service


async def test_catch_up_and_live_are_one_stream(region, relay):
    """A client that comes in the middle of a reply gets all of it, in order, and the word that it has ended."""
    reply = await region.begin(tokens=300)
    client = Client(region, "s1")
    await client.open(reply)
    for _ in range(30):
        await region.tokens(reply, 1)
        await client.take()
    await region.end(reply)
    assert await client.until_closed() == "ended"
    assert client.items == region.written[reply]


async def test_lost_live_messages_are_fetched(region, relay):
    """Two of three live entries are lost: the reader still gets every entry once, in order, the last one too."""
    count = 0

    def lose(message: BusMessage) -> bool:
        nonlocal count
        if not message.subject.startswith("local.live."):
            return False
        count += 1
        return count % 3 != 0

    region.server.lose = lose
    reply = await region.begin(tokens=1)
    client = Client(region, "s1")
    await client.open(reply)
    await region.tokens(reply, 50)
    await region.end(reply)
    assert await client.until_closed() == "ended"
    assert client.items == region.written[reply]


async def test_without_credits_a_client_gets_no_more_than_its_window(region, relay):
    """A client that returns nothing holds a bounded few frames; with its credits back, the rest comes in one."""
    reply = await region.begin()
    client = Client(region, "s1")
    await client.open(reply, credits=4)
    quick = Client(region, "s2")
    await quick.open(reply)
    for _ in range(60):
        await region.tokens(reply, 1)
        await quick.take()
    for _ in range(4):
        await client.take(credit=False)
    assert client.inbox.take_ready(10) == []
    await client.credit(4)
    frame = await client.take()
    assert client.items == region.written[reply]
    assert len(frame.entries) > 40


async def test_a_slow_reader_is_dropped_and_the_others_are_not(region, hasty):
    """A client that takes nothing while there is something to send is told `slow`; its neighbour goes on."""
    reply = await region.begin()
    slow, quick = Client(region, "slow"), Client(region, "quick")
    await slow.open(reply, credits=1)
    await quick.open(reply)
    await slow.take(credit=False)
    await quick.take()
    await region.tokens(reply, 5)
    last = await slow.take(credit=False)
    assert (last.closing, last.entries) == ("slow", ())
    await region.end(reply)
    assert await quick.until_closed() == "ended"
    assert quick.items == region.written[reply]


async def test_a_thousand_streams_of_one_reply_share_one_follower(region, relay):
    """Fan-out: a thousand clients get the same whole log, from one subscription and one catch-up."""
    reply = await region.begin(tokens=20)
    clients = [Client(region, f"s{i}") for i in range(1000)]
    for client in clients:
        assert isinstance(await client.open(reply), StreamOpened)
    assert (len(relay._streams), len(relay._fanout)) == (1000, 1)
    assert relay._store.counts.fetches < 100  # one, and one for each quiet second of a slow machine
    await region.tokens(reply, 20)
    await region.end(reply)
    for client in clients:
        assert await client.until_closed() == "ended"
        assert client.items == region.written[reply]
    assert (len(relay._streams), relay._streams.replies) == (0, 0)


async def test_a_stream_opened_again_elsewhere_goes_on_where_it_was(region):
    """The relay dies; another one, told what the gateway has, sends exactly the rest."""
    reply = await region.begin(tokens=10)
    client = Client(region, "s1")
    async with running(region, "relay-1"):
        await client.open(reply)
        await client.until(lambda c: len(c.items) == len(region.written[reply]))
    await region.tokens(reply, 10)
    again = Client(region, "s2")
    async with running(region, "relay-2"):
        await again.open(reply, after_seq=client.items[-1].seq)
        await region.end(reply)
        assert await again.until_closed() == "ended"
    assert client.items + again.items == region.written[reply]
    assert again.relay != client.relay


async def test_a_restarted_relay_has_another_name(region):
    """Streams of the process before are lost, so its name must not seem alive."""
    async with running(region) as first, running(region) as second:
        assert first.relay != second.relay


async def test_draining_sends_clients_elsewhere(region):
    """A relay that leaves closes each stream as `draining`, takes no opens, and another one goes on."""
    reply = await region.begin(tokens=5)
    async with running(region, "relay-1") as leaving:
        client = Client(region, "s1")
        await client.open(reply)
        await client.until(lambda c: len(c.items) == len(region.written[reply]))
        async with running(region, "relay-2"):
            await leaving.drain(5.0)
            assert await client.until_closed() == "draining"
            again = Client(region, "s2")
            answer = await again.open(reply, after_seq=client.items[-1].seq)
            assert isinstance(answer, StreamOpened)
            assert answer.relay.startswith("relay-2")


@pytest.mark.parametrize(("age_s", "kind"), [(0.0, RefusalKind.NOT_FOUND), (2 * LOG_AGE_S, RefusalKind.GONE)])
async def test_a_log_that_is_not_there_is_refused(region, relay, age_s, kind):
    """Never accepted and expired are two answers, told apart by the age of the id; nothing stays behind."""
    reply = ids.reply_id("local", 1, int((clock.wall_s() - age_s) * 1000), b"0123456789")
    answer = await Client(region, "s1").open(reply)
    assert isinstance(answer, Refused)
    assert answer.refusal.kind is kind
    await eventually(lambda: relay._streams.replies == 0 and len(relay._fanout) == 0, "the follower is gone")


async def test_what_is_no_reply_of_this_region_is_not_found(region, relay):
    """A foreign region's id and plain nonsense are refused without a look."""
    for reply in ("nonsense", clock.new_reply_id("mars", 0), "resp_>"):
        answer = await Client(region, "s1").open(reply)
        assert isinstance(answer, Refused)
        assert answer.refusal.kind is RefusalKind.NOT_FOUND


async def test_a_purged_log_closes_its_streams_as_gone(region, relay):
    """When the log is deleted under a reader, the reader is told, not left to wait."""
    reply = await region.begin(tokens=3)
    client = Client(region, "s1")
    await client.open(reply)
    await client.until(lambda c: len(c.items) == 5)
    await region.store.purge(reply)
    assert await client.until_closed() == "gone"


async def test_presence_is_said_once_per_reply_while_somebody_is_attached(region, hasty):
    """One presence message per reply and period, however many clients; none for streams that are no person's."""
    heard = await region.bus.subscribe(NAMES.presence("*"))
    watched, unwatched = await region.begin(), await region.begin()
    for number in range(5):
        await Client(region, f"a{number}").open(watched)
    await Client(region, "b").open(unwatched, presence=False)
    heard.take_ready(100)
    alive = await region.bus.subscribe(NAMES.relay_alive)
    for _ in range(3):
        assert await alive.next(PATIENCE_S) is not None
    said = [decoder(Presence).decode(message.data).reply_id for message in heard.take_ready(100)]
    assert set(said) == {watched}
    assert 2 <= len(said) <= 4  # one a tick, not five


async def test_presence_stops_when_the_last_client_leaves(region, hasty):
    """Closing the last stream stops presence and the follower."""
    reply = await region.begin()
    client = Client(region, "s1")
    await client.open(reply)
    await client.leave()
    await eventually(lambda: hasty._streams.replies == 0 and len(hasty._fanout) == 0, "nothing is followed")
    heard = await region.bus.subscribe(NAMES.presence("*"))
    alive = await region.bus.subscribe(NAMES.relay_alive)
    for _ in range(2):
        assert await alive.next(PATIENCE_S) is not None
    assert heard.take_ready(10) == []


async def test_waiting_clients_hear_their_place_and_an_honest_wait(region, relay):
    """A router's view becomes position and ETA for those who wait, and nothing for those who run."""
    waiting, runs = clock.new_reply_id("local", 0), await region.begin()
    await region.accept(waiting)
    queued, running_client = Client(region, "q"), Client(region, "r")
    await queued.open(waiting)
    await running_client.open(runs)
    await queued.take()
    await running_client.take()
    view = QueueView(
        router="router-1", tier=Tier.FREE, model="m", waiting=3, served_per_s=0.5, reply_ids=(runs, "resp_x", waiting)
    )
    await region.bus.publish(NAMES.queue(Tier.FREE, "m"), encode(view))
    notice = (await queued.take()).notice
    assert notice is not None
    assert (notice.kind, notice.position, notice.eta_s) == ("queued", 3, 6.0)
    assert running_client.inbox.take_ready(10) == []


async def test_a_relay_says_that_it_is_alive(region, relay):
    """`RelayAlive` carries the name that streams were opened under."""
    alive = await region.bus.subscribe(NAMES.relay_alive)
    message = await alive.next(PATIENCE_S)
    assert message is not None
    assert decoder(RelayAlive).decode(message.data).relay == relay.relay


async def test_a_full_relay_refuses(region):
    """Past its bound a relay says so at once; the streams it has are untouched."""
    async with running(region, streams_max=2):
        reply = await region.begin()
        answers = [await Client(region, f"s{i}").open(reply) for i in range(3)]
        assert [isinstance(answer, StreamOpened) for answer in answers] == [True, True, False]
        assert isinstance(answers[2], Refused)
        assert answers[2].refusal.kind is RefusalKind.UNAVAILABLE


async def test_the_same_open_twice_leaves_one_stream(region, relay):
    """An open that came twice, as a retried request may, is answered again and begins nothing anew."""
    reply = await region.begin(tokens=3)
    client = Client(region, "s1")
    await client.open(reply)
    await client.until(lambda c: len(c.items) == 5)
    assert isinstance(await client.ask(reply), StreamOpened)
    await region.tokens(reply, 1)
    await client.until(lambda c: len(c.items) == 6)  # take() holds that frames are numbered on
    assert (len(relay._streams), len(relay._fanout)) == (1, 1)


async def test_garbage_is_counted_and_harms_nobody(region, relay):
    """Undecodable messages on its subjects do not stop a relay."""
    for subject in (NAMES.relay_open, NAMES.credit(relay.relay), NAMES.queue(Tier.FREE, "m")):
        await region.bus.publish(subject, b"\xc1 not msgpack")
    reply = await region.begin()
    assert isinstance(await Client(region, "s1").open(reply), StreamOpened)


async def test_after_the_bus_was_away_gateways_open_again(region, relay):
    """Frames may have been lost, however short the loss was: every stream is closed as `draining`."""
    reply = await region.begin(tokens=2)
    client = Client(region, "s1")
    await client.open(reply)
    await client.until(lambda c: len(c.items) == 4)
    region.server.stop()
    region.server.start()
    assert await client.until_closed() == "draining"
