"""What a user may still use, asked before a reply begins and told when it has ended.

reserve ─granted─> begin ... ended ──> settle: what it used is charged, the rest comes back
   │ past the limit: the mini model, or a refusal with a time
   └ Valkey away: it passes unmetered, counted; the journal says when that began and when it was over
"""

from collections.abc import Mapping, Sequence

from services.conversation.figures import Figures
from services.conversation.quota_store import BucketName, QuotaStore, Settlement
from shared import clock
from shared.catalog import Catalog, ModelCard
from shared.errors import RefusedError, ValkeyAwayError
from shared.limits import MINI_TOKENS_FACTOR
from shared.messages import Accepted, Allowance, EndedReply, Principal
from shared.outcomes import Refusal, RefusalKind
from shared.quota import Grant, Limit
from shared.tiers import Tier


class OverLimitError(RefusedError):
    """The user's tokens do not suffice; `allowance` is what there is."""

    def __init__(self, refusal: Refusal, allowance: Allowance) -> None:
        super().__init__(refusal)
        self.allowance = allowance


class Quotas:
    """`store` None: nobody is metered. `tokens_per_min` by lane, of a model that is not the mini model."""

    def __init__(
        self, store: QuotaStore | None, catalog: Catalog, tokens_per_min: Mapping[Tier, int], figures: Figures
    ) -> None:
        self._store, self._catalog, self._tokens_per_min, self._figures = store, catalog, tokens_per_min, figures

    async def reserve(
        self, who: Principal, card: ModelCard, lane: Tier, reply_id: str, amount: int
    ) -> Allowance | None:
        """What is left afterwards; None when nobody counts. Raises OverLimitError."""
        if self._store is None:
            return None
        bucket, limit = BucketName(who.org, who.user, card.id, lane), self._limit(card, lane)
        try:
            grant = await self._store.reserve(bucket, limit, reply_id, amount=amount, now_s=clock.wall_s())
        except ValkeyAwayError:
            self._figures.quota_reserved.labels("unmetered").inc()
            return None
        allowance = Allowance(limit=limit.per_min, remaining=grant.remaining, reset_s=grant.reset_ms / 1000)
        if grant.wait_ms:
            self._figures.quota_reserved.labels("over").inc()
            raise OverLimitError(_over(card, limit, grant, amount), allowance)
        self._figures.quota_reserved.labels("granted").inc()
        return allowance

    async def release(self, accepted: Accepted) -> None:
        """Of a reply that did not begin: all of it comes back."""
        await self._settle([self._settlement(accepted, 0)])

    async def settle(self, replies: Sequence[EndedReply]) -> None:
        """Of replies that have ended. A reply that never reached a replica used nothing. Again is harmless."""
        await self._settle([self._settlement(ended.accepted, used_by(ended)) for ended in replies])

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Never fails: what cannot be told now comes back with the lease, in the user's favour."""
        if self._store is None or not settlements:
            return
        try:
            settled = await self._store.settle(settlements, clock.wall_s())
        except ValkeyAwayError:
            self._figures.quota_settled.labels("lost").inc(len(settlements))
            return
        self._figures.quota_settled.labels("settled").inc(sum(settled))
        self._figures.quota_settled.labels("unknown").inc(len(settled) - sum(settled))

    def _settlement(self, accepted: Accepted, used: int) -> Settlement:
        card = self._catalog.get(accepted.model)
        bucket = BucketName(accepted.org, accepted.user, accepted.model, accepted.tier)
        limit = Limit(1, 1) if card is None else self._limit(card, accepted.tier)
        return Settlement(bucket, limit, accepted.reply_id, used)

    def _limit(self, card: ModelCard, lane: Tier) -> Limit:
        per_min = self._tokens_per_min[lane] * (MINI_TOKENS_FACTOR if card.role == "mini" else 1)
        return Limit(per_min, per_min)


def used_by(ended: EndedReply) -> int:
    """Tokens a reply is charged."""
    return ended.usage.input_tokens + ended.usage.output_tokens if ended.attempts else 0


def _over(card: ModelCard, limit: Limit, grant: Grant, amount: int) -> Refusal:
    return Refusal(
        kind=RefusalKind.QUOTA,
        message=f"Limit reached for {card.id}: {limit.per_min} tokens a minute. This message needs up to {amount} "
        f"with its context and its reply, and {grant.remaining} are left.",
        retry_after_s=grant.wait_ms / 1000,
    )
