"""Histories of active conversations in Valkey, so that a message does not read the whole of it from the rows again.

A history is of one epoch of its conversation. Whenever something that was said is taken back the epoch moves on; the
rows say which one counts, so an old history is never used. Taking back also removes it, and leaves a mark so that
nobody who read before puts it back. Without Valkey everything is read from the rows.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.conversation.figures import Figures
from services.conversation.rows import Turn
from shared.errors import ValkeyAwayError
from shared.limits import HISTORY_CACHE_BYTES_MAX, HISTORY_CACHE_S
from shared.messages import Principal
from shared.valkey import Script, Valkey

SCRIPT = Script((Path(__file__).parent / "lua" / "remember.lua").read_text(encoding="utf-8"))
GONE = 1 << 52  # no epoch of a deleted conversation counts any more


class HistoryName(msgspec.Struct, frozen=True, array_like=True):
    """Whose history of what it is. It stands in the entry too: one that says otherwise is not ours."""

    org: str
    user: str
    conversation_id: str
    epoch: int


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: HistoryName
    last_id: str  # the newest turn in it; all of them have ended
    tokens_max: int  # what it was read for; older turns are left out
    turns: list[Turn]


class History(msgspec.Struct, frozen=True):
    """Turns up to `last_id`, oldest first."""

    last_id: str
    turns: list[Turn]


_encode = msgspec.msgpack.Encoder().encode
_entry = msgspec.msgpack.Decoder(_Entry)


class HistoryCache:
    """`valkey` None: nothing is remembered."""

    def __init__(self, valkey: Valkey | None, region: str, figures: Figures) -> None:
        self._valkey, self._region, self._figures = valkey, region, figures

    async def get(self, name: HistoryName, tokens_max: int) -> History | None:
        """What is remembered, if it is enough for `tokens_max`."""
        if self._valkey is None:
            return None
        try:
            found = await self._valkey.call("GET", self._key(name.conversation_id))
            entry = None if not found or found.startswith(b"E") else _entry.decode(found)
        except ValkeyAwayError:
            entry = None
        except msgspec.DecodeError:  # of another version of us
            entry = None
        if entry is not None and not _same_owner(entry.name, name):
            self._figures.histories.labels("foreign").inc()
            entry = None
        if entry is None or entry.name.epoch != name.epoch or entry.tokens_max < tokens_max:
            self._figures.histories.labels("miss").inc()
            return None
        self._figures.histories.labels("hit").inc()
        return History(entry.last_id, entry.turns)

    async def remember(self, name: HistoryName, last_id: str, tokens_max: int, turns: Sequence[Turn]) -> None:
        if self._valkey is None:
            return
        data = _encode(_Entry(name, last_id, tokens_max, list(turns)))
        if len(data) > HISTORY_CACHE_BYTES_MAX:
            return
        try:
            arguments: list[str | int | bytes] = [data, name.epoch, round(HISTORY_CACHE_S)]
            await self._valkey.run(SCRIPT, [([self._key(name.conversation_id)], arguments)])
        except ValkeyAwayError:
            return  # read from the rows next time

    async def forget(self, conversation_id: str | None, epoch: int = GONE) -> None:
        """Something in it was taken back at `epoch`."""
        if self._valkey is None or conversation_id is None:
            return
        try:
            await self._valkey.call("SET", self._key(conversation_id), f"E{epoch}", "EX", round(HISTORY_CACHE_S))
        except ValkeyAwayError:
            return  # never used again, and gone when its time is over

    def _key(self, conversation_id: str) -> str:
        return f"{self._region}:history:{conversation_id}"


def _same_owner(one: HistoryName, other: HistoryName) -> bool:
    return (one.org, one.user, one.conversation_id) == (other.org, other.user, other.conversation_id)


def name_of(who: Principal, conversation_id: str, epoch: int) -> HistoryName:
    return HistoryName(who.org, who.user, conversation_id, epoch)
