"""The bus on a real NATS server, by nats-py's core client and JetStream's API spoken directly.

nats-py's own request, fetch and publish_async are not used: one permanent inbox receives every answer of this
connection (acks, API answers, batches), and each asker waits on its own subject below it.

    append ──┐                                       ┌──> future of append 7
    request ─┼──> publish, reply <inbox>.<n> ──> server ──> <inbox>.* ──┼──> future of request 8
    read ────┘                                       └──> batch of read 9

When the connection drops, everybody waiting is told at once (the effect is unknown); whoever asks while it is
down waits for it within his own deadline; core publishes are dropped and counted.

A user needs, beside its subjects: publish on $JS.API.> (or the parts it uses) and $JS.ACK.>, publish and
subscribe on its own <inbox prefix>.> (a subscription is confirmed by a message to oneself).
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared import clock
from shared.bus import BusMessage, ConsumerSpec, Delivery, StreamMessage, StreamSpec, wire
from shared.bus.inbox import Inbox
from shared.errors import BusClosedError, BusError, BusTimeoutError, NoRespondersError
from shared.limits import (
    BUS_CLOSE_S,
    BUS_CONNECT_S,
    BUS_PING_S,
    BUS_READ_S,
    BUS_RECONNECT_S_MAX,
    BUS_RECONNECT_S_MIN,
    BUS_UNSENT_BYTES_MAX,
    CATCH_UP_BATCH,
    INBOX_MESSAGES_MAX,
    PULL_GRACE_S,
    PULL_RETRY_S,
    REQUEST_TIMEOUT_S,
)

_Answer = TypeVar("_Answer")
_publish_ack = msgspec.json.Decoder(wire.PublishAck)
_stream_info = msgspec.json.Decoder(wire.StreamInfo)
_log = structlog.get_logger(part="bus")


class BusCounts(msgspec.Struct):
    """What went wrong and was survived; for metrics."""

    published_dropped: int = 0  # core publishes while disconnected or behind a blocked link
    inbox_dropped: int = 0  # messages a full inbox of the client library refused
    disconnects: int = 0
    errors: int = 0  # what the client library reported, permission errors among them


class _Waiter:
    """One asker: done with its first message, or (a batch) with the status message that closes it."""

    __slots__ = ("batch", "done", "messages")

    def __init__(self, *, batch: bool) -> None:
        self.batch = batch
        self.messages: list[Msg] = []
        self.done: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    def deliver(self, message: Msg) -> None:
        if self.done.done():
            return
        if self.batch and wire.status_of(message.headers) is None:
            self.messages.append(message)
        else:
            self.done.set_result(message)

    def fail(self, error: BusError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Mailbox:
    """The permanent inbox of a connection and who waits on which subject below it."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._numbers = itertools.count(1)
        self._waiting: dict[str, _Waiter] = {}

    def open(self, *, batch: bool = False) -> tuple[str, _Waiter]:
        subject = f"{self.prefix}.{next(self._numbers)}"
        waiter = self._waiting[subject] = _Waiter(batch=batch)
        return subject, waiter

    def close(self, subject: str) -> None:
        self._waiting.pop(subject, None)

    async def on_message(self, message: Msg) -> None:
        waiter = self._waiting.get(message.subject)
        if waiter is not None:  # else its asker has given up
            waiter.deliver(message)

    def fail_all(self, error: Callable[[], BusError]) -> None:
        for waiter in self._waiting.values():
            waiter.fail(error())


class NatsBus:
    """The `Bus` port on one NATS connection. Made by `connect`."""

    def __init__(self, client: Client, inbox_prefix: str) -> None:
        self.counts = BusCounts()
        self._client = client
        self._mailbox = _Mailbox(f"{inbox_prefix}.{clock.random_token(8)}")
        self._pull_numbers = itertools.count(1)
        self._inboxes: dict[NatsSubscription, Inbox] = {}
        self._pullers: set[NatsPuller] = set()
        self._up = asyncio.Event()
        self._gone = False  # closed, by us or for good

    # --- the connection ------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._up.is_set() and self._client.is_connected and not self._gone

    async def start(self) -> None:
        """The connection stands: take our inbox. `connect` does this."""
        self._up.set()
        await self._client.subscribe(f"{self._mailbox.prefix}.*", cb=self._mailbox.on_message)

    async def on_disconnected(self) -> None:
        if self._gone:
            return
        self.counts.disconnects += 1
        self._up.clear()
        _log.warning("bus_disconnected")
        self._mailbox.fail_all(lambda: BusTimeoutError("the connection was lost; the effect is unknown"))
        for puller in self._pullers:
            puller.on_disconnected()

    async def on_reconnected(self) -> None:
        self._up.set()
        _log.info("bus_reconnected")

    async def on_closed(self) -> None:
        self._gone = True
        self._up.set()  # whoever waits for the connection learns that there will be none
        self._mailbox.fail_all(lambda: BusClosedError("the bus is closed"))
        for inbox in self._inboxes.values():
            inbox.bus_gone()
        for puller in self._pullers:
            puller.on_disconnected()

    async def on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counts.inbox_dropped += 1
            inbox = self._inboxes.get(error.sub)
            if inbox is not None:
                inbox.dropped += 1
            return
        self.counts.errors += 1
        _log.warning("bus_error", error=f"{type(error).__name__}: {error}")

    async def _connection(self) -> None:
        """Until the connection stands; the caller holds the deadline. Raises BusClosedError."""
        if not self._client.is_connected and not self._gone:
            self._up.clear()  # the loss is a moment older than its callback
        await self._up.wait()
        if self._gone:
            raise BusClosedError("the bus is closed")

    async def _send(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        try:
            await self._client.publish(subject, data, reply, dict(headers) if headers else None)
        except nats.errors.MaxPayloadError:
            raise BusError(f"{len(data)} bytes are more than the bus takes on {subject}") from None
        except nats.errors.BadSubjectError:
            raise BusError(f"{subject!r} is not a subject") from None
        except nats.errors.ConnectionClosedError:
            raise BusClosedError("the bus is closed") from None

    async def _ask(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, timeout_s: float, *, batch: bool = False
    ) -> tuple[Msg, list[Msg]]:
        """Publish with a reply subject and wait: the answer (or closing status) and the batch before it."""
        reply, waiter = self._mailbox.open(batch=batch)
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection()
                await self._send(subject, data, reply, headers)
                answer = await waiter.done
        except TimeoutError:
            raise BusTimeoutError(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            self._mailbox.close(reply)
        if not answer.data and wire.status_of(answer.headers) == wire.STATUS_NO_RESPONDERS:
            raise NoRespondersError(f"nobody listens on {subject}")
        return answer, waiter.messages

    # --- core subjects -------------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        if self._gone:
            raise BusClosedError("the bus is closed")
        if not self.connected or self._client.pending_data_size > BUS_UNSENT_BYTES_MAX:
            self.counts.published_dropped += 1
            return
        await self._send(subject, data, reply, headers)

    async def request(self, subject: str, data: bytes, *, timeout_s: float = REQUEST_TIMEOUT_S) -> BusMessage:
        answer, _ = await self._ask(subject, data, None, timeout_s)
        return _message(answer)

    async def subscribe(self, subject: str, *, queue: str = "", inbox_max: int = INBOX_MESSAGES_MAX) -> Inbox:
        """Returns once the server knows of it; it is taken up again after each reconnect."""
        theirs: NatsSubscription | None = None

        async def leave() -> None:
            if theirs is not None:
                self._inboxes.pop(theirs, None)
                await _unsubscribe(theirs)

        inbox = Inbox(inbox_max, leave)

        async def on_message(message: Msg) -> None:
            inbox.put(_message(message))

        theirs = await self._subscribe(subject, queue, on_message, inbox_max)
        self._inboxes[theirs] = inbox
        try:
            await self._echo(REQUEST_TIMEOUT_S)
        except BaseException:
            await inbox.close()
            raise
        return inbox

    async def _subscribe(self, subject: str, queue: str, on_message: Any, inbox_max: int) -> NatsSubscription:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._connection()
                # Its queue only bridges to our inbox, which is the bound; half as much again, so that ours decides.
                return await self._client.subscribe(
                    subject, queue=queue, cb=on_message, pending_msgs_limit=inbox_max + inbox_max // 2 + 64
                )
        except TimeoutError:
            raise BusTimeoutError(f"no connection to subscribe {subject} on") from None
        except nats.errors.BadSubjectError:
            raise BusError(f"{subject!r} cannot be subscribed to") from None

    async def _echo(self, timeout_s: float) -> None:
        """A message to ourselves: when it is back, the server has seen all we sent before it.

        (The client library's flush writes its PING past what it has buffered, and a cancelled one breaks its reader.)
        """
        subject, waiter = self._mailbox.open()
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection()
                await self._send(subject, b"", "", None)
                await waiter.done
        except TimeoutError:
            raise BusTimeoutError("the server does not answer, or forbids our own inbox") from None
        finally:
            self._mailbox.close(subject)

    # --- streams -------------------------------------------------------------------------------------

    async def apply(self, streams: Sequence[StreamSpec], consumers: Sequence[ConsumerSpec]) -> None:
        for stream in streams:
            config = wire.stream_config(stream)
            try:
                await self._api(f"STREAM.CREATE.{stream.name}", config)
            except _ApiRefusalError as refusal:
                if refusal.err_code != wire.ERR_NAME_IN_USE:
                    raise
                await self._api(f"STREAM.UPDATE.{stream.name}", config)
        for consumer in consumers:
            await self._api(f"CONSUMER.CREATE.{consumer.stream}.{consumer.name}", wire.consumer_config(consumer))

    async def _api(self, verb: str, body: dict[str, Any] | None) -> wire.StreamInfo:
        subject = f"{wire.API}.{verb}"
        data = msgspec.json.encode(body) if body is not None else b""
        answer, _ = await self._ask(subject, data, None, REQUEST_TIMEOUT_S)
        info = _decoded(_stream_info, answer)
        if info.error is not None:
            error = wire.error_of(info.error, subject)
            raise _ApiRefusalError(str(error), info.error.err_code) if type(error) is BusError else error
        return info

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
        sent = dict(headers or {})
        if expected_last_seq is not None:
            sent[wire.HEADER_EXPECTED_LAST] = str(expected_last_seq)
        if message_id is not None:
            sent[wire.HEADER_MESSAGE_ID] = message_id
        answer, _ = await self._ask(subject, data, sent, timeout_s)
        ack = _decoded(_publish_ack, answer)
        if ack.error is not None:
            raise wire.error_of(ack.error, subject)
        return ack.seq

    async def read(self, stream: str, subject: str, *, from_seq: int, most: int) -> list[StreamMessage]:
        found: list[StreamMessage] = []
        while len(found) < most:
            body = wire.read_body(subject, from_seq, min(CATCH_UP_BATCH, most - len(found)))
            end, batch = await self._ask(f"{wire.API}.DIRECT.GET.{stream}", body, None, BUS_READ_S, batch=True)
            found += [_stored(message) for message in batch]
            status = wire.status_of(end.headers)
            if status == wire.STATUS_NOT_FOUND:
                break
            if status != wire.STATUS_END_OF_BATCH:
                raise BusError(f"reading {subject}: status {status} {(end.headers or {}).get('Description', '')}")
            if not batch or (end.headers or {}).get(wire.HEADER_PENDING, "0") == "0":
                break
            from_seq = found[-1].seq + 1
        return found

    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        answer, _ = await self._ask(f"{wire.API}.DIRECT.GET.{stream}.{subject}", b"", None, BUS_READ_S)
        status = wire.status_of(answer.headers)
        if status == wire.STATUS_NOT_FOUND:
            return None
        if status is not None:
            raise BusError(f"reading the last of {subject}: status {status}")
        return _stored(answer)

    async def purge(self, stream: str, subject: str) -> None:
        await self._api(f"STREAM.PURGE.{stream}", {"filter": subject})

    async def stream_created_s(self, stream: str) -> float:
        return wire.parse_time_s((await self._api(f"STREAM.INFO.{stream}", None)).created)

    async def stream_bytes(self, stream: str) -> int:
        return (await self._api(f"STREAM.INFO.{stream}", None)).state.bytes

    # --- deliveries ----------------------------------------------------------------------------------

    def puller(self, stream: str, consumer: str) -> "NatsPuller":
        puller = NatsPuller(self, stream, consumer, f"{self._mailbox.prefix}.pull.{next(self._pull_numbers)}")
        self._pullers.add(puller)
        return puller

    async def extend(self, ack_subject: str) -> None:
        await self.publish(ack_subject, wire.EXTEND)

    async def ack(self, ack_subject: str) -> None:
        await self._ask(ack_subject, wire.ACK, None, REQUEST_TIMEOUT_S)

    async def nak(self, ack_subject: str, delay_s: float = 0.0) -> None:
        await self.publish(ack_subject, wire.nak_body(delay_s))

    async def close(self) -> None:
        if self._gone:
            return
        try:
            async with asyncio.timeout(BUS_CLOSE_S):
                for puller in list(self._pullers):
                    await puller.close()
                if self.connected:
                    await self._echo(BUS_CLOSE_S)
        except (TimeoutError, BusError) as error:
            _log.warning("bus_closed_unflushed", error=str(error))
        await self.on_closed()
        try:
            async with asyncio.timeout(BUS_CLOSE_S):
                await self._client.close()
        except TimeoutError:
            _log.warning("bus_close_timeout")

    # --- for the puller ------------------------------------------------------------------------------

    async def pull_inbox(self, subject: str, on_message: Any) -> NatsSubscription:
        return await self._subscribe(subject, "", on_message, INBOX_MESSAGES_MAX)

    async def send_pull(self, subject: str, body: bytes, reply: str) -> None:
        await self._connection()
        await self._send(subject, body, reply, None)

    @property
    def gone(self) -> bool:
        return self._gone

    def forget(self, puller: "NatsPuller") -> None:
        self._pullers.discard(puller)


class _ApiRefusalError(BusError):
    """The JetStream API said no, with a code that decides what to do next."""

    def __init__(self, message: str, err_code: int) -> None:
        super().__init__(message)
        self.err_code = err_code


class NatsPuller:
    """Pulls with one request outstanding and an inbox that stays, so that nothing falls between two pulls.

        pull ──> NEXT {batch, expires} ──> deliveries ───────> ready ──> returned, at most `most`
                       │                   └─ the last of the batch ─┐
                       ├── status 404 | 408 | 409 ───────────────────┼──> none outstanding: ask again
                       └── no word, expiry + grace | disconnected ───┘

    A request answered in part stays outstanding until it expires; what it still brings is kept for the next pull.
    """

    def __init__(self, bus: NatsBus, stream: str, consumer: str, inbox: str) -> None:
        self._bus = bus
        self._subject = f"{wire.API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._subscription: NatsSubscription | None = None
        self._ready: deque[Delivery] = deque()
        self._wake = asyncio.Event()
        self._outstanding = ""  # reply subject of the request the server holds
        self._outstanding_left = 0
        self._outstanding_until = 0.0
        self._not_before = 0.0
        self._nobody = False  # the last word was that there is no such consumer
        self._closed = False

    async def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        """Raises NoRespondersError when at the end nobody serves such a consumer, BusClosedError when closed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_ready(most, clock.now_s() + timeout_s)
        except TimeoutError:
            if self._nobody and not self._ready:
                raise NoRespondersError(f"nobody serves {self._subject}") from None
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    async def _until_ready(self, most: int, deadline_s: float) -> None:
        while not self._ready:
            if self._closed or self._bus.gone:
                raise BusClosedError("the puller is closed")
            now_s = clock.now_s()
            if self._outstanding and now_s >= self._outstanding_until:
                self._outstanding = ""
            self._wake.clear()
            if self._outstanding:
                await self._sleep(self._outstanding_until - now_s)
            elif now_s < self._not_before:
                await self._sleep(self._not_before - now_s)
            else:
                await self._request(most, deadline_s - now_s)

    async def _sleep(self, seconds: float) -> None:
        """Until there is news, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _request(self, most: int, expires_s: float) -> None:
        if self._subscription is None:
            self._subscription = await self._bus.pull_inbox(f"{self._inbox}.*", self._on_message)
        reply = f"{self._inbox}.{next(self._numbers)}"
        self._outstanding, self._outstanding_left = reply, most
        self._outstanding_until = clock.now_s() + expires_s + PULL_GRACE_S
        try:
            await self._bus.send_pull(self._subject, wire.pull_body(most, expires_s), reply)
        except BaseException:
            self._outstanding = ""
            raise

    async def _on_message(self, message: Msg) -> None:
        status = wire.status_of(message.headers) if not message.data else None
        if status is not None:
            self._on_status(message.subject, status)
        else:
            self._ready.append(wire.delivery_of(message.subject, message.data, message.reply))
            self._nobody = False
            self._outstanding_left -= 1
            if self._outstanding_left <= 0:
                self._outstanding = ""
        self._wake.set()

    def _on_status(self, reply: str, status: str) -> None:
        if reply != self._outstanding:
            return  # of a request already given up
        self._outstanding = ""
        self._nobody = status == wire.STATUS_NO_RESPONDERS
        if status not in (wire.STATUS_EXPIRED, wire.STATUS_NOT_FOUND):
            self._not_before = clock.now_s() + PULL_RETRY_S

    def on_disconnected(self) -> None:
        """The server has forgotten our request with the connection."""
        self._outstanding = ""
        self._wake.set()

    async def close(self) -> None:
        """Withdraw the request and give back what nobody took."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._bus.forget(self)
        if self._subscription is not None:
            await _unsubscribe(self._subscription)
        while self._ready and not self._bus.gone:
            await self._bus.nak(self._ready.popleft().ack_subject)


async def _unsubscribe(subscription: NatsSubscription) -> None:
    try:
        await subscription.unsubscribe()
    except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
        return  # nothing left to leave


def _message(message: Msg) -> BusMessage:
    return BusMessage(message.subject, message.data, message.reply, message.headers or {})


def _stored(message: Msg) -> StreamMessage:
    headers = message.headers or {}
    return StreamMessage(
        subject=headers[wire.HEADER_SUBJECT],
        data=message.data,
        seq=int(headers[wire.HEADER_SEQUENCE]),
        stored_s=wire.parse_time_s(headers[wire.HEADER_TIME]),
        headers=headers,
    )


def _decoded(decoder: msgspec.json.Decoder[_Answer], answer: Msg) -> _Answer:
    try:
        return decoder.decode(answer.data)
    except msgspec.DecodeError as error:
        raise BusError(f"not an answer of JetStream: {error}") from None


def _jittered(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """Which server to try next, and after how long: all clients of a lost server must not come back at once."""
    spread = BUS_RECONNECT_S_MAX - BUS_RECONNECT_S_MIN
    return min(servers, key=lambda server: server.reconnects), BUS_RECONNECT_S_MIN + spread * clock.random_unit()


async def connect(
    url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    name: str = "chorus",
    inbox_prefix: str = "_INBOX",
    timeout_s: float = BUS_CONNECT_S,
) -> NatsBus:
    """A bus that reconnects for ever. `url` may name several servers, separated by commas.

    Raises BusTimeoutError, with what the server last said, when there is no connection within `timeout_s`.
    """
    client = Client()
    bus = NatsBus(client, inbox_prefix)
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        if bus.connected:
            await bus.on_error(error)
        else:
            said[:] = [str(error) or type(error).__name__]

    async with AsyncExitStack() as undo:
        undo.push_async_callback(client.close)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    url.split(","),
                    user=user,
                    password=password,
                    name=name,
                    inbox_prefix=inbox_prefix,
                    error_cb=on_error,
                    disconnected_cb=bus.on_disconnected,
                    reconnected_cb=bus.on_reconnected,
                    closed_cb=bus.on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=BUS_RECONNECT_S_MAX,  # type: ignore[arg-type]  # it is slept, so fractions do
                    reconnect_to_server_handler=_jittered,
                    ping_interval=BUS_PING_S,  # type: ignore[arg-type]
                    max_outstanding_pings=2,
                    pending_size=2 * BUS_UNSENT_BYTES_MAX,
                    flush_timeout=BUS_PING_S,
                )
                await bus.start()
        except TimeoutError:
            raise BusTimeoutError(
                f"no connection to NATS at {url} within {timeout_s:g} s: {said[0] if said else 'no answer'}"
            ) from None
        undo.pop_all()
    return bus
