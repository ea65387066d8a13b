"""What stands in conversation's rows, as values, and how a row is read. Pure.

Columns that hold text are JSON (`TextContent` and the like), so that any character comes back as it went in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from services.conversation.replies import Event, State, before
from shared.messages import Accepted, InputItem, ReplyView, Sampling, Usage, unpack_ids
from shared.outcomes import EndReason


class TextContent(msgspec.Struct, frozen=True, kw_only=True, tag="text", tag_field="kind"):
    """A typed item's content, as its row holds it. Only text so far."""

    text: str


@dataclass(frozen=True)
class EncodedItem:
    item: InputItem
    ids: list[int]


@dataclass(frozen=True)
class IdempotencyKey:
    key: str
    body_hash: bytes


@dataclass(frozen=True)
class Claim:
    """What an idempotency key stands for."""

    reply_id: str
    body_hash: bytes
    queued: bool


@dataclass(frozen=True)
class Line:
    """A conversation as a send sees it. `in_flight` are replies that are not known to have ended."""

    head_id: str | None
    version: int
    epoch: int
    in_flight: Sequence[str]


@dataclass(frozen=True)
class NewReply:
    """Everything of a stored reply at its start. `parent_id` is the turn before it; `line_version` its
    conversation's, when that was read.
    """

    accepted: Accepted
    parent_id: str | None
    sampling: Sampling
    tokenizer: str
    items: Sequence[EncodedItem]
    lane_subject: str
    request: bytes  # GenerateRequest
    line_version: int = 0


@dataclass(frozen=True)
class Turn:
    """A reply and its message as context of a later one. Of a turn past the limit only pinned items are here."""

    reply_id: str
    state: State
    items: Sequence[EncodedItem]
    tokenizer: str
    reason: EndReason | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    pinned_only: bool = False
    replied: bool = True  # False: items that nobody replied to


@dataclass(frozen=True)
class StoredReply:
    view: ReplyView
    state: State


@dataclass(frozen=True)
class Queued:
    """An outbox row: a request that was stored and perhaps not queued."""

    reply_id: str
    subject: str
    request: bytes


@dataclass(frozen=True)
class Overdue:
    """A reply that should have ended; `detail` says why it was given up, when it was."""

    accepted: Accepted
    detail: str


class Cause(StrEnum):
    """Why a log is to be removed."""

    DELETED = "deleted"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True)
class Purge:
    reply_id: str
    cause: Cause


class Archived(StrEnum):
    STORED = "stored"
    ALREADY = "already"  # a second delivery of the same end
    NO_ROW = "no_row"  # sent with store=false, or deleted meanwhile


_content = msgspec.json.Decoder(TextContent)
_output = msgspec.json.Decoder(tuple[TextContent, ...])
_accepted = msgspec.json.Decoder(Accepted)
_sampling = msgspec.json.Decoder(Sampling)


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def guard(event: Event) -> list[str]:
    return [state.value for state in before(event)]


def read_item(row: Any) -> InputItem:
    return InputItem(role=row["role"], text=_content.decode(row["content"]).text, id=row["id"])


def read_output(row: Any) -> str:
    return "".join(part.text for part in _output.decode(row["output"]))


def read_turn(row: Any, items: Sequence[EncodedItem]) -> Turn:
    return Turn(
        reply_id=row["id"],
        state=State(row["status"]),
        items=items,
        tokenizer=row["tokenizer"],
        reason=None if row["reason"] is None else EndReason(row["reason"]),
        text=read_output(row),
        ids=unpack_ids(row["token_ids"]),
        replied=row["kind"] == "reply",
    )


def read_reply(row: Any) -> StoredReply:
    state = State(row["status"])
    ended = state is State.ENDED
    usage = Usage(
        input_tokens=row["input_tokens"], output_tokens=row["output_tokens"], cached_tokens=row["cached_tokens"]
    )
    view = ReplyView(
        accepted=read_accepted(row),
        text=read_output(row),
        ids=row["token_ids"],
        reason=EndReason(row["reason"]) if ended else None,
        usage=usage if ended else None,
        checked=row["checked"],
        withdrawn=row["withdrawn"],
        log_alive=False,
        ended_s=row["ended_s"],
        detail=row["detail"],
    )
    return StoredReply(view, state)


def read_accepted(row: Any) -> Accepted:
    return _accepted.decode(row["accepted"])


def read_sampling(row: Any) -> Sampling:
    return _sampling.decode(row["sampling"])
