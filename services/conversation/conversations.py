"""Where a message of a conversation stands: behind the head, or where it branches off; what is being written is ended.

One reply is in flight per conversation. A send reads the conversation's version; once nothing speaks against it any
more it ends what is in flight, and begins only if the version is still the same: of two at once one begins, and the
other reads again and ends that one.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from services.conversation.conversation_store import ConversationStore
from shared import clock
from shared.bus import Bus
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.limits import CONVERSATION_REPLIES_MAX
from shared.log_store import LogStore
from shared.messages import ROOT, Cancel, End, SendMessage, encode
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import Journal

_END_S = 2.0
_STILL_BEGINNING = Refusal(
    kind=RefusalKind.UNAVAILABLE,
    message="The reply before this one is only just beginning. Try again in a moment.",
    retry_after_s=1.0,
)
_POLL_S = 0.02


class Place(NamedTuple):
    """The turn before (None: the message begins the conversation), the conversation's version then, and its replies
    that are not known to have ended.
    """

    parent_id: str | None
    version: int
    epoch: int
    in_flight: Sequence[str] = ()


class Conversations:
    """One reply is in flight per conversation: a newer message ends it as `superseded`."""

    def __init__(
        self, *, name: str, names: Names, store: ConversationStore, logs: LogStore, bus: Bus, journal: Journal
    ) -> None:
        self._name, self._names = name, names
        self._store, self._logs, self._bus, self._journal = store, logs, bus, journal

    async def place(self, message: SendMessage) -> Place:
        """What the message follows; raises RefusedError: NOT_FOUND, BAD_REQUEST."""
        conversation_id = message.echo.conversation_id or ""
        if not message.echo.store:
            raise _bad("A reply in a conversation is stored: leave `store` out, or leave `conversation` out.", "store")
        line = await self._store.line(message.principal, conversation_id)
        if line is None:
            raise no_conversation(conversation_id, "conversation")
        if line.version >= CONVERSATION_REPLIES_MAX:
            raise _bad(
                f"This conversation has {line.version} replies, which is the most. Begin another.", "conversation"
            )
        parent_id = line.head_id
        if message.branch_from is not None:
            parent_id = None if message.branch_from == ROOT else message.branch_from
            if parent_id and not await self._store.holds(message.principal, conversation_id, parent_id):
                raise no_branch(parent_id)
        return Place(parent_id, line.version, line.epoch, line.in_flight)

    async def supersede(self, reply_id: str) -> None:
        """End it; its text so far is the turn. One that was stored a moment ago gets its log in a moment."""
        end = End(reason=EndReason.SUPERSEDED, by=self._name, ended_s=clock.wall_s())
        give_up_s = clock.now_s() + _END_S
        while True:
            try:
                view = await self._logs.end(reply_id, end, _END_S)
                break
            except LogGoneError:
                return
            except TokenLogError:
                if clock.now_s() >= give_up_s:
                    raise RefusedError(_STILL_BEGINNING) from None  # else two would be in flight once it has begun
                await asyncio.sleep(_POLL_S)
        reason = end.reason if view.ended is None else view.ended.reason
        self._journal.note("reply_superseded", reply_id, ended_as=reason.value)
        await self._bus.publish(self._names.cancel(reply_id), encode(Cancel(reply_id=reply_id, reason=reason)))


def no_conversation(conversation_id: str, param: str | None = None) -> RefusedError:
    """Unknown and foreign ones alike."""
    said = f"No conversation {conversation_id} was found."
    return RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message=said, param=param))


def no_branch(reply_id: str, param: str = "branch_from") -> RefusedError:
    said = f"No reply {reply_id} was found in this conversation."
    return RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message=said, param=param))


def _bad(said: str, param: str) -> RefusedError:
    return RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=said, param=param))
