"""A reply's token log as lines for a person. Pure.

SEQ  TIME          KIND      RANGE       TEXT
7  12:00:00.120  accepted              smollm2-135m, paid, at most 64 tokens, prompt of 31 tokens
9  12:00:00.131  open                  attempt 1 on replica-1 by router-1, from token 0
12  12:00:00.190  chunk     [0, 1)      'Hello'
"""

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from shared.bus import StreamMessage
from shared.messages import Accepted, Chunk, End, Entry, Open, decoder

HEADER = ("SEQ", "TIME (UTC)", "KIND", "RANGE", "TEXT")
_entry: msgspec.msgpack.Decoder[Entry] = decoder(Entry)  # type: ignore[arg-type]  # a union is a type to msgspec


def columns(message: StreamMessage) -> tuple[str, str, str, str, str]:
    """One entry: sequence, time stored, kind, token range, and what it says. Raises msgspec.DecodeError."""
    entry = _entry.decode(message.data)
    time = datetime.fromtimestamp(message.stored_s, UTC).strftime("%H:%M:%S.%f")[:-3]
    token_range, text = _said(entry)
    return str(message.seq), time, type(entry).__name__.lower(), token_range, text


def _said(entry: Entry) -> tuple[str, str]:
    match entry:
        case Accepted():
            return "", (
                f"{entry.model}, {entry.tier.value}, at most {entry.budget} tokens, prompt of {entry.input_tokens}, "
                f"seed {entry.seed}, for {entry.org}/{entry.user}"
            )
        case Open():
            return "", f"attempt {entry.attempt} on {entry.replica} by {entry.router}, from token {entry.first_index}"
        case Chunk():
            return f"[{entry.first_index}, {entry.first_index + entry.count})", repr(entry.text)
        case End():
            unchecked = "" if entry.checked else ", unchecked"
            detail = f": {entry.detail}" if entry.detail else ""
            return "", f"{entry.reason.value} by {entry.by}{unchecked}{detail}"


def table(messages: Iterable[StreamMessage]) -> list[str]:
    """All entries as aligned lines, a header first."""
    rows = [HEADER, *(columns(message) for message in messages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    return [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]) for row in rows
    ]
