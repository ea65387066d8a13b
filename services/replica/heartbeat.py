"""What a replica says of itself four times a second. Pure.

The engine's figures are those after its last report; sequences that were handed to it since are counted on top, so that
a heartbeat covers every dispatch it names.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.replica.attempt import Attempt
from services.replica.core.step_budget import StepBudget, room_s
from services.replica.core.step_fit import predict
from services.replica.engine_messages import EngineReady, EngineStats
from shared.limits import BLOCK_TOKENS
from shared.messages import ReplicaHealth

_FULL_BLOCKS_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Everything a heartbeat is made of."""

    replica: str
    boot_id: str
    model: str
    http: str
    ready: EngineReady
    stats: EngineStats
    unseen: tuple[Attempt, ...]  # handed to the engine, not yet in its figures
    dispatches: int
    accepting: bool
    step_age_s: float
    step_predicted_s: float
    tokens_per_s: float


def heartbeat(beat: Beat) -> ReplicaHealth:
    stats = beat.stats
    return ReplicaHealth(
        replica=beat.replica,
        boot_id=beat.boot_id,
        model=beat.model,
        model_version=beat.ready.model_version,
        accepting=beat.accepting,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        running=stats.running,
        running_max=beat.ready.running_max,
        waiting=stats.waiting + len(beat.unseen),
        waiting_tokens=_with_unseen(stats.waiting_tokens, beat.unseen),
        step=stats.step,
        step_age_s=beat.step_age_s,
        step_predicted_s=beat.step_predicted_s,
        tokens_per_s=beat.tokens_per_s,
        http=beat.http,
        dispatches=beat.dispatches,
        step_tokens=_step_tokens(beat.ready, stats),
    )


def _step_tokens(ready: EngineReady, stats: EngineStats) -> int:
    """Tokens that the next steps hold when one more prompt comes, as the scheduler will cut it at its beginning."""
    step, running = stats.step, stats.running
    most = min(ready.mixed_tokens, ready.step_tokens - running) if running else ready.step_tokens
    held = (stats.blocks_total - stats.blocks_free) * BLOCK_TOKENS
    decodes_s = predict(step, running, held)
    room = room_s(step, decodes_s=decodes_s, decodes=running, prompts=1 + stats.waiting)
    return running + StepBudget(most, room, step).take(0, most)


def is_full(health: ReplicaHealth) -> bool:
    """Little is free: whoever waits for room here should hear at once when there is some."""
    places = health.running + health.waiting >= health.running_max
    return places or health.blocks_free < health.blocks_total * _FULL_BLOCKS_SHARE


def _with_unseen(waiting_tokens: dict[str, int], unseen: Iterable[Attempt]) -> dict[str, int]:
    tokens = dict(waiting_tokens)
    for attempt in unseen:
        tier = attempt.accepted.tier.value
        tokens[tier] = tokens.get(tier, 0) + attempt.accepted.input_tokens + attempt.first_index
    return tokens
