"""The port to the bus: what services may ask of NATS, and nothing more. Adapters: `bus.nats`, `bus.memory`.

Core subjects make things fast and may lose; streams keep. Every wait has a deadline, every inbox a bound.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.limits import INBOX_MESSAGES_MAX, REQUEST_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A core message. `reply` is where an answer goes, when one is wanted."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message as a stream keeps it. `stored_s` is the server's timestamp, seconds since the epoch."""

    subject: str
    data: bytes
    seq: int
    stored_s: float
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A lane message in hand, un-acknowledged. `ack_subject` is this delivery's, and only this one's."""

    subject: str
    data: bytes
    seq: int
    delivered: int  # 1 the first time
    stored_s: float
    ack_subject: str


@dataclass(frozen=True)
class StreamSpec:
    """A stream as it should stand. `history` > 0 makes it a KV bucket's stream (per-subject bound, discard new)."""

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    max_bytes: int = -1
    max_messages: int = -1
    max_age_s: float = 0.0
    history: int = 0
    deduplication_s: float = 10.0
    republish_to: str | None = None  # destination with the source's last token, e.g. local.live.0.>
    in_memory: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer. `max_deliver` and `max_ack_pending` are unlimited: the stream's bound governs."""

    stream: str
    name: str
    filter_subject: str
    ack_wait_s: float


@dataclass
class BusCounts:
    """What went wrong and was survived, since the connection was made; for metrics."""

    published_dropped: int = 0  # core publishes while disconnected, or behind a blocked link
    inbox_dropped: int = 0  # messages that overflowed the client library before they reached an inbox
    disconnects: int = 0
    errors: int = 0  # what the client library reported, missing permissions among them


class Subscription(Protocol):
    """A bounded inbox. What overflows is dropped, oldest kept, and counted in `dropped`."""

    dropped: int

    def __aiter__(self) -> AsyncIterator[BusMessage]: ...

    async def next(self, timeout_s: float) -> BusMessage | None:
        """The next message, or None after `timeout_s`."""
        ...

    def take_ready(self, most: int) -> list[BusMessage]:
        """What is already here, without waiting."""
        ...

    async def close(self) -> None: ...


class Puller(Protocol):
    """One pull loop with a permanent inbox on a durable consumer."""

    async def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        """Up to `most` deliveries; returns as soon as there is at least one, or [] after `timeout_s`."""
        ...

    async def close(self) -> None: ...


class Bus(Protocol):
    """Errors are those of `shared.errors`: BusTimeoutError, NoRespondersError, WrongLastSequenceError,
    StreamFullError, BusClosedError. A timeout leaves the effect unknown.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def counts(self) -> BusCounts: ...

    # core subjects
    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Fire and forget; while disconnected it is dropped, not kept for later."""
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float = REQUEST_TIMEOUT_S) -> BusMessage: ...

    async def subscribe(
        self, subject: str, *, queue: str = "", inbox_max: int = INBOX_MESSAGES_MAX
    ) -> Subscription: ...

    # streams
    async def apply(self, streams: Sequence[StreamSpec], consumers: Sequence[ConsumerSpec]) -> None:
        """Create or update, idempotent; any service may run it at start."""
        ...

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
        """Publish into the stream that captures `subject`; returns its sequence.

        `expected_last_seq` makes it conditional on the subject's last sequence (0: the subject is empty).
        """
        ...

    async def read(self, stream: str, subject: str, *, from_seq: int, most: int) -> list[StreamMessage]:
        """Up to `most` messages of `subject` from `from_seq` on, in order, by batched direct get.

        Fewer than `most` means that the subject's end, as it stood then, was reached; [] when there are none.
        """
        ...

    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        """The last message of `subject`."""
        ...

    async def purge(self, stream: str, subject: str) -> None:
        """Remove what the stream holds under `subject`."""
        ...

    async def stream_created_s(self, stream: str) -> float:
        """When the stream was created: another value than before means that its content was lost."""
        ...

    async def stream_bytes(self, stream: str) -> int: ...

    def puller(self, stream: str, consumer: str) -> Puller: ...

    # deliveries: three different acts on an ack subject, none of them fenced by the server
    async def extend(self, ack_subject: str) -> None: ...

    async def ack(self, ack_subject: str) -> None:
        """Confirmed: returns once the server has removed the message."""
        ...

    async def nak(self, ack_subject: str, delay_s: float = 0.0) -> None: ...

    async def close(self) -> None:
        """Flush what was published, then leave."""
        ...
