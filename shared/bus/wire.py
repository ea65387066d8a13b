"""What JetStream's API looks like on the wire: names, JSON and headers, as values. Pure: nothing is sent here.

streams     $JS.API.STREAM.CREATE|UPDATE|INFO|PURGE.<stream>
consumers   $JS.API.CONSUMER.CREATE|MSG.NEXT.<stream>.<consumer>
reads       $JS.API.DIRECT.GET.<stream>[.<subject>]
deliveries  $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from shared.bus import ConsumerSpec, Delivery, StreamSpec
from shared.errors import BusError, BusTimeoutError, StreamFullError, WrongLastSequenceError
from shared.limits import CATCH_UP_BYTES_MAX

API = "$JS.API"
NANOSECONDS = 1_000_000_000

HEADER_STATUS = "Status"
HEADER_DESCRIPTION = "Description"
HEADER_EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
HEADER_MESSAGE_ID = "Nats-Msg-Id"
HEADER_SEQUENCE = "Nats-Sequence"
HEADER_LAST_SEQUENCE = "Nats-Last-Sequence"  # on a republished message: its subject's previous entry
HEADER_SUBJECT = "Nats-Subject"
HEADER_STREAM = "Nats-Stream"
HEADER_TIME = "Nats-Time-Stamp"
HEADER_PENDING = "Nats-Num-Pending"

ACK = b"+ACK"
NAK = b"-NAK"
EXTEND = b"+WPI"

STATUS_END_OF_BATCH = "204"
STATUS_NOT_FOUND = "404"
STATUS_EXPIRED = "408"
STATUS_NO_RESPONDERS = "503"

ERR_NAME_IN_USE = 10058  # a stream of that name stands with another configuration
_ERR_WRONG_LAST = frozenset({10071, 10164})
# the stream's own bound, then what the server or the account may still store
_ERR_FULL = frozenset({10077, 10002, 10023, 10028, 10047})
_ERR_NOT_NOW = frozenset({10008, 10009})  # a cluster without a leader; clients try again


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PublishAck(msgspec.Struct, frozen=True):
    """The answer to an append."""

    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class StreamState(msgspec.Struct, frozen=True):
    bytes: int = 0
    messages: int = 0


class StreamInfo(msgspec.Struct, frozen=True):
    """The answer to STREAM.CREATE, UPDATE, INFO; other API answers are read for their `error` alone."""

    created: str = ""
    state: StreamState = StreamState()
    error: ApiError | None = None


def error_of(error: ApiError, subject: str) -> BusError:
    """The exception for what the server said about `subject`."""
    if error.err_code in _ERR_WRONG_LAST:
        standing = error.description.rpartition(":")[2].strip()
        return WrongLastSequenceError(subject, int(standing) if standing.isdigit() else None)
    text = f"{error.description} (err_code {error.err_code}) on {subject}"
    if error.err_code in _ERR_FULL:
        return StreamFullError(text)
    return BusTimeoutError(text) if error.err_code in _ERR_NOT_NOW else BusError(text)


def check(error: ApiError | None, subject: str) -> None:
    """Raises what the server said, if it said no."""
    if error is not None:
        raise error_of(error, subject)


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """A stream as STREAM.CREATE and UPDATE want it. All of ours say no when full rather than forget the oldest."""
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "storage": "memory" if spec.in_memory else "file",
        "discard": "new",
        "num_replicas": spec.replicas,
        "max_msgs": spec.max_messages,
        "max_bytes": spec.max_bytes,
        "max_age": int(spec.max_age_s * NANOSECONDS),
        "max_msgs_per_subject": spec.history or -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "duplicate_window": int(spec.deduplication_s * NANOSECONDS),
        "allow_direct": True,
    }
    if spec.history:  # as the key-value API declares its buckets
        config |= {"allow_rollup_hdrs": True, "deny_delete": True}
    if spec.republish_to is not None:
        config["republish"] = {"src": spec.subjects[0], "dest": spec.republish_to}
    return config


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    """The body of CONSUMER.CREATE: a durable pull consumer whose stream's bound governs."""
    return {
        "stream_name": spec.stream,
        "config": {
            "durable_name": spec.name,
            "name": spec.name,
            "filter_subject": spec.filter_subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(spec.ack_wait_s * NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": -1,
            "max_waiting": 512,
            "replay_policy": "instant",
        },
    }


def read_body(subject: str, from_seq: int, most: int) -> bytes:
    """A batched direct get: `subject`'s messages from `from_seq` on; answers end with status 204 or 404."""
    return msgspec.json.encode(
        {"seq": max(1, from_seq), "next_by_subj": subject, "batch": most, "max_bytes": CATCH_UP_BYTES_MAX}
    )


def pull_body(most: int, expires_s: float) -> bytes:
    return msgspec.json.encode({"batch": most, "expires": max(1_000_000, int(expires_s * NANOSECONDS))})


def nak_body(delay_s: float) -> bytes:
    return NAK if delay_s <= 0 else NAK + b' {"delay": %d}' % int(delay_s * NANOSECONDS)


def parse_time_s(text: str) -> float:
    """RFC 3339 with up to nanoseconds -> seconds since the epoch."""
    head, _, fraction = text.rstrip("Z").partition(".")
    whole = datetime.fromisoformat(head + "+00:00").timestamp()
    return whole + (float("0." + fraction) if fraction else 0.0)


def delivery_of(subject: str, data: bytes, ack_subject: str) -> Delivery:
    """A delivery, read from its ack subject; raises ValueError for what is not one."""
    tokens = ack_subject.split(".")
    if len(tokens) < 9 or tokens[0] != "$JS" or tokens[1] != "ACK":
        raise ValueError(f"{ack_subject!r} is not an ack subject")
    # with a domain and an account hash two tokens stand before the stream's name
    delivered, stream_seq, _, stored_ns = tokens[4:8] if len(tokens) == 9 else tokens[6:10]
    return Delivery(
        subject=subject,
        data=data,
        seq=int(stream_seq),
        delivered=int(delivered),
        stored_s=int(stored_ns) / NANOSECONDS,
        ack_subject=ack_subject,
    )


def status_of(headers: Mapping[str, str] | None) -> str | None:
    """The three digits of a status message, None for an ordinary one."""
    return headers.get(HEADER_STATUS) if headers else None
