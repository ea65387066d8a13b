"""Streams and consumers as the NATS server keeps them, for the in-memory twin. Pure: `now_s` comes with each call.

The unpleasant semantics too: acks are not fenced, history overflow and age drop the oldest silently, a repeated
message id is answered with the first one's place and its content dropped, a full stream says no.
"""

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field

from shared.bus import BusMessage, ConsumerSpec, Delivery, StreamMessage, StreamSpec, wire
from shared.errors import BusError, NoRespondersError, StreamFullError, WrongLastSequenceError

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


def overlap(a: str, b: str) -> bool:
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
class Consumer:
    """A durable pull consumer: what it has handed out, and what it will hand out next."""

    spec: ConsumerSpec
    next_seq: int = 1
    pending: dict[int, _Pending] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)  # of the pending: to be delivered again, in this order
    delivered_total: int = 0

    def give_back(self, entries: dict[int, StreamMessage], now_s: float) -> None:
        """Put what has come due behind what waits to be delivered again; forget what the stream dropped."""
        for seq in [seq for seq in self.pending if seq not in entries]:
            del self.pending[seq]
        due = [seq for seq, held in self.pending.items() if held.due_s <= now_s and seq not in self.back]
        self.back = [seq for seq in self.back if seq in self.pending] + sorted(due)

    def hand(self, entry: StreamMessage, now_s: float) -> Delivery:
        held = self.pending.get(entry.seq)
        delivered = held.delivered + 1 if held else 1
        self.pending[entry.seq] = _Pending(delivered, now_s + self.spec.ack_wait_s)
        self.delivered_total += 1
        stored_ns = int(entry.stored_s * wire.NANOSECONDS)
        ack = f"$JS.ACK.{self.spec.stream}.{self.spec.name}"
        ack += f".{delivered}.{entry.seq}.{self.delivered_total}.{stored_ns}.0"
        return wire.delivery_of(entry.subject, entry.data, ack)

    def nak(self, seq: int, body: bytes, now_s: float) -> None:
        delay_s = json.loads(body)["delay"] / wire.NANOSECONDS if body else 0.0
        self.pending[seq].due_s = now_s + delay_s
        if delay_s <= 0 and seq not in self.back:
            self.back.append(seq)


@dataclass
class Stream:
    spec: StreamSpec
    created_s: float
    entries: dict[int, StreamMessage] = field(default_factory=dict)  # by sequence, in order
    bytes_used: int = 0
    consumers: dict[str, Consumer] = field(default_factory=dict)
    _last_seq: int = 0
    _by_subject: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _message_ids: dict[str, tuple[int, float]] = field(default_factory=dict)  # id -> (sequence, until)

    # --- entries -------------------------------------------------------------------------------------

    def captures(self, subject: str) -> bool:
        return any(subject_matches(pattern, subject) for pattern in self.spec.subjects)

    def store(self, message: BusMessage, now_s: float) -> tuple[int, BusMessage | None]:
        """Append or refuse: the sequence, and what is to be republished when the entry is a new one."""
        self.expire(now_s)
        message_id = message.headers.get(wire.HEADER_MESSAGE_ID)
        known = self._message_ids.get(message_id) if message_id is not None else None
        if known is not None and known[1] > now_s:
            return known[0], None
        previous = self.last_of(message.subject)
        expected = message.headers.get(wire.HEADER_EXPECTED_LAST)
        if expected is not None and int(expected) != previous:
            raise WrongLastSequenceError(message.subject, previous)
        entry = StreamMessage(message.subject, message.data, self._last_seq + 1, now_s, dict(message.headers))
        self._refuse_when_full(entry)
        self._keep(entry)
        if message_id is not None:
            self._remember(message_id, entry.seq, now_s)
        return entry.seq, self._republished(entry, previous)

    def _refuse_when_full(self, entry: StreamMessage) -> None:
        if 0 < self.spec.max_messages <= len(self.entries):
            raise StreamFullError(f"maximum messages exceeded (err_code 10077) on {entry.subject}")
        if 0 < self.spec.max_bytes < self.bytes_used + _entry_bytes(entry):
            raise StreamFullError(f"maximum bytes exceeded (err_code 10077) on {entry.subject}")

    def _keep(self, entry: StreamMessage) -> None:
        self._last_seq = entry.seq
        self.entries[entry.seq] = entry
        self.bytes_used += _entry_bytes(entry)
        sequences = self._by_subject[entry.subject]
        sequences.append(entry.seq)
        if 0 < self.spec.history < len(sequences):
            self.remove(sequences[0])

    def _remember(self, message_id: str, seq: int, now_s: float) -> None:
        for old in [known for known, (_, until) in self._message_ids.items() if until <= now_s]:
            del self._message_ids[old]
        self._message_ids[message_id] = (seq, now_s + self.spec.deduplication_s)

    def _republished(self, entry: StreamMessage, previous: int) -> BusMessage | None:
        if self.spec.republish_to is None:
            return None
        source = self.spec.subjects[0].removesuffix(">")
        subject = self.spec.republish_to.removesuffix(">") + entry.subject.removeprefix(source)
        headers = {
            **entry.headers,
            wire.HEADER_STREAM: self.spec.name,
            wire.HEADER_SUBJECT: entry.subject,
            wire.HEADER_SEQUENCE: str(entry.seq),
            wire.HEADER_LAST_SEQUENCE: str(previous),
        }
        return BusMessage(subject, entry.data, headers=headers)

    def read(self, subject: str, from_seq: int, most: int) -> list[StreamMessage]:
        return [self.entries[seq] for seq in self._by_subject.get(subject, ()) if seq >= from_seq][:most]

    def last_of(self, subject: str) -> int:
        """Sequence of the subject's last entry, 0 when it has none."""
        sequences = self._by_subject.get(subject)
        return sequences[-1] if sequences else 0

    def remove(self, seq: int) -> None:
        entry = self.entries.pop(seq, None)
        if entry is None:
            return
        sequences = self._by_subject[entry.subject]
        sequences.remove(seq)
        if not sequences:
            del self._by_subject[entry.subject]
        self.bytes_used -= _entry_bytes(entry)

    def purge(self, pattern: str) -> None:
        for seq in [seq for seq, entry in self.entries.items() if subject_matches(pattern, entry.subject)]:
            self.remove(seq)

    def expire(self, now_s: float) -> None:
        """Age drops the oldest, whoever still needs it."""
        while self.spec.max_age_s > 0 and self.entries:
            oldest = next(iter(self.entries.values()))
            if now_s - oldest.stored_s < self.spec.max_age_s:
                return
            self.remove(oldest.seq)

    # --- deliveries ----------------------------------------------------------------------------------

    def apply_consumer(self, spec: ConsumerSpec) -> None:
        for other in self.consumers.values():
            same = other.spec.name == spec.name
            if self.spec.work_queue and not same and overlap(other.spec.filter_subject, spec.filter_subject):
                raise BusError(f"filtered consumer not unique on workqueue stream (err_code 10100) on {spec.name}")
        standing = self.consumers.get(spec.name)
        if standing is None:
            self.consumers[spec.name] = Consumer(spec)
        else:
            standing.spec = spec

    def deliver(self, consumer_name: str, most: int, now_s: float) -> tuple[list[Delivery], float | None]:
        """What a pull gets now, returned ones first; and when the next un-acked one comes back."""
        consumer = self.consumers.get(consumer_name)
        if consumer is None:
            raise NoRespondersError(f"nobody serves a consumer {consumer_name} on {self.spec.name}")
        consumer.give_back(self.entries, now_s)
        returning, consumer.back = consumer.back[:most], consumer.back[most:]
        handed = [consumer.hand(self.entries[seq], now_s) for seq in returning]
        while len(handed) < most and consumer.next_seq <= self._last_seq:
            entry = self.entries.get(consumer.next_seq)
            consumer.next_seq += 1
            if entry is not None and subject_matches(consumer.spec.filter_subject, entry.subject):
                handed.append(consumer.hand(entry, now_s))
        return handed, min((held.due_s for held in consumer.pending.values()), default=None)

    def acknowledge(self, consumer_name: str, seq: int, data: bytes, now_s: float) -> None:
        """+ACK, -NAK or +WPI of any delivery of the message, old or new: the server does not fence them."""
        consumer = self.consumers.get(consumer_name)
        if consumer is None or seq not in consumer.pending:
            return
        if data == wire.ACK:
            del consumer.pending[seq]
            if self.spec.work_queue:
                self.remove(seq)
        elif data == wire.EXTEND:
            consumer.pending[seq].due_s = now_s + consumer.spec.ack_wait_s
        elif data.startswith(wire.NAK):
            consumer.nak(seq, data.removeprefix(wire.NAK).strip(), now_s)
