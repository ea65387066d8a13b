"""An in-memory twin of the NATS server, as far as Chorus uses it: one `MemoryServer`, many `MemoryBus` clients.

It keeps the server's semantics, the unpleasant ones too: acks are not fenced, history overflow and age drop the
oldest silently, a repeated message id is acked and its new content dropped, a full work queue says no. The
contract suite runs the same tests on both. Only the standard library, so that tests of services need no server.

    MemoryServer ── streams {name: _Stream {entries, consumers}}
        │
        └── interests [pattern, queue, inbox] <── MemoryBus.subscribe
"""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared import clock
from shared.bus import BusCounts, BusMessage, ConsumerSpec, Delivery, StreamMessage, StreamSpec, wire
from shared.bus.inbox import Inbox
from shared.errors import (
    BusClosedError,
    BusError,
    BusTimeoutError,
    NoRespondersError,
    StreamFullError,
    WrongLastSequenceError,
)
from shared.limits import INBOX_MESSAGES_MAX, PAYLOAD_BYTES_MAX, REQUEST_TIMEOUT_S

_ENTRY_OVERHEAD_BYTES = 30  # what the server counts of a stored message beside subject, headers and data


def subject_matches(pattern: str, subject: str) -> bool:
    """`*` stands for one token, a last `>` for one or more."""
    if pattern == subject:
        return True
    wanted, given = pattern.split("."), subject.split(".")
    for at, part in enumerate(wanted):
        if part == ">":
            return len(given) > at
        if at >= len(given) or part not in ("*", given[at]):
            return False
    return len(wanted) == len(given)


def _checked(subject: str) -> str:
    if not subject or any(character in subject for character in " \t\r\n"):
        raise BusError(f"{subject!r} is not a subject")
    return subject


def _overlap(a: str, b: str) -> bool:
    """Whether some subject matches both patterns."""
    for one, other in itertools.zip_longest(a.split("."), b.split(".")):
        if one is None or other is None:
            return False
        if ">" in (one, other):
            return True
        if one != other and "*" not in (one, other):
            return False
    return True


def _entry_bytes(entry: StreamMessage) -> int:
    headers = sum(len(key) + len(value) + 4 for key, value in entry.headers.items())
    return len(entry.subject) + len(entry.data) + headers + _ENTRY_OVERHEAD_BYTES


@dataclass
class _Pending:
    """A delivery that nobody has acknowledged."""

    delivered: int
    due_s: float  # comes back at this time


@dataclass
class _Consumer:
    spec: ConsumerSpec
    next_seq: int = 1
    pending: dict[int, _Pending] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)  # of the pending: to be delivered again, in this order
    delivered_total: int = 0


@dataclass
class _Stream:
    spec: StreamSpec
    created_s: float
    entries: dict[int, StreamMessage] = field(default_factory=dict)  # by sequence, in order
    by_subject: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    bytes: int = 0
    last_seq: int = 0
    message_ids: dict[str, tuple[int, float]] = field(default_factory=dict)  # id -> (sequence, until)
    consumers: dict[str, _Consumer] = field(default_factory=dict)

    def captures(self, subject: str) -> bool:
        return any(subject_matches(pattern, subject) for pattern in self.spec.subjects)

    def remove(self, seq: int) -> None:
        entry = self.entries.pop(seq, None)
        if entry is None:
            return
        sequences = self.by_subject[entry.subject]
        sequences.remove(seq)
        if not sequences:
            del self.by_subject[entry.subject]
        self.bytes -= _entry_bytes(entry)

    def last_of(self, subject: str) -> int:
        sequences = self.by_subject.get(subject)
        return sequences[-1] if sequences else 0

    def expire(self, now_s: float) -> None:
        """Age drops the oldest, whoever still needs it."""
        if self.spec.max_age_s <= 0:
            return
        while self.entries:
            oldest = next(iter(self.entries.values()))
            if now_s - oldest.stored_s < self.spec.max_age_s:
                return
            self.remove(oldest.seq)


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
        self._streams: dict[str, _Stream] = {}
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
            if other is not standing and any(_overlap(a, b) for a in spec.subjects for b in other.spec.subjects):
                raise BusError(f"subjects overlap with an existing stream (err_code 10065) on {spec.name}")
        if standing is None:
            self._streams[spec.name] = _Stream(spec, created_s=self.now())
        else:
            standing.spec = spec

    def apply_consumer(self, spec: ConsumerSpec) -> None:
        stream = self.stream(spec.stream)
        if stream.spec.work_queue:
            for other in stream.consumers.values():
                if other.spec.name != spec.name and _overlap(other.spec.filter_subject, spec.filter_subject):
                    raise BusError(f"filtered consumer not unique on workqueue stream (err_code 10100) on {spec.name}")
        standing = stream.consumers.get(spec.name)
        if standing is None:
            stream.consumers[spec.name] = _Consumer(spec)
        else:
            standing.spec = spec

    def stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            raise NoRespondersError(f"nobody serves a stream {name}")
        stream.expire(self.now())
        return stream

    def capturing(self, subject: str) -> _Stream | None:
        return next((stream for stream in self._streams.values() if stream.captures(subject)), None)

    def store(self, stream: _Stream, message: BusMessage) -> int:
        """Append or refuse; an accepted entry is republished. Returns the sequence."""
        now_s = self.now()
        stream.expire(now_s)
        message_id = message.headers.get(wire.HEADER_MESSAGE_ID)
        if message_id is not None:
            known = stream.message_ids.get(message_id)
            if known is not None and known[1] > now_s:
                return known[0]  # acked as a duplicate, whatever its content
        previous = stream.last_of(message.subject)
        expected = message.headers.get(wire.HEADER_EXPECTED_LAST)
        if expected is not None and int(expected) != previous:
            raise WrongLastSequenceError(message.subject, previous)
        entry = StreamMessage(message.subject, message.data, stream.last_seq + 1, now_s, dict(message.headers))
        self._refuse_when_full(stream, entry)
        stream.last_seq = entry.seq
        stream.entries[entry.seq] = entry
        stream.by_subject[entry.subject].append(entry.seq)
        stream.bytes += _entry_bytes(entry)
        if message_id is not None:
            self._remember(stream, message_id, entry.seq, now_s)
        if 0 < stream.spec.history < len(stream.by_subject[entry.subject]):
            stream.remove(stream.by_subject[entry.subject][0])
        self._republish(stream, entry, previous)
        self.wake()
        return entry.seq

    def _refuse_when_full(self, stream: _Stream, entry: StreamMessage) -> None:
        spec = stream.spec
        if 0 < spec.max_messages <= len(stream.entries):
            raise StreamFullError(f"maximum messages exceeded (err_code 10077) on {entry.subject}")
        if 0 < spec.max_bytes < stream.bytes + _entry_bytes(entry):
            raise StreamFullError(f"maximum bytes exceeded (err_code 10077) on {entry.subject}")

    def _remember(self, stream: _Stream, message_id: str, seq: int, now_s: float) -> None:
        for old in [known for known, (_, until) in stream.message_ids.items() if until <= now_s]:
            del stream.message_ids[old]
        stream.message_ids[message_id] = (seq, now_s + stream.spec.deduplication_s)

    def _republish(self, stream: _Stream, entry: StreamMessage, previous: int) -> None:
        if stream.spec.republish_to is None:
            return
        source = stream.spec.subjects[0].removesuffix(">")
        subject = stream.spec.republish_to.removesuffix(">") + entry.subject.removeprefix(source)
        headers = {
            **entry.headers,
            wire.HEADER_STREAM: stream.spec.name,
            wire.HEADER_SUBJECT: entry.subject,
            wire.HEADER_SEQUENCE: str(entry.seq),
            wire.HEADER_LAST_SEQUENCE: str(previous),
        }
        self.route(BusMessage(subject, entry.data, headers=headers))

    # --- deliveries ----------------------------------------------------------------------------------

    def deliver(self, stream_name: str, consumer_name: str, most: int) -> tuple[list[Delivery], float | None]:
        """What a pull gets now, returned ones first; and when the next un-acked one comes back."""
        stream = self.stream(stream_name)
        consumer = stream.consumers.get(consumer_name)
        if consumer is None:
            raise NoRespondersError(f"nobody serves a consumer {consumer_name} on {stream_name}")
        now_s = self.now()
        for seq in [seq for seq in consumer.pending if seq not in stream.entries]:
            del consumer.pending[seq]  # aged or purged away
        due = [seq for seq, held in consumer.pending.items() if held.due_s <= now_s and seq not in consumer.back]
        consumer.back = [seq for seq in consumer.back if seq in consumer.pending] + sorted(due)
        returning, consumer.back = consumer.back[:most], consumer.back[most:]
        handed = [self._hand(stream, consumer, seq, now_s) for seq in returning]
        while len(handed) < most and consumer.next_seq <= stream.last_seq:
            seq = consumer.next_seq
            consumer.next_seq += 1
            entry = stream.entries.get(seq)
            if entry is not None and subject_matches(consumer.spec.filter_subject, entry.subject):
                handed.append(self._hand(stream, consumer, seq, now_s))
        return handed, min((held.due_s for held in consumer.pending.values()), default=None)

    def _hand(self, stream: _Stream, consumer: _Consumer, seq: int, now_s: float) -> Delivery:
        entry, held = stream.entries[seq], consumer.pending.get(seq)
        delivered = held.delivered + 1 if held else 1
        consumer.pending[seq] = _Pending(delivered, now_s + consumer.spec.ack_wait_s)
        consumer.delivered_total += 1
        stored_ns = int(entry.stored_s * wire.NANOSECONDS)
        ack = f"$JS.ACK.{stream.spec.name}.{consumer.spec.name}"
        ack += f".{delivered}.{seq}.{consumer.delivered_total}.{stored_ns}.0"
        return wire.delivery_of(entry.subject, entry.data, ack)

    def acknowledge(self, ack_subject: str, data: bytes) -> None:
        """+ACK, -NAK or +WPI of any delivery of the message, old or new: the server does not fence them."""
        _, _, stream_name, consumer_name, _, seq_text, *_ = ack_subject.split(".")
        stream = self._streams.get(stream_name)
        consumer = stream.consumers.get(consumer_name) if stream else None
        held = consumer.pending.get(int(seq_text)) if consumer else None
        if stream is None or consumer is None or held is None:
            return
        if data == wire.ACK:
            del consumer.pending[int(seq_text)]
            if stream.spec.work_queue:
                stream.remove(int(seq_text))
        elif data == wire.EXTEND:
            held.due_s = self.now() + consumer.spec.ack_wait_s
        elif data.startswith(wire.NAK):
            body = data.removeprefix(wire.NAK).strip()
            delay_s = json.loads(body)["delay"] / wire.NANOSECONDS if body else 0.0
            held.due_s = self.now() + delay_s
            if delay_s <= 0 and int(seq_text) not in consumer.back:
                consumer.back.append(int(seq_text))
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
            self._server.apply_consumer(consumer)

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
        found = self._server.stream(stream)
        return [found.entries[seq] for seq in found.by_subject.get(subject, ()) if seq >= from_seq][:most]

    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        await self._connection(REQUEST_TIMEOUT_S)
        found = self._server.stream(stream)
        return found.entries.get(found.last_of(subject))

    async def purge(self, stream: str, subject: str) -> None:
        await self._connection(REQUEST_TIMEOUT_S)
        found = self._server.stream(stream)
        for seq in [seq for seq, entry in found.entries.items() if subject_matches(subject, entry.subject)]:
            found.remove(seq)

    async def stream_created_s(self, stream: str) -> float:
        await self._connection(REQUEST_TIMEOUT_S)
        return self._server.stream(stream).created_s

    async def stream_bytes(self, stream: str) -> int:
        await self._connection(REQUEST_TIMEOUT_S)
        return self._server.stream(stream).bytes

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
                deliveries, due_s = self._server.deliver(self._stream, self._consumer, most)
                if deliveries:
                    return deliveries
            left_s = end_s - loop.time()
            if left_s <= 0:
                return []
            await self._server.news(left_s if due_s is None else min(left_s, max(0.001, due_s - self._server.now())))

    async def close(self) -> None:
        self._closed = True
        self._server.wake()
