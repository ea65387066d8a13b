"""What a message in a conversation follows: its newest reply, which is superseded when it is still being written."""

import asyncio

from services.conversation.store import Store
from shared import clock
from shared.bus import Bus
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.log_store import LogStore
from shared.messages import Cancel, End, SendMessage, encode
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import Journal

_END_S = 2.0
_POLL_S = 0.02


class Conversations:
    """One reply is in flight per conversation: a newer message ends it as `superseded`."""

    def __init__(self, *, name: str, names: Names, store: Store, logs: LogStore, bus: Bus, journal: Journal) -> None:
        self._name, self._names = name, names
        self._store, self._logs, self._bus, self._journal = store, logs, bus, journal

    async def parent(self, message: SendMessage) -> str | None:
        """The newest reply of the message's conversation, ended; raises RefusedError: NOT_FOUND, BAD_REQUEST."""
        conversation_id = message.echo.conversation_id or ""
        if not message.echo.store:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.BAD_REQUEST,
                    message="A reply in a conversation is stored: leave `store` out, or leave `conversation` out.",
                    param="store",
                )
            )
        found = await self._store.conversation(message.principal, conversation_id)
        if found is None:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.NOT_FOUND,
                    message=f"No conversation {conversation_id} was found.",
                    param="conversation",
                )
            )
        if found.head_id is not None and not found.head_ended:
            await self._supersede(found.head_id)
        return found.head_id

    async def _supersede(self, reply_id: str) -> None:
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
                    return
                await asyncio.sleep(_POLL_S)
        reason = end.reason if view.ended is None else view.ended.reason
        self._journal.note("reply_superseded", reply_id, ended_as=reason.value)
        await self._bus.publish(self._names.cancel(reply_id), encode(Cancel(reply_id=reply_id, reason=reason)))
