"""One connection to a NATS server, by nats-py's core client, and everything that waits on it.

One permanent inbox receives every answer of the connection (acks of appends, API answers, batches of reads); each
asker waits on a subject of its own below it:

    append ──┐                                              ┌──> waiter 7
    request ─┼──> publish, reply <inbox>.<n> ──> server ──> <inbox>.* ──> waiter 8
    read ────┘                                              └──> waiter 9, a batch

When the connection drops, everybody who waits for an answer is told at once (the effect is unknown); whoever asks
while it is down waits for it, within his own deadline; core publishes are dropped and counted.

Of nats-py only connect, publish and subscribe with a callback are used: its fetch can stall, its publish_async
never times out, its flush overtakes what it has buffered (and, cancelled, breaks its reader), and where its calls
can suspend they swallow a cancellation. Hence no pending buffer of its own and a bound here instead.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared import clock
from shared.bus import BusCounts, BusMessage, wire
from shared.bus.inbox import Inbox
from shared.bus.nats_client import LeanClient
from shared.errors import BusClosedError, BusError, BusTimeoutError, NoRespondersError
from shared.limits import (
    BUS_CLOSE_S,
    BUS_PING_S,
    BUS_RECONNECT_S_MAX,
    BUS_RECONNECT_S_MIN,
    BUS_SUBJECT_CHARS_MAX,
    BUS_UNSENT_BYTES_MAX,
    REQUEST_TIMEOUT_S,
)

_log = structlog.get_logger(part="bus")

_ANSWERS_MAX = 65_536  # answers between two turns of the loop; past it they are dropped, and their askers time out
_FLUSHES_MAX = 65_536  # nats-py's queue of flushes: never full, because waiting on it would swallow a cancellation
_LINK_POLL_S = 0.01  # how often a blocked link is looked at

OnMessage = Callable[[Msg], Awaitable[None]]


class Waiter:
    """One asker: done with its first message or, for a batch, with the status message that closes it."""

    __slots__ = ("_batch", "done", "messages")

    def __init__(self, *, batch: bool) -> None:
        self.messages: list[Msg] = []
        self.done: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._batch = batch

    def deliver(self, message: Msg) -> None:
        if self.done.done():
            return
        if self._batch and wire.status_of(message.headers) is None:
            self.messages.append(message)
        else:
            self.done.set_result(message)

    def fail(self, error: BusError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Mailbox:
    """The permanent inbox of a connection, and who waits on which subject below it."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._numbers = itertools.count(1)
        self._waiting: dict[str, Waiter] = {}

    def open(self, *, batch: bool = False) -> tuple[str, Waiter]:
        subject = f"{self.prefix}.{next(self._numbers)}"
        waiter = self._waiting[subject] = Waiter(batch=batch)
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


class Link:
    """A connection that comes back for ever. `on_lost` callbacks run at each loss, and at the close."""

    def __init__(self, inbox_prefix: str) -> None:
        self.counts = BusCounts()
        self.gone = False  # closed, by us or for good
        self.on_lost: set[Callable[[], None]] = set()
        self._client = LeanClient()
        self._mailbox = Mailbox(f"{inbox_prefix}.{clock.random_token(8)}")
        self._subjects = itertools.count(1)
        self._inboxes: dict[NatsSubscription, Inbox] = {}
        self._up = asyncio.Event()
        self._said = "no answer"  # the last error while not connected: the server's own word before the network's
        self._told = False  # it is the server's

    # --- life ------------------------------------------------------------------------------------------------

    async def connect(self, url: str, user: str | None, password: str | None, name: str, timeout_s: float) -> None:
        """The first connection; `url` may name several servers, separated by commas. Raises BusTimeoutError."""
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._client.close)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._client.connect(
                        url.split(","),
                        user=user,
                        password=password,
                        name=name,
                        error_cb=self._on_error,
                        disconnected_cb=self._on_disconnected,
                        reconnected_cb=self._on_reconnected,
                        closed_cb=self._on_closed,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=BUS_RECONNECT_S_MAX,  # type: ignore[arg-type]  # slept: fractions will do
                        reconnect_to_server_handler=_jittered,
                        ping_interval=BUS_PING_S,  # type: ignore[arg-type]
                        max_outstanding_pings=2,
                        pending_size=0,
                        flusher_queue_size=_FLUSHES_MAX,
                    )
                    await self._client.subscribe(
                        f"{self._mailbox.prefix}.*", cb=self._mailbox.on_message, pending_msgs_limit=_ANSWERS_MAX
                    )
            except TimeoutError:
                where = ", ".join(_place(one) for one in url.split(","))
                raise BusTimeoutError(f"no NATS at {where} within {timeout_s:g} s: {self._said}") from None
            undo.pop_all()
        self._up.set()

    @property
    def connected(self) -> bool:
        return self._up.is_set() and self._client.is_connected and not self.gone

    async def close(self) -> None:
        """Leave; `flush` first for what should still arrive."""
        await self._on_closed()
        try:
            async with asyncio.timeout(BUS_CLOSE_S):
                await self._client.close()
        except TimeoutError:
            _log.warning("bus_close_timeout")

    async def _on_disconnected(self) -> None:
        if self.gone:
            return
        self.counts.disconnects += 1
        self._up.clear()
        _log.warning("bus_disconnected")
        self._mailbox.fail_all(lambda: BusTimeoutError("the connection was lost; the effect is unknown"))
        self._tell_lost()

    async def _on_reconnected(self) -> None:
        self._up.set()
        _log.info("bus_reconnected")

    async def _on_closed(self) -> None:
        self.gone = True
        self._up.set()  # whoever waits for the connection learns that there will be none
        self._mailbox.fail_all(lambda: BusClosedError("the bus is closed"))
        for inbox in self._inboxes.values():
            inbox.bus_gone()
        self._tell_lost()

    def _tell_lost(self) -> None:
        for tell in list(self.on_lost):
            tell()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counts.inbox_dropped += 1
            inbox = self._inboxes.get(error.sub)
            if inbox is not None:
                inbox.dropped += 1
        elif self.connected:
            self.counts.errors += 1
            _log.warning("bus_error", error=f"{type(error).__name__}: {error}")
        else:
            told = isinstance(error, nats.errors.Error)  # a refusal is often followed, or hidden, by a reset
            if told or not self._told:
                self._said, self._told = str(error) or type(error).__name__, told

    # --- sending ---------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Until the connection stands and takes more; the caller holds the deadline. Raises BusClosedError."""
        while not self.connected or self._client.pending_data_size > BUS_UNSENT_BYTES_MAX:
            if self.gone:
                raise BusClosedError("the bus is closed")
            if self._up.is_set() and self._client.is_connected:
                await asyncio.sleep(_LINK_POLL_S)
            else:
                self._up.clear()  # the loss is a moment older than its callback
                await self._up.wait()

    async def send(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Hand to the connection, without waiting. Raises BusTimeoutError when there is none at this moment."""
        _check_length(subject, reply)
        try:
            await self._client.publish(subject, data, reply, dict(headers) if headers else None)
        except nats.errors.MaxPayloadError:
            raise BusError(f"{len(data)} bytes are more than the bus takes on {subject}") from None
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError):
            raise BusError(f"{subject!r} is no subject, or its headers are no headers") from None
        except nats.errors.OutboundBufferLimitError:
            raise BusTimeoutError(f"no connection to send {subject} on") from None
        except nats.errors.ConnectionClosedError:
            raise BusClosedError("the bus is closed") from None

    async def publish(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Fire and forget: dropped and counted while there is no connection, or it is blocked."""
        if self.gone:
            raise BusClosedError("the bus is closed")
        if self.connected and self._client.pending_data_size <= BUS_UNSENT_BYTES_MAX:
            await self.send(subject, data, reply, headers)
        else:
            self.counts.published_dropped += 1

    async def ask(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        batch: bool = False,
    ) -> tuple[Msg, list[Msg]]:
        """Publish with a reply subject and wait: the answer (or the closing status) and the batch before it."""
        reply = ""
        try:
            async with asyncio.timeout(timeout_s):
                await self.ready()
                reply, waiter = self._mailbox.open(batch=batch)
                await self.send(subject, data, reply, headers)
                answer = await waiter.done
        except TimeoutError:
            raise BusTimeoutError(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            self._mailbox.close(reply)
        if not answer.data and wire.status_of(answer.headers) == wire.STATUS_NO_RESPONDERS:
            raise NoRespondersError(f"nobody listens on {subject}")
        return answer, waiter.messages

    async def flush(self, timeout_s: float) -> None:
        """A message to ourselves: when it is back, the server has seen all we sent before it."""
        reply = ""
        try:
            async with asyncio.timeout(timeout_s):
                await self.ready()
                reply, waiter = self._mailbox.open()
                await self.send(reply, b"")
                await waiter.done
        except TimeoutError:
            raise BusTimeoutError("the server does not answer, or forbids us our own inbox") from None
        finally:
            self._mailbox.close(reply)

    # --- listening -------------------------------------------------------------------------------------------

    def own_subject(self) -> str:
        """A new subject below our inbox, for a permanent subscription."""
        return f"{self._mailbox.prefix}.own.{next(self._subjects)}"

    async def listen(self, subject: str, queue: str, on_message: OnMessage, most: int) -> NatsSubscription:
        """A subscription with a callback; taken up again after each reconnect."""
        _check_length(subject, queue)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self.ready()
                # nats-py's queue only bridges to an inbox of ours, which is the bound: half as much again lets it be.
                return await self._client.subscribe(
                    subject, queue=queue, cb=on_message, pending_msgs_limit=most + most // 2 + 64
                )
        except TimeoutError:
            raise BusTimeoutError(f"no connection to subscribe {subject} on") from None
        except nats.errors.BadSubjectError:
            raise BusError(f"{subject!r} is no subject to subscribe to") from None

    async def subscribe(self, subject: str, queue: str, inbox_max: int) -> Inbox:
        """A bounded inbox; returns once the server knows of it."""
        theirs: NatsSubscription | None = None

        async def leave() -> None:
            if theirs is not None:
                self._inboxes.pop(theirs, None)
                await unsubscribe(theirs)

        inbox = Inbox(inbox_max, leave)

        async def on_message(message: Msg) -> None:
            inbox.put(bus_message(message))

        theirs = await self.listen(subject, queue, on_message, inbox_max)
        self._inboxes[theirs] = inbox
        try:
            await self.flush(REQUEST_TIMEOUT_S)
        except BaseException:
            await inbox.close()
            raise
        return inbox


async def unsubscribe(subscription: NatsSubscription) -> None:
    try:
        await subscription.unsubscribe()
    except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
        return  # nothing left to leave


def bus_message(message: Msg) -> BusMessage:
    return BusMessage(message.subject, message.data, message.reply, message.headers or {})


def _check_length(*names: str) -> None:
    """The server would end the connection, and nats-py would not come back."""
    if any(len(name) > BUS_SUBJECT_CHARS_MAX for name in names):
        raise BusError(f"a subject is at most {BUS_SUBJECT_CHARS_MAX} characters long")


def _place(url: str) -> str:
    """Host and port alone: a URL may hold a password."""
    parts = urlsplit(url)
    return f"{parts.hostname or url}:{parts.port or 4222}"


def _jittered(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """Which server to try next, and after how long: the clients of a lost server must not come back all at once."""
    spread = BUS_RECONNECT_S_MAX - BUS_RECONNECT_S_MIN
    return min(servers, key=lambda server: server.reconnects), BUS_RECONNECT_S_MIN + spread * clock.random_unit()
