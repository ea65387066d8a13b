"""Following replies through relays: frames in order, credits back, and another relay when one is lost.

    frames.<gateway>.*  ──one subscription──> by stream id ──> a bounded inbox per stream ──next()──> Batch
    relay.alive         ──> who lives         │
    tick                ──> relay dead, bus back, frames dropped: the stream is *lost*, and opens again
                                              │
    relay.open  <── OpenStream after_seq ─────┘        credit.<relay> <── written(), close()

A stream is lost when a frame number is missing, its relay falls silent or leaves, frames were dropped on the way, or
nothing came for long (the last frame may be the one that was lost). It then opens under a new id after the last entry
it has, so nothing is missed and late frames hit nobody.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from services.gateway.http import unavailable
from services.gateway.lives import ROUND_S, Lives
from shared import clock
from shared.bus import Bus, Subscription
from shared.errors import BusError, BusTimeoutError, ChorusError, NoRespondersError
from shared.limits import (
    GATEWAY_FRAMES_MAX,
    GATEWAY_STREAMS_MAX,
    LOG_MISSING_S,
    LOOP_LAG_S_MAX,
    RELAY_ALIVE_S,
    RELAY_GONE_S,
    RELAY_OPEN_S,
    RELAY_TRY_S,
    SSE_PING_S,
    STREAM_CREDITS,
)
from shared.messages import (
    Credit,
    Frame,
    Notice,
    OpenStream,
    Refused,
    RelayAlive,
    SequencedEntry,
    StreamOpened,
    decoder,
    encode,
)
from shared.outcomes import RefusalKind
from shared.subjects import Names
from shared.telemetry import Log, Metrics

_INBOX_FRAMES_MAX = STREAM_CREDITS  # a relay sends no more than the window; the rest is slack for closings
QUIET_S = SSE_PING_S  # a stream with nothing new for this long is asked for again
_STREAM_ID_BYTES = 8
_WINDOW = STREAM_CREDITS // 2  # frames in flight: at the shortest chunk interval still a third of a second
_LET_GO_MAX = 8192

T = TypeVar("T")
_frame = decoder(Frame)
_alive = decoder(RelayAlive)
_opened: msgspec.msgpack.Decoder[StreamOpened | Refused] = msgspec.msgpack.Decoder(StreamOpened | Refused)


class RelayGoneError(ChorusError):
    """No relay could be had for RELAY_GONE_S."""


@dataclass
class Batch:
    """What came since the last one: entries in order, the newest notice, and why nothing more comes."""

    items: list[SequencedEntry] = field(default_factory=list)
    notice: Notice | None = None
    frames: int = 0
    closing: str | None = None  # ended | gone


class ReplyStream:
    """One client's stream of one reply, over as many relays as it takes."""

    def __init__(self, relays: "Relays", reply_id: str, *, presence: bool) -> None:
        self.reply_id = reply_id
        self.relay = ""
        self.reopened = 0
        self._relays = relays
        self._presence = presence
        self._id = ""
        self._credit_subject = ""
        self._last_seq = 0
        self._next_number = 1
        self._owed = 0  # frames written since the last credit
        self._inbox: deque[bytes] = deque()
        self._lost: str | None = "new"  # why it must be opened (again); "closed": never
        self._doubt: str | None = None
        self._tries = 0
        self._gone_s: float | None = None
        self._lost_s = self._news_s = clock.now_s()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float) -> Batch | None:
        """The next batch, or None after `timeout_s`. Raises RelayGoneError when no relay can be had."""
        until = clock.now_s() + timeout_s
        while True:
            batch = await self._open() if self._lost is not None else self._take()
            if batch is not None:
                return batch
            if self._lost is None and self._inbox:
                continue  # frames that overtook the answer to the open: they woke nobody, and may be the last
            now = clock.now_s()
            left = until - now
            if self._lost is None and now - self._news_s > QUIET_S:
                self.lose("quiet")  # a last frame that was lost shows no gap
            elif left <= 0:
                return None
            elif self._lost is None:
                await self._wait(min(left, self._news_s + QUIET_S - now + 0.001))
            elif self._tries:
                await asyncio.sleep(min(left, RELAY_TRY_S * (0.5 + clock.random_unit())))

    def written(self, frames: int) -> None:
        """So many frames are with the client: the relay may send as many more."""
        self._owed += frames
        if 2 * self._owed >= _WINDOW and self._lost is None:
            self._relays.say(self._credit_subject, Credit(stream_id=self._id, count=self._owed))
            self._owed = 0

    async def start_over(self) -> bool:
        """After `gone`: the log may be written anew, so follow it from its first entry; False when it took too long."""
        await asyncio.sleep(RELAY_TRY_S)
        now = clock.now_s()
        self._gone_s = self._gone_s or now
        if now - self._gone_s > RELAY_GONE_S:
            return False
        self._lost, self._lost_s, self._last_seq = "gone", now, 0
        return True

    def close(self) -> None:
        """The client has all, or has left. Idempotent, and never waits."""
        self._leave(tell=self._lost is None)
        self._lost = "closed"

    # --- called by Relays ------------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        if len(self._inbox) >= _INBOX_FRAMES_MAX:
            self.lose("overflow")
            return
        self._inbox.append(data)
        self._wake()

    def lose(self, why: str) -> None:
        """What comes from now on is not to be trusted to be whole: open again."""
        if self._lost is None:
            self._leave(tell=True)
            self._lost, self._lost_s, self._tries, self.relay = why, clock.now_s(), 0, ""
            self._wake()
        else:
            self._doubt = why  # while opening: what was on its way may be lost too

    # --- inside ----------------------------------------------------------------------------------------------

    def _take(self) -> Batch | None:
        """All that is here, as far as the frame numbers are whole."""
        if not self._inbox:
            return None
        batch = Batch()
        while self._inbox and batch.closing is None:
            frame = self._relays.read_frame(self._inbox.popleft())
            if frame is None:
                self.lose("unreadable")
                break
            if frame.number != self._next_number:
                if frame.number > self._next_number:
                    self.lose("gap")
                    break
                continue
            self._next_number += 1
            batch.frames += 1
            self._keep(batch, frame)
        if not batch.frames:
            return None
        self._news_s = clock.now_s()
        if self.relay:
            self._relays.heard(self.relay)
        return batch

    def _keep(self, batch: Batch, frame: Frame) -> None:
        for item in frame.entries:
            if item.seq > self._last_seq:
                self._last_seq = item.seq
                batch.items.append(item)
        batch.notice = frame.notice or batch.notice
        if frame.closing in ("draining", "slow"):  # a client that took this batch is not slow: credits were lost
            self.lose(frame.closing)
        elif frame.closing is not None:
            batch.closing = frame.closing
            self._leave(tell=False)
            self._lost = "closed"

    async def _open(self) -> Batch | None:
        """One try. Nobody there, or no answer: the stream stays lost, until it has been so for RELAY_GONE_S.

        A log that is gone is a last batch.
        """
        if self._lost == "closed":
            raise RelayGoneError("the stream is closed")
        stream_id = clock.random_token(_STREAM_ID_BYTES)
        self._inbox.clear()
        self._id, self._next_number, self._owed, self._doubt = stream_id, 1, 0, None
        self._tries += 1
        self._relays.register(stream_id, self)
        answer: StreamOpened | Refused | None = None
        try:
            answer = await self._relays.ask(self._question(stream_id))
        finally:
            if not isinstance(answer, StreamOpened):
                self._relays.forget(stream_id)
            if answer is None:  # a relay may have it all the same
                self._relays.disown(stream_id)
        if isinstance(answer, StreamOpened):
            self._stands(answer)
        elif answer is not None and self._no_log(answer.refusal.kind):
            self._lost = "closed"
            return Batch(closing="gone")
        elif clock.now_s() - self._lost_s > RELAY_GONE_S:
            raise RelayGoneError(f"no relay for {self.reply_id}")
        return None

    def _no_log(self, kind: RefusalKind) -> bool:
        """Whether the log will not come (back). A reply just accepted may be a moment ahead of its log."""
        if kind is RefusalKind.NOT_FOUND:
            return self._last_seq > 0 or clock.now_s() - self._lost_s > LOG_MISSING_S
        return kind is RefusalKind.GONE

    def _question(self, stream_id: str) -> OpenStream:
        return OpenStream(
            reply_id=self.reply_id,
            stream_id=stream_id,
            inbox=self._relays.inbox(stream_id),
            after_seq=self._last_seq,
            credits=_WINDOW,
            presence=self._presence,
        )

    def _stands(self, answer: StreamOpened) -> None:
        if self._lost != "new":
            self.reopened += 1
            self._relays.count_reopened(self._lost or "")
        self.relay, self._credit_subject = answer.relay, answer.credit_subject
        self._lost, self._tries, self._news_s = None, 0, clock.now_s()
        self._relays.heard(answer.relay)
        if self._doubt is not None:
            self.lose(self._doubt)

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self, *, tell: bool) -> None:
        self._relays.forget(self._id)
        if tell:
            self._relays.say(self._credit_subject, Credit(stream_id=self._id, close=True))


class Relays:
    """All streams of this gateway: one subscription for their frames, one for who lives, one sender."""

    def __init__(self, bus: Bus, names: Names, gateway: str, metrics: Metrics, log: Log) -> None:
        self._bus, self._names, self._log = bus, names, log
        # New at each start: frames for a gateway that was killed find nobody.
        self._gateway = f"{gateway}-{clock.random_token(4)}"
        self._streams: dict[str, ReplyStream] = {}
        self._followed = 0
        self.idle = asyncio.Event()  # nobody is followed
        self.idle.set()
        self._lives = Lives(clock.now_s())
        self._let_go: OrderedDict[str, float] = OrderedDict()  # streams whose relay was told, and when
        self._outbox: deque[tuple[str, bytes]] = deque()  # bounded by the streams: a credit or a close for each
        self._wake = asyncio.Event()
        self._frames: Subscription | None = None
        self._words: Subscription | None = None
        self._open_streams = metrics.gauge("gateway_streams", "replies this gateway follows for clients")
        self._lag = metrics.gauge("gateway_loop_lag_seconds", "how late this gateway's own rounds have lately been")
        self._reopened = metrics.counter("gateway_reopened_total", "streams opened again at a relay, by why", ("why",))
        self._strays = metrics.counter("gateway_stray_frames_total", "frames that no client waits for any more")
        self._undecodable = metrics.counter("gateway_undecodable_total", "bus messages that could not be read")

    async def start(self) -> None:
        if self._frames is None:
            subject = self._names.frames(self._gateway, "*")
            self._frames = await self._bus.subscribe(subject, inbox_max=GATEWAY_FRAMES_MAX)
            self._words = await self._bus.subscribe(self._names.relay_alive)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear_frames(), name="gateway.frames")
            group.create_task(self._hear_lives(), name="gateway.relays")
            group.create_task(self._tick(), name="gateway.tick")
            group.create_task(self._send(), name="gateway.credits")

    @contextlib.asynccontextmanager
    async def follow(self, reply_id: str, *, presence: bool = True) -> AsyncIterator[ReplyStream]:
        """A stream of `reply_id` from its first entry.

        Raises RefusedError UNAVAILABLE past GATEWAY_STREAMS_MAX, and while this process cannot keep up as it is.
        """
        if self._followed >= GATEWAY_STREAMS_MAX or self._lives.lag_s > LOOP_LAG_S_MAX:
            raise unavailable("This gateway follows as many replies as it can.", 1.0)
        stream = ReplyStream(self, reply_id, presence=presence)
        self._count(+1)
        try:
            yield stream
        finally:
            stream.close()
            self._count(-1)

    def _count(self, change: int) -> None:
        self._followed += change
        self._open_streams.set(self._followed)
        if self._followed:
            self.idle.clear()
        else:
            self.idle.set()

    # --- for the streams -------------------------------------------------------------------------------------

    def inbox(self, stream_id: str) -> str:
        return self._names.frames(self._gateway, stream_id)

    def register(self, stream_id: str, stream: ReplyStream) -> None:
        self._streams[stream_id] = stream

    def forget(self, stream_id: str) -> None:
        self._streams.pop(stream_id, None)

    def heard(self, relay: str) -> None:
        self._lives.heard(relay, clock.now_s())

    def disown(self, stream_id: str) -> None:
        """A stream that nobody here waits for: whichever relay has it may let it go.

        Frames that were on their way are no news. One that comes later is: a relay that heard the close before it
        had opened the stream would go on, and say that a client is attached who has left.
        """
        told_s = self._let_go.get(stream_id)
        if told_s is None or clock.now_s() - told_s > RELAY_ALIVE_S:
            for relay in self._lives.relays:
                self.say(self._names.credit(relay), Credit(stream_id=stream_id, close=True))

    def count_reopened(self, why: str) -> None:
        self._reopened.labels(why).inc()

    def say(self, subject: str, credit: Credit) -> None:
        if credit.close:
            self._let_go[credit.stream_id] = clock.now_s()
            if len(self._let_go) > _LET_GO_MAX:
                self._let_go.popitem(last=False)
        self._outbox.append((subject, encode(credit)))
        self._wake.set()

    async def ask(self, question: OpenStream) -> StreamOpened | Refused | None:
        """A relay's answer, or None when there was none."""
        try:
            answer = await self._bus.request(self._names.relay_open, encode(question), timeout_s=RELAY_OPEN_S)
        except (NoRespondersError, BusTimeoutError):
            return None
        return self._read(_opened, answer.data, "relay.open")

    def read_frame(self, data: bytes) -> Frame | None:
        return self._read(_frame, data, "frames")

    def _read(self, kind: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T | None:
        try:
            return kind.decode(data)
        except msgspec.DecodeError as error:
            self._undecodable.inc()
            self._log.warning("message_undecodable", subject=what, error=str(error))
            return None

    # --- loops -----------------------------------------------------------------------------------------------

    async def _hear_frames(self) -> None:
        assert self._frames is not None, "start() first"
        async for message in self._frames:
            stream_id = message.subject[message.subject.rfind(".") + 1 :]
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.put(message.data)
            else:
                self._strays.inc()
                self.disown(stream_id)

    async def _hear_lives(self) -> None:
        assert self._words is not None, "start() first"
        async for message in self._words:
            alive = self._read(_alive, message.data, message.subject)
            if alive is not None:
                self.heard(alive.relay)

    async def _tick(self) -> None:
        """Look after relays and the bus."""
        assert self._frames is not None, "start() first"
        dropped, was_down = 0, False
        while True:
            await asyncio.sleep(ROUND_S)
            now = clock.now_s()
            dead = self._lives.look(now)
            self._lag.set(self._lives.lag_s)
            if not self._bus.connected:
                was_down = True
            elif was_down or self._frames.dropped != dropped:
                self.lose_all("bus" if was_down else "dropped")
                self._lives.away(now)
                was_down, dropped = False, self._frames.dropped
            elif dead:
                self._lose_those_of(dead)

    def _lose_those_of(self, dead: set[str]) -> None:
        lost = [stream for stream in self._streams.values() if stream.relay in dead]
        for stream in lost:
            stream.lose("relay")
        if lost:
            self._log.warning("relay_silent", relays=sorted(dead), streams=len(lost))

    def lose_all(self, why: str) -> None:
        """Frames of any stream may be lost."""
        for stream in list(self._streams.values()):
            stream.lose(why)

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                subject, data = self._outbox.popleft()
                try:
                    await self._bus.publish(subject, data)
                except BusError as error:  # the relay runs out of credits, calls us slow, and we open again
                    self._log.warning("not_said", subject=subject, error=str(error))
