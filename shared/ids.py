"""Identifiers: sortable, opaque to clients, and free of dots (a dot separates NATS subject tokens).

resp_<region><shard:2 hex><ULID:26>      a reply; region and log shard are read back from the id
conv_<ULID>  msg_<ULID>  key_<ULID>      rows; no placement in them
"""

import re
from typing import NamedTuple

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID_CHARS = 26
_REPLY = re.compile(r"^resp_([a-z][a-z0-9]{0,15}?)([0-9a-f]{2})([0-9A-HJKMNP-TV-Z]{26})$")
_CONVERSATION = re.compile(r"conv_[0-9A-HJKMNP-TV-Z]{26}")
_ITEM = re.compile(r"msg_[0-9A-Za-z]{26,44}")  # of a message, or a reply's own
_CHAT_PREFIX = "chatcmpl-"
ENTROPY_BYTES = 10


class ReplyPlace(NamedTuple):
    """Where a reply's token log lies."""

    region: str
    shard: int


def ulid(now_ms: int, entropy: bytes) -> str:
    """26 characters that sort by `now_ms`; `entropy` is ENTROPY_BYTES random bytes."""
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a ULID takes {ENTROPY_BYTES} bytes of entropy, not {len(entropy)}")
    value = (now_ms << 80) | int.from_bytes(entropy, "big")
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


def reply_id(region: str, shard: int, now_ms: int, entropy: bytes) -> str:
    """A new reply id; `shard` is the log bucket number, 0..255."""
    if not 0 <= shard <= 0xFF:
        raise ValueError(f"shard {shard} is not in 0..255")
    made = f"resp_{region}{shard:02x}{ulid(now_ms, entropy)}"
    if _REPLY.match(made) is None:
        raise ValueError(f"region {region!r} must be 1-16 lower-case letters and digits, letter first")
    return made


def reply_place(reply: str) -> ReplyPlace | None:
    """Region and shard of a reply id, or None when `reply` is not one (client data: never trust it)."""
    tail = 2 + _ULID_CHARS
    if len(reply) <= len("resp_") + tail or _REPLY.match(reply) is None:
        return None
    return ReplyPlace(reply[5:-tail], int(reply[-tail:-_ULID_CHARS], 16))


def reply_made_s(reply: str) -> float:
    """When a reply id was made, seconds since the epoch; raises ValueError for what is none."""
    if reply_place(reply) is None:
        raise ValueError(f"{reply!r} is not a reply id")
    made_ms = 0
    for char in reply[-_ULID_CHARS:-16]:
        made_ms = made_ms * 32 + _CROCKFORD.index(char)
    return made_ms / 1000


def conversation_id(now_ms: int, entropy: bytes) -> str:
    return "conv_" + ulid(now_ms, entropy)


def is_conversation_id(said: str) -> bool:
    """Whether `said` (client data) can be one."""
    return _CONVERSATION.fullmatch(said) is not None


def item_id(now_ms: int, entropy: bytes) -> str:
    """The id of a stored input item."""
    return "msg_" + ulid(now_ms, entropy)


def is_item_id(said: str) -> bool:
    """Whether `said` (client data) can be the id of an item, a message's or a reply's."""
    return _ITEM.fullmatch(said) is not None


def key_id(now_ms: int, entropy: bytes) -> str:
    """The id of an API key's row: what is listed, logged and revoked."""
    return "key_" + ulid(now_ms, entropy)


def output_item_id(reply: str) -> str:
    """The reply's own text item: a pure function of the reply, so every gateway names it alike."""
    return "msg_" + reply.removeprefix("resp_")


def chat_id(reply: str) -> str:
    """The reply's name on the chat-completions door."""
    return _CHAT_PREFIX + reply.removeprefix("resp_")


def reply_of_chat(chat: str) -> str:
    return "resp_" + chat.removeprefix(_CHAT_PREFIX)
