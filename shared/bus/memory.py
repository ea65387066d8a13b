"""An in-memory twin of the NATS server, as far as Chorus uses it: one `MemoryServer`, many `MemoryBus` clients.

It keeps the server's semantics, the unpleasant ones of `memory_streams` included; the contract suite runs the same
tests on both. Only the standard library, so that tests of services need no server.

    MemoryServer ── streams {name: Stream {entries, consumers}}
        │
        └── interests [pattern, queue, inbox] <── MemoryBus.subscribe
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared import clock
from shared.bus import BusCounts, BusMessage, ConsumerSpec, Delivery, StreamMessage, StreamSpec, wire
from shared.bus.inbox import Inbox
from shared.bus.memory_streams import Stream, overlap, subject_matches
from shared.errors import (
    BusClosedError,
    BusError,
    BusTimeoutError,
    NoRespondersError,
)
from shared.limits import BUS_SUBJECT_CHARS_MAX, INBOX_MESSAGES_MAX, PAYLOAD_BYTES_MAX, REQUEST_TIMEOUT_S


def _checked(subject: str) -> str:
    too_long = len(subject) > BUS_SUBJECT_CHARS_MAX
    if not subject or too_long or any(character in subject for character in " \t\r\n"):
        raise BusError(f"{subject[:80]!r} is not a subject")
    return subject


@dataclass(eq=False)
class _Interest:
    pattern: str
    queue: str
    inbox: Inbox


class MemoryServer:
    """What all clients of one region share. `now` gives seconds since the epoch; after moving an injected clock
    call `wake()`, so that waiting pulls see what has come back.

    `lose` is asked about every core message on its way to subscribers: True loses it (live entries, health, ...).
    """

    def __init__(self, now: Callable[[], float] = clock.wall_s) -> None:
        self.now = now
        self.lose: Callable[[BusMessage], bool] | None = None
        self.up = True
        self._streams: dict[str, Stream] = {}
        self._exact: dict[str, list[_Interest]] = defaultdict(list)
        self._wild: list[_Interest] = []
        self._turn = itertools.count()
        self._news = asyncio.Event()
        self._clients: set[MemoryBus] = set()

    # --- life ----------------------------------------------------------------------------------------

    def bus(self) -> "MemoryBus":
        client = MemoryBus(self)
        self._clients.add(client)
        return client

    def stop(self) -> None:
        """The server is killed: clients are disconnected, what waits for an answer fails."""
        self.up = False
        for client in self._clients:
            client.on_lost()

    def start(self) -> None:
        """It comes back: file streams keep all, memory streams are gone, deliveries keep their ack wait."""
        for name, stream in list(self._streams.items()):
            if stream.spec.in_memory:
                del self._streams[name]
        self.up = True
        self.wake()

    def wake(self) -> None:
        """Something changed that a waiting pull may care about."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self, timeout_s: float) -> None:
        """Until something changed, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    def forget(self, client: "MemoryBus") -> None:
        self._clients.discard(client)

    # --- core subjects -------------------------------------------------------------------------------

    def subscribe(self, pattern: str, queue: str, inbox: Inbox) -> Callable[[], None]:
        interest = _Interest(pattern, queue, inbox)
        place = self._wild if "*" in pattern or ">" in pattern else self._exact[pattern]
        place.append(interest)

        def leave() -> None:
            place.remove(interest)
            if not place and place is not self._wild:
                self._exact.pop(pattern, None)

        return leave

    def route(self, message: BusMessage) -> bool:
        """To every plain subscriber and to one of each queue group; False when there was nobody."""
        interested = list(self._exact.get(message.subject, ()))
        interested += [one for one in self._wild if subject_matches(one.pattern, message.subject)]
        if interested and not (self.lose is not None and self.lose(message)):
            for interest in self._chosen(interested):
                interest.inbox.put(message)
        return bool(interested)

    def _chosen(self, interested: Iterable[_Interest]) -> list[_Interest]:
        plain, groups = [], defaultdict(list)
        for interest in interested:
            if interest.queue:
                groups[interest.queue].append(interest)
            else:
                plain.append(interest)
        turn = next(self._turn)
        return plain + [members[turn % len(members)] for members in groups.values()]

    # --- streams -------------------------------------------------------------------------------------

    def apply_stream(self, spec: StreamSpec) -> None:
        standing = self._streams.get(spec.name)
        for other in self._streams.values():
            if other is not standing and any(overlap(a, b) for a in spec.subjects for b in other.spec.subjects):
                raise BusError(f"subjects overlap with an existing stream (err_code 10065) on {spec.name}")
        if standing is None:
            self._streams[spec.name] = Stream(spec, created_s=self.now())
        else:
            standing.spec = spec

    def stream(self, name: str) -> Stream:
        stream = self._streams.get(name)
        if stream is None:
            raise NoRespondersError(f"nobody serves a stream {name}")
        stream.expire(self.now())
        return stream

    def capturing(self, subject: str) -> Stream | None:
        return next((stream for stream in self._streams.values() if stream.captures(subject)), None)

    def store(self, stream: Stream, message: BusMessage) -> int:
        """Append or refuse; an accepted entry is republished. Returns the sequence."""
        seq, republished = stream.store(message, self.now())
        if republished is not None:
            self.route(republished)
        self.wake()
        return seq

    def acknowledge(self, ack_subject: str, data: bytes) -> None:
        _, _, stream_name, consumer_name, _, seq, *_ = ack_subject.split(".")
        stream = self._streams.get(stream_name)
        if stream is not None:
            stream.acknowledge(consumer_name, int(seq), data, self.now())
            self.wake()


class MemoryBus:
    """The `Bus` port on a `MemoryServer`. `disconnect` and `reconnect` play a lost connection of this client."""

    def __init__(self, server: MemoryServer) -> None:
        self.counts = BusCounts()
        self._server = server
        self._online = True
        self._gone = False
        self._inboxes: set[Inbox] = set()
        self._asking: set[Inbox] = set()  # of requests under way
        self._numbers = itertools.count(1)

    @property
    def connected(self) -> bool:
        return self._online and self._server.up and not self._gone

    @property
    def gone(self) -> bool:
        return self._gone

    def disconnect(self) -> None:
        self._online = False
        self.on_lost()

    def reconnect(self) -> None:
        self._online = True
        self._server.wake()

    def on_lost(self) -> None:
        """No answer will come any more to what was asked."""
        self.counts.disconnects += 1
        for inbox in self._asking:
            inbox.bus_gone()
        self._server.wake()

    async def _connection(self, timeout_s: float) -> None:
        """Until connected, at most `timeout_s`."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        while not self.connected:
            if self._gone:
                raise BusClosedError("the bus is closed")
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise BusTimeoutError("no connection")
            await self._server.news(left_s)
        await asyncio.sleep(0)  # a server is never faster than a turn of the loop

    # --- core subjects -------------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        if self._gone:
            raise BusClosedError("the bus is closed")
        if not self.connected:
            self.counts.published_dropped += 1
            return
        self._route(BusMessage(subject, data, reply, dict(headers or {})))

    def _route(self, message: BusMessage) -> None:
        _checked(message.subject)
        if len(message.data) > PAYLOAD_BYTES_MAX:
            raise BusError(f"{len(message.data)} bytes are more than the bus takes on {message.subject}")
        if message.subject.startswith("$JS.ACK."):
            self._server.acknowledge(message.subject, message.data)
            return
        self._server.route(message)
        stream = self._server.capturing(message.subject)
        if stream is not None:
            try:
                self._server.store(stream, message)
            except BusError:
                return  # a core publish that a stream refuses is dropped without a word

    async def request(self, subject: str, data: bytes, *, timeout_s: float = REQUEST_TIMEOUT_S) -> BusMessage:
        await self._connection(timeout_s)
        reply = f"_INBOX.memory.{id(self)}.{next(self._numbers)}"
        inbox = self._inbox(reply, "", 1)
        self._asking.add(inbox)
        try:
            if not self._server.route(BusMessage(_checked(subject), data, reply)):
                raise NoRespondersError(f"nobody listens on {subject}")
            answer = await inbox.next(timeout_s)
        except BusClosedError:
            if self._gone:
                raise
            raise BusTimeoutError("the connection was lost; the effect is unknown") from None
        finally:
            self._asking.discard(inbox)
            await inbox.close()
        if answer is None:
            raise BusTimeoutError(f"no answer on {subject} within {timeout_s:g} s")
        return answer

    async def subscribe(self, subject: str, *, queue: str = "", inbox_max: int = INBOX_MESSAGES_MAX) -> Inbox:
        await self._connection(REQUEST_TIMEOUT_S)
        return self._inbox(_checked(subject), queue, inbox_max)

    def _inbox(self, subject: str, queue: str, inbox_max: int) -> Inbox:
        async def leave() -> None:
            self._inboxes.discard(inbox)
            withdraw()

        inbox = _ClientInbox(self, inbox_max, leave)
        self._inboxes.add(inbox)
        withdraw = self._server.subscribe(subject, queue, inbox)
        return inbox

    # --- streams -------------------------------------------------------------------------------------

    async def apply(self, streams: Sequence[StreamSpec], consumers: Sequence[ConsumerSpec]) -> None:
        await self._connection(REQUEST_TIMEOUT_S)
        for stream in streams:
            self._server.apply_stream(stream)
        for consumer in consumers:
            self._server.stream(consumer.stream).apply_consumer(consumer)

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        expected_last_seq: int | None = None,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> int:
        await self._connection(timeout_s)
        if len(data) > PAYLOAD_BYTES_MAX:
            raise BusError(f"{len(data)} bytes are more than the bus takes on {subject}")
        stream = self._server.capturing(_checked(subject))
        if stream is None:
            raise NoRespondersError(f"no stream captures {subject}")
        sent = dict(headers or {})
        if expected_last_seq is not None:
            sent[wire.HEADER_EXPECTED_LAST] = str(expected_last_seq)
        if message_id is not None:
            sent[wire.HEADER_MESSAGE_ID] = message_id
        message = BusMessage(subject, data, headers=sent)
        self._server.route(message)  # a plain subscription on the captured subject sees refused writes too
        seq = self._server.store(stream, message)
        await asyncio.sleep(0)
        if not self.connected:
            raise BusTimeoutError("the connection was lost; the effect is unknown")
        return seq

    async def read(self, stream: str, subject: str, *, from_seq: int, most: int) -> list[StreamMessage]:
        await self._connection(REQUEST_TIMEOUT_S)
        return self._server.stream(stream).read(subject, from_seq, most)

    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        await self._connection(REQUEST_TIMEOUT_S)
        found = self._server.stream(stream)
        return found.entries.get(found.last_of(subject))

    async def purge(self, stream: str, subject: str) -> None:
        await self._connection(REQUEST_TIMEOUT_S)
        self._server.stream(stream).purge(subject)

    async def stream_created_s(self, stream: str) -> float:
        await self._connection(REQUEST_TIMEOUT_S)
        return self._server.stream(stream).created_s

    async def stream_bytes(self, stream: str) -> int:
        await self._connection(REQUEST_TIMEOUT_S)
        return self._server.stream(stream).bytes_used

    # --- deliveries ----------------------------------------------------------------------------------

    def puller(self, stream: str, consumer: str) -> "MemoryPuller":
        return MemoryPuller(self, self._server, stream, consumer)

    async def extend(self, ack_subject: str) -> None:
        await self.publish(ack_subject, wire.EXTEND)

    async def ack(self, ack_subject: str) -> None:
        await self._connection(REQUEST_TIMEOUT_S)
        self._server.acknowledge(ack_subject, wire.ACK)

    async def nak(self, ack_subject: str, delay_s: float = 0.0) -> None:
        await self.publish(ack_subject, wire.nak_body(delay_s))

    async def close(self) -> None:
        self._gone = True
        for inbox in list(self._inboxes):
            inbox.bus_gone()
        self._server.forget(self)
        self._server.wake()


class _ClientInbox(Inbox):
    """Takes nothing while its client is disconnected, as a real one cannot."""

    def __init__(self, bus: MemoryBus, most: int, leave: Callable[[], Awaitable[None]]) -> None:
        super().__init__(most, leave)
        self._bus = bus

    def put(self, message: BusMessage) -> None:
        if self._bus.connected:
            super().put(message)


class MemoryPuller:
    def __init__(self, bus: MemoryBus, server: MemoryServer, stream: str, consumer: str) -> None:
        self._bus = bus
        self._server = server
        self._stream = stream
        self._consumer = consumer
        self._closed = False

    async def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        await asyncio.sleep(0)  # a server is never faster than a turn of the loop
        while True:
            if self._closed or self._bus.gone:
                raise BusClosedError("the puller is closed")
            due_s = None
            if self._bus.connected:
                stream = self._server.stream(self._stream)
                deliveries, due_s = stream.deliver(self._consumer, most, self._server.now())
                if deliveries:
                    return deliveries
            left_s = end_s - loop.time()
            if left_s <= 0:
                return []
            await self._server.news(left_s if due_s is None else min(left_s, max(0.001, due_s - self._server.now())))

    async def close(self) -> None:
        self._closed = True
        self._server.wake()
