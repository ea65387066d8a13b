"""Ended replies into their rows: each once, acknowledged only after the commit.

ENDED ──pull──> decode ──> one transaction ──> commit ──> quota settled, `reply_finished`, figures ──> ack
                  └ never readable, or never storable: given up after some tries, journalled, counted
"""

from collections.abc import Sequence

import asyncpg
import msgspec

from services.conversation.figures import Figures
from services.conversation.quotas import Quotas
from services.conversation.rows import Archived
from services.conversation.store import Store, StoreAwayError
from shared import clock
from shared.bus import Bus, Delivery, Puller
from shared.messages import Accepted, EndedReply, decoder
from shared.telemetry import Journal, Log

BATCH = 64
PULL_S = 5.0
TRIES_MAX = 5  # of a record that cannot be read or stored; a later version of us may know it
RETRY_S = 1.0
_RECENT_MAX = 4096  # replies without rows whose end was already told

_ended = decoder(EndedReply)


class Archive:
    def __init__(self, *, store: Store, quotas: Quotas, bus: Bus, journal: Journal, figures: Figures, log: Log) -> None:
        self._store, self._quotas, self._bus = store, quotas, bus
        self._journal, self._figures, self._log = journal, figures, log
        self._told: dict[str, None] = {}

    async def run(self, puller: Puller) -> None:
        """Archive what ends, for as long as the service lives."""
        while True:
            await self.take(await puller.pull(BATCH, PULL_S))

    async def take(self, deliveries: Sequence[Delivery]) -> None:
        """Store these deliveries; what cannot be stored now is given back."""
        readable: list[tuple[Delivery, EndedReply]] = []
        for delivery in deliveries:
            try:
                readable.append((delivery, _ended.decode(delivery.data)))
            except msgspec.DecodeError as error:
                await self._unusable(delivery, str(error))
        if not readable:
            return
        try:
            await self.store([ended for _, ended in readable])
        except StoreAwayError:
            for delivery, _ in readable:
                await self._bus.nak(delivery.ack_subject, RETRY_S)
        except asyncpg.PostgresError:
            await self._one_by_one(readable)
        else:
            for delivery, _ in readable:
                await self._bus.ack(delivery.ack_subject)

    async def _one_by_one(self, readable: Sequence[tuple[Delivery, EndedReply]]) -> None:
        """One of them is refused by the database: the others must not wait for it."""
        for delivery, ended in readable:
            try:
                await self.store([ended])
            except StoreAwayError:
                await self._bus.nak(delivery.ack_subject, RETRY_S)
            except asyncpg.PostgresError as error:
                await self._unusable(delivery, f"{type(error).__name__}: {error}")
            else:
                await self._bus.ack(delivery.ack_subject)

    async def _unusable(self, delivery: Delivery, why: str) -> None:
        if delivery.delivered < TRIES_MAX:
            await self._bus.nak(delivery.ack_subject, RETRY_S * delivery.delivered)
            return
        self._figures.poison.inc()
        self._journal.note("archive_gave_up", subject=delivery.subject, seq=delivery.seq, why=why)
        self._log.error("archive_gave_up", subject=delivery.subject, seq=delivery.seq, why=why)
        await self._bus.ack(delivery.ack_subject)

    async def store(self, replies: Sequence[EndedReply]) -> None:
        """Rows, then the word about it; raises StoreAwayError. Again is harmless."""
        outcomes = await self._store.archive(replies, clock.wall_s())
        await self._quotas.settle(replies)
        for ended, outcome in zip(replies, outcomes, strict=True):
            if outcome is Archived.STORED:
                self._finished(ended)
            elif outcome is Archived.NO_ROW and ended.accepted.reply_id not in self._told:
                self._remember(ended.accepted.reply_id)  # no row says whether it was told before
                self._finished(ended)

    def _remember(self, reply_id: str) -> None:
        self._told[reply_id] = None
        if len(self._told) > _RECENT_MAX:
            del self._told[next(iter(self._told))]

    def _finished(self, ended: EndedReply) -> None:
        """The canonical line: one per reply, ids and figures, never words."""
        accepted = ended.accepted
        self._figures.ended(ended)
        self._log.info(
            "reply_finished",
            reply_id=accepted.reply_id,
            org=accepted.org,
            user=accepted.user,
            tier=accepted.tier.value,
            model=accepted.model,
            reason=ended.reason.value,
            detail=ended.detail,
            input_tokens=ended.usage.input_tokens,
            cached_tokens=ended.usage.cached_tokens,
            output_tokens=ended.usage.output_tokens,
            core_s=None if ended.core_s is None else round(ended.core_s, 6),
            attempts=ended.attempts,
            checked=ended.checked,
            background=accepted.echo.background,
            stored=accepted.echo.store,
            queue_s=_after(accepted, ended.opened_s),
            ttft_s=_after(accepted, ended.first_token_s),
            total_s=_after(accepted, ended.ended_s),
        )


def _after(accepted: Accepted, at_s: float | None) -> float | None:
    """Seconds from `accepted`; None when it did not happen, or nobody knows when."""
    return None if at_s is None else round(at_s - accepted.created_s, 4)
