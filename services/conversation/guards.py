"""What a crash, or a part that was away, left half done: each guard looks now and then and finishes it.

outbox    stored, and not known to be in its lane         ──> queued (again: harmless)
sweeper   not ended DEADLINE_GRACE_S past the deadline    ──> an `end` stands, rows hold it
purges    deleted or withdrawn, the end archived          ──> log and ENDED record removed
claims    idempotency keys past their age                 ──> free again
"""

import msgspec

from services.conversation.archive import Archive
from services.conversation.figures import Figures
from services.conversation.queueing import Queueing
from services.conversation.replies import never_written
from services.conversation.rows import Overdue
from services.conversation.store import Store
from shared import clock
from shared.bus import Bus
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.limits import DEADLINE_GRACE_S
from shared.log_store import LogStore
from shared.messages import Cancel, End, EndedReply, GenerateRequest, decoder, encode
from shared.outcomes import EndReason
from shared.subjects import Names
from shared.telemetry import Journal, Log
from shared.token_log import ended_reply

OUTBOX_AGE_S = 1.0  # a send that takes longer has probably died
CLAIM_AGE_S = 86_400.0
_BATCH = 64
_END_S = 3.0

_request = decoder(GenerateRequest)


class Guards:
    def __init__(
        self,
        *,
        name: str,
        names: Names,
        store: Store,
        logs: LogStore,
        bus: Bus,
        queueing: Queueing,
        archive: Archive,
        journal: Journal,
        figures: Figures,
        log: Log,
    ) -> None:
        self._name, self._names, self._store, self._logs, self._bus = name, names, store, logs, bus
        self._queueing, self._archive, self._journal = queueing, archive, journal
        self._figures, self._log = figures, log

    async def outbox(self) -> None:
        """Queue what was stored and not queued; raises StoreAwayError, BusError."""
        for row in await self._store.outbox(older_than_s=OUTBOX_AGE_S, now_s=clock.wall_s(), most=_BATCH):
            try:
                ended = await self._queueing.queue(row.subject, _request.decode(row.request))
            except RefusedError:
                continue  # still full: it stays in the outbox until there is room, or until its deadline
            except (LogGoneError, TokenLogError, msgspec.DecodeError) as error:
                self._log.error("outbox_unusable", reply_id=row.reply_id, error=str(error))
                await self._store.give_up(row.reply_id, "It could not be queued any more.")
                continue
            if ended is not None:
                await self._archive.store([ended])
            await self._store.queued([row.reply_id])
            self._figures.requeued.inc()
            self._journal.note("outbox_requeued", row.reply_id, had_ended=ended is not None)

    async def sweep(self) -> None:
        """End what is past its deadline; raises StoreAwayError, BusError."""
        rows = await self._store.overdue(now_s=clock.wall_s(), grace_s=DEADLINE_GRACE_S, most=_BATCH)
        for row in rows:
            ended = await self._ended(row)
            await self._archive.store([ended])
            self._figures.swept.labels(ended.reason.value).inc()
            self._journal.note("reply_swept", row.accepted.reply_id, reason=ended.reason.value, attempts=ended.attempts)

    async def _ended(self, row: Overdue) -> EndedReply:
        reply_id = row.accepted.reply_id
        reason = EndReason.FAILED if row.detail else EndReason.EXPIRED
        end = End(reason=reason, by=self._name, detail=row.detail, ended_s=clock.wall_s())
        try:
            view = await self._logs.end(reply_id, end, _END_S)
        except (LogGoneError, TokenLogError):  # nothing of it is left, or nothing was ever written
            return never_written(row.accepted, reason, row.detail, clock.wall_s())
        await self._bus.publish(self._names.cancel(reply_id), encode(Cancel(reply_id=reply_id, reason=reason)))
        return ended_reply(view)

    async def purge(self) -> None:
        """Remove logs that nobody may read any more; raises StoreAwayError, BusError."""
        for purge in await self._store.purges(now_s=clock.wall_s(), most=_BATCH):
            await self._logs.purge(purge.reply_id)
            await self._bus.purge(self._names.ended_stream, self._names.ended(purge.reply_id))
            await self._store.purged(purge.reply_id)
            self._figures.purged.labels(purge.cause.value).inc()
            self._journal.note("log_purged", purge.reply_id, cause=purge.cause.value)

    async def claims(self) -> None:
        """Forget idempotency keys past their age; raises StoreAwayError."""
        await self._store.forget_claims(before_s=clock.wall_s() - CLAIM_AGE_S, most=1000)
