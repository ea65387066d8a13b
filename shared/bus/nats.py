"""The bus on a real NATS server: core subjects by `nats_link`, JetStream's API spoken directly, pulls by `nats_pull`.

A NATS user needs, beside the subjects it speaks on: publish on the parts of $JS.API.> it uses, on the $JS.ACK.> of
what it pulls, and publish and subscribe on its own <inbox prefix>.> (a subscription is confirmed by a message to
oneself). What it publishes without permission is lost, so its requests time out; the log says why.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from shared.bus import BusCounts, BusMessage, ConsumerSpec, StreamMessage, StreamSpec, wire
from shared.bus.inbox import Inbox
from shared.bus.nats_link import Link, bus_message
from shared.bus.nats_pull import NatsPuller
from shared.errors import BusError
from shared.limits import (
    BUS_CLOSE_S,
    BUS_CONNECT_S,
    BUS_READ_S,
    CATCH_UP_BATCH,
    INBOX_MESSAGES_MAX,
    REQUEST_TIMEOUT_S,
)

_Answer = TypeVar("_Answer")
_publish_ack = msgspec.json.Decoder(wire.PublishAck)
_stream_info = msgspec.json.Decoder(wire.StreamInfo)
_log = structlog.get_logger(part="bus")


async def connect(
    url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    name: str = "chorus",
    inbox_prefix: str = "_INBOX",
    timeout_s: float = BUS_CONNECT_S,
) -> "NatsBus":
    """A bus that reconnects for ever. `url` may name several servers, separated by commas.

    Raises BusTimeoutError, with what the server last said, when there is no connection within `timeout_s`.
    """
    link = Link(inbox_prefix)
    await link.connect(url, user, password, name, timeout_s)
    return NatsBus(link)


class NatsBus:
    """The `Bus` port on one NATS connection. Made by `connect`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pullers: list[NatsPuller] = []

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def counts(self) -> BusCounts:
        return self._link.counts

    # --- core subjects -------------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        await self._link.publish(subject, data, reply, headers)

    async def request(self, subject: str, data: bytes, *, timeout_s: float = REQUEST_TIMEOUT_S) -> BusMessage:
        answer, _ = await self._link.ask(subject, data, timeout_s=timeout_s)
        return bus_message(answer)

    async def subscribe(self, subject: str, *, queue: str = "", inbox_max: int = INBOX_MESSAGES_MAX) -> Inbox:
        return await self._link.subscribe(subject, queue, inbox_max)

    # --- streams -------------------------------------------------------------------------------------

    async def apply(self, streams: Sequence[StreamSpec], consumers: Sequence[ConsumerSpec]) -> None:
        for stream in streams:
            config = wire.stream_config(stream)
            made = await self._ask_api(f"STREAM.CREATE.{stream.name}", config)
            if made.error is not None and made.error.err_code == wire.ERR_NAME_IN_USE:
                made = await self._ask_api(f"STREAM.UPDATE.{stream.name}", config)
            wire.check(made.error, stream.name)
        for consumer in consumers:
            await self._api(f"CONSUMER.CREATE.{consumer.stream}.{consumer.name}", wire.consumer_config(consumer))

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
        answer, _ = await self._link.ask(subject, data, headers=sent, timeout_s=timeout_s)
        ack = _decoded(_publish_ack, answer)
        wire.check(ack.error, subject)
        return ack.seq

    async def read(self, stream: str, subject: str, *, from_seq: int, most: int) -> list[StreamMessage]:
        found: list[StreamMessage] = []
        while len(found) < most:
            body = wire.read_body(subject, from_seq, min(CATCH_UP_BATCH, most - len(found)))
            end, batch = await self._link.ask(f"{wire.API}.DIRECT.GET.{stream}", body, timeout_s=BUS_READ_S, batch=True)
            found += [_stored(message) for message in batch]
            headers = end.headers or {}
            status = wire.status_of(headers)
            if status == wire.STATUS_NOT_FOUND:
                break
            if status != wire.STATUS_END_OF_BATCH:
                raise BusError(f"reading {subject}: status {status} {headers.get(wire.HEADER_DESCRIPTION, '')}")
            if not batch or headers.get(wire.HEADER_PENDING, "0") == "0":
                break
            from_seq = found[-1].seq + 1
        return found

    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        answer, _ = await self._link.ask(f"{wire.API}.DIRECT.GET.{stream}.{subject}", b"", timeout_s=BUS_READ_S)
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

    async def _api(self, verb: str, body: dict[str, Any] | None) -> wire.StreamInfo:
        info = await self._ask_api(verb, body)
        wire.check(info.error, verb)
        return info

    async def _ask_api(self, verb: str, body: dict[str, Any] | None) -> wire.StreamInfo:
        data = msgspec.json.encode(body) if body is not None else b""
        answer, _ = await self._link.ask(f"{wire.API}.{verb}", data, timeout_s=REQUEST_TIMEOUT_S)
        return _decoded(_stream_info, answer)

    # --- deliveries ----------------------------------------------------------------------------------

    def puller(self, stream: str, consumer: str) -> NatsPuller:
        puller = NatsPuller(self._link, stream, consumer)
        self._pullers = [one for one in self._pullers if not one.closed] + [puller]
        return puller

    async def extend(self, ack_subject: str) -> None:
        await self._link.publish(ack_subject, wire.EXTEND, "", None)

    async def ack(self, ack_subject: str) -> None:
        await self._link.ask(ack_subject, wire.ACK, timeout_s=REQUEST_TIMEOUT_S)

    async def nak(self, ack_subject: str, delay_s: float = 0.0) -> None:
        await self._link.publish(ack_subject, wire.nak_body(delay_s), "", None)

    async def close(self) -> None:
        if self._link.gone:
            return
        try:
            for puller in self._pullers:
                await puller.close()
            if self.connected:
                await self._link.flush(BUS_CLOSE_S)
        except BusError as error:
            _log.warning("bus_closed_unflushed", error=str(error))
        await self._link.close()


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
