"""Where a request goes: filter -> score -> pick.

    filter   same model, accepting, heard of, a place and the blocks free, first token inside the tier's target
    score    predicted seconds to the first token: what stands before it there, plus what is not in its prefix cache
    pick     who holds the longest prefix, unless elsewhere cold is better by more than a penalty; a miss goes to
             the least *load* (never to the smallest cache)

Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from services.router.fleet_view import ReplicaView
from shared.limits import (
    ADMIT_TTFT_S_BACKGROUND,
    ADMIT_TTFT_S_FREE,
    ADMIT_TTFT_S_PAID,
    AFFINITY_PENALTY_S,
    BLOCK_TOKENS,
    REPLICA_QUEUE_MAX,
)
from shared.tiers import Tier

TTFT_TARGET_S = {
    Tier.PAID: ADMIT_TTFT_S_PAID,
    Tier.FREE: ADMIT_TTFT_S_FREE,
    Tier.BACKGROUND: ADMIT_TTFT_S_BACKGROUND,
}


@dataclass(frozen=True)
class Demand:
    """What placement must know of a request. `tokens` = prompt and what is already written."""

    tier: Tier
    tokens: int
    tokens_max: int  # with the rest of its budget
    hashes: Sequence[bytes] = ()
    avoid: frozenset[str] = frozenset()  # replicas that refused it or were lost with it

    @property
    def blocks(self) -> int:
        """To hold `tokens` and the first one sampled."""
        return self.tokens // BLOCK_TOKENS + 1

    @property
    def blocks_max(self) -> int:
        return -(-self.tokens_max // BLOCK_TOKENS)


class Wait(StrEnum):
    """Why nothing was placed; all but NEVER_FITS may pass."""

    NO_REPLICA = "no_replica"
    SATURATED = "saturated"
    NEVER_FITS = "never_fits"


@dataclass(frozen=True)
class Placed:
    """The pick and its inputs, as the journal keeps them."""

    replica: str
    boot_id: str
    model_version: str
    ttft_s: float
    prefix_tokens: int
    uncached_tokens: int
    why: str  # prefix | overflow | least_load
    candidates: int


@dataclass(frozen=True)
class _Scored:
    view: ReplicaView
    prefix: int
    ttft_s: float

    @property
    def load(self) -> tuple[float, float, str]:
        """Steps of prefill that stand before it, plus the share of places taken; then what is faster."""
        health = self.view.health
        steps = self.view.queue_tokens() / max(1, health.step_tokens)
        return steps + self.view.places_taken() / max(1, health.running_max), self.ttft_s, health.replica


def predicted_ttft_s(view: ReplicaView, tokens: int, prefix_tokens: int) -> float:
    """Seconds until the first token of a request of `tokens`, were it sent there now.

    Each step gives one token to every running sequence and the rest of its budget to prompts, in order: so many tokens
    at a prompt's beginning, and as many as take the same time further on, where each attends to more.
    """
    health, step = view.health, view.health.step
    uncached = max(1, tokens - prefix_tokens)  # a full hit still computes its last token
    to_compute = view.queue_tokens() + uncached
    per_step = max(1, health.step_tokens - health.running)
    own_attended = uncached * (tokens - uncached / 2)
    prompts_s = to_compute * step.per_token_s + own_attended * step.per_attended_s
    room_s = per_step * step.per_token_s + per_step * per_step / 2 * step.per_attended_s
    steps = max(-(-to_compute // per_step), ceil(prompts_s / room_s) if room_s > 0 else 0)
    current = max(0.0, health.step_predicted_s - health.step_age_s)
    computed = to_compute + steps * health.running
    context = steps * tokens / 2
    held = (health.blocks_total - health.blocks_free) * BLOCK_TOKENS  # what those who run attend to, each step
    attended = own_attended + steps * held + health.running * steps * steps / 2  # who runs grows meanwhile
    own_s = computed * step.per_token_s + context * step.per_context_s + attended * step.per_attended_s
    return current + steps * step.base_s + own_s


def place(demand: Demand, replicas: Iterable[ReplicaView]) -> Placed | Wait:
    """Choose among the heard-of replicas of the model."""
    serving = [view for view in replicas if view.health.accepting]
    if not serving:
        return Wait.NO_REPLICA
    fitting = [view for view in serving if demand.blocks_max <= view.health.blocks_total]
    if not fitting:
        return Wait.NEVER_FITS
    open_to_it = [view for view in fitting if view.health.replica not in demand.avoid] or fitting
    scored = [_score(demand, view) for view in open_to_it if _has_room(demand, view)]
    scored = [one for one in scored if _admissible(demand, one)]
    if not scored:
        return Wait.SATURATED
    chosen, why = _pick(scored)
    health = chosen.view.health
    return Placed(
        replica=health.replica,
        boot_id=health.boot_id,
        model_version=health.model_version,
        ttft_s=chosen.ttft_s,
        prefix_tokens=chosen.prefix,
        uncached_tokens=max(1, demand.tokens - chosen.prefix),
        why=why,
        candidates=len(scored),
    )


def _has_room(demand: Demand, view: ReplicaView) -> bool:
    """Bind late: a place, or a short queue for the next one; and blocks that nobody waiting there needs."""
    places = view.health.running_max + REPLICA_QUEUE_MAX
    return view.places_taken() < places and demand.blocks <= view.blocks_free()


def _score(demand: Demand, view: ReplicaView) -> _Scored:
    prefix = min(view.prefix_tokens(demand.hashes), demand.tokens)
    return _Scored(view, prefix, predicted_ttft_s(view, demand.tokens, prefix))


def _admissible(demand: Demand, scored: _Scored) -> bool:
    """Inside the tier's target; a prompt that is too long for the target alone still runs where nothing waits."""
    return scored.ttft_s <= TTFT_TARGET_S[demand.tier] or scored.view.queue_tokens() == 0


def _pick(scored: Sequence[_Scored]) -> tuple[_Scored, str]:
    longest = max(one.prefix for one in scored)
    coldest = min(scored, key=lambda one: one.load)
    if longest == 0:
        return coldest, "least_load"
    holder = min((one for one in scored if one.prefix == longest), key=lambda one: one.ttft_s)
    others = [one.ttft_s for one in scored if one.prefix < longest]
    if others and holder.ttft_s > min(others) + AFFINITY_PENALTY_S:
        return min((one for one in scored if one.prefix < longest), key=lambda one: one.load), "overflow"
    return holder, "prefix"
