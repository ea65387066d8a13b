"""What may be asked about a reply: get, cancel, delete, input items, withdraw; and whose key it is.

A reply is looked for in its log first: a running one needs no database, so it is undisturbed while that is away. An
ended one does: its rows may have been deleted, or its text taken back. Foreign and unknown ids have one answer.
"""

import msgspec

from services.conversation.archive import Archive
from services.conversation.history_cache import HistoryCache
from services.conversation.replies import State, never_written
from services.conversation.rows import Cause, StoredReply
from services.conversation.store import Store
from shared import clock
from shared.bus import Bus
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.ids import reply_place
from shared.limits import LOG_AGE_S
from shared.log_store import LogStore
from shared.messages import (
    Cancel,
    Done,
    End,
    InputItems,
    KeyFound,
    KeyLookup,
    Principal,
    ReplyRef,
    ReplyView,
    WithdrawReply,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import Journal
from shared.token_log import LogView

# A log that a router may still need is purged when its end arrives here, or after this: then it has aged out anyway.
PURGE_LATEST_S = LOG_AGE_S
_END_S = 3.0  # to bring an `end` to stand while a user waits


class Verbs:
    def __init__(
        self,
        *,
        name: str,
        names: Names,
        store: Store,
        logs: LogStore,
        bus: Bus,
        archive: Archive,
        journal: Journal,
        cache: HistoryCache,
        log_shards: int,
    ) -> None:
        self._cache = cache
        self._name, self._names, self._archive, self._log_shards = name, names, archive, log_shards
        self._store, self._logs, self._bus, self._journal = store, logs, bus, journal

    async def get(self, ref: ReplyRef) -> ReplyView:
        """Raises RefusedError: NOT_FOUND."""
        log = await self._log(ref)
        if log is not None and log.ended is None:
            return _log_view(log)
        stored = await self._store.reply(ref.principal, ref.reply_id)
        if log is None:
            return _found(ref, stored).view
        return await self._ended_view(ref, log, stored)

    async def _ended_view(self, ref: ReplyRef, log: LogView, stored: StoredReply | None) -> ReplyView:
        """A reply whose ended log still stands."""
        accepted = log.accepted
        if accepted is not None and not accepted.echo.store:
            cause = await self._store.purge_cause(ref.reply_id)
            if cause is Cause.DELETED:
                raise _not_found(ref)
            view = _log_view(log)
            return _taken_back(view) if cause is Cause.WITHDRAWN else view
        view = _found(ref, stored).view
        if _found(ref, stored).state is State.ENDED:
            return msgspec.structs.replace(view, log_alive=not view.withdrawn)
        return _taken_back(_log_view(log)) if view.withdrawn else _log_view(log)

    async def cancel(self, ref: ReplyRef) -> Done:
        """An `end` stands now: the user's stop, or whatever ended it before. Raises RefusedError: NOT_FOUND."""
        log = await self._log(ref)
        if log is None:
            await self._settle_unwritten(ref)
        elif log.ended is None:
            await self.stop(ref.reply_id)
        return Done()

    async def _settle_unwritten(self, ref: ReplyRef) -> None:
        """No log: it has ended long ago, or the outbox still has it, and then it is not queued any more."""
        stored = _found(ref, await self._store.reply(ref.principal, ref.reply_id))
        if stored.state is not State.ENDED:
            accepted, now_s = stored.view.accepted, clock.wall_s()
            await self._archive.store([never_written(accepted, EndReason.USER_STOP, "", now_s)])

    async def delete(self, ref: ReplyRef) -> Done:
        """A running reply is ended first. Raises RefusedError: NOT_FOUND."""
        view = await self.get(ref)
        if view.reason is None and view.log_alive:
            await self.stop(ref.reply_id)
        now_s = clock.wall_s()
        latest_s = now_s + PURGE_LATEST_S
        where = await self._store.delete(ref.principal, ref.reply_id, now_s=now_s, latest_s=latest_s)
        await self._cache.forget(*where)
        self._journal.note("reply_deleted", ref.reply_id, was=view.reason)
        return Done()

    async def input_items(self, ref: ReplyRef) -> InputItems:
        """Of a stored reply. Raises RefusedError: NOT_FOUND."""
        _found(ref, await self._store.reply(ref.principal, ref.reply_id))
        return InputItems(items=tuple(await self._store.input_items(ref.principal, ref.reply_id)))

    async def key(self, lookup: KeyLookup) -> KeyFound:
        """Raises RefusedError (NOT_FOUND) for an unknown or revoked key."""
        principal = await self._store.key(lookup.digest)
        if principal is None:
            raise RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message="No such API key."))
        return KeyFound(principal=principal)

    async def withdraw(self, order: WithdrawReply) -> Done:
        """From safety, not from a user: a flag on the last window came after the end."""
        now_s = clock.wall_s()
        where = await self._store.withdraw(order.reply_id, now_s=now_s, latest_s=now_s + PURGE_LATEST_S)
        await self._cache.forget(*where)
        self._journal.note("reply_withdrawn", order.reply_id, category=order.category, shown_tokens=order.shown_tokens)
        return Done()

    async def _log(self, ref: ReplyRef) -> LogView | None:
        """The reply's log, when there is one and it is the principal's. Raises RefusedError: NOT_FOUND."""
        place = reply_place(ref.reply_id)
        if place is None or place.region != self._names.region:
            raise _not_found(ref)
        if place.shard >= self._log_shards:
            return None  # no bucket of ours, or one from before there were fewer
        try:
            log = await self._logs.read(ref.reply_id)
        except (LogGoneError, TokenLogError):
            return None
        if log.accepted is None:
            return None
        if not _owns(ref.principal, log):
            raise _not_found(ref)
        return log

    async def stop(self, reply_id: str) -> LogView:
        """`end` is the cancel; the control subject only makes it fast."""
        end = End(reason=EndReason.USER_STOP, by=self._name, ended_s=clock.wall_s())
        log = await self._logs.end(reply_id, end, _END_S)
        reason = end.reason if log.ended is None else log.ended.reason
        await self._bus.publish(self._names.cancel(reply_id), encode(Cancel(reply_id=reply_id, reason=reason)))
        return log


def _owns(principal: Principal, log: LogView) -> bool:
    accepted = log.accepted
    return accepted is not None and (accepted.org, accepted.user) == (principal.org, principal.user)


def _log_view(log: LogView) -> ReplyView:
    """What a log says of its reply."""
    assert log.accepted is not None, "a log that was read has its head"
    end = log.ended
    return ReplyView(
        accepted=log.accepted,
        text=log.text,
        ids=pack_ids(log.ids),
        reason=None if end is None else end.reason,
        usage=None if end is None else log.usage,
        checked=True if end is None else end.checked,
        ended_s=None if end is None else end.ended_s or None,
        detail="" if end is None else end.detail,
    )


def _taken_back(view: ReplyView) -> ReplyView:
    """The text of the log must not be shown any more, so the log counts as gone."""
    return msgspec.structs.replace(view, text="", ids=b"", withdrawn=True, log_alive=False)


def _found(ref: ReplyRef, stored: StoredReply | None) -> StoredReply:
    if stored is None:
        raise _not_found(ref)
    return stored


def _not_found(ref: ReplyRef) -> RefusedError:
    return RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message=f"No reply {ref.reply_id} was found."))
