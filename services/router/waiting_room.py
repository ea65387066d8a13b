"""Whoever waits for a replica, over all models: fair turns meet room in the fleet.

    enter ──> FairQueue of its model ──candidates──> place ──> Match: claimed room, left the queue
                                                       └─────> Unfit: no replica could ever run it

A round is played for a model when its queue or its replicas changed, not on every event. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.router.admission import FairQueue, Waiting
from services.router.eta import ServedRate, queue_view
from services.router.fleet_view import FleetView
from services.router.placement import Demand, Placed, Wait, place
from shared.limits import QUEUE_VIEW_REPLIES_MAX
from shared.messages import GenerateRequest, QueueView, block_hash_list
from shared.tiers import LANE_ORDER, Tier


@dataclass(frozen=True)
class Match:
    """A request and its replica; the room there is claimed."""

    reply_id: str
    placed: Placed
    waited_s: float
    tier: Tier
    model: str


@dataclass(frozen=True)
class Unfit:
    reply_id: str
    detail: str


class WaitingRoom:
    """Queues by model. `fleet` is shared with the shell, which feeds it."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._queues: dict[str, FairQueue] = {}
        self._rates: dict[tuple[Tier, str], ServedRate] = {}
        self._demands: dict[str, tuple[str, Demand]] = {}  # reply -> its model and what it needs
        self._stirred: dict[str, None] = {}  # models whose queue or replicas changed since their last round

    def __len__(self) -> int:
        return len(self._demands)

    def enter(self, request: GenerateRequest, *, written: int, resumed: bool, avoid: str, now: float) -> None:
        """Queue it. `written` output tokens stand in its log; `resumed`: its reader has seen some of it already."""
        accepted = request.accepted
        if request.reply_id in self._demands:
            return
        prompt = len(request.prompt) // 4
        demand = Demand(
            tier=accepted.tier,
            tokens=prompt + written,
            tokens_max=prompt + accepted.budget,
            hashes=block_hash_list(request.block_hashes),
            avoid=frozenset({avoid}) if avoid else frozenset(),
        )
        self._demands[request.reply_id] = (accepted.model, demand)
        waiting = Waiting(
            reply_id=request.reply_id,
            tier=accepted.tier,
            user=f"{accepted.org}\0{accepted.user}",
            tokens=demand.tokens_max,
            since_s=now,
        )
        self._queues.setdefault(accepted.model, FairQueue()).add(waiting, resumed=resumed)
        self._rate(accepted.tier, accepted.model).waiting(1, now)
        self._stirred[accepted.model] = None

    def leave(self, reply_id: str) -> None:
        """It waits no more."""
        known = self._demands.pop(reply_id, None)
        if known is not None:
            self._queues[known[0]].remove(reply_id)
            self._stirred[known[0]] = None

    def stir(self, model: str) -> None:
        """Something changed at the model's replicas."""
        if self._queues.get(model):
            self._stirred[model] = None

    def matches(self, now: float) -> Iterator[Match | Unfit]:
        """Play rounds until nobody who is next finds room. Each result is acted on before the next is drawn."""
        while self._stirred:
            model = next(iter(self._stirred))
            result = self._next(model, now)
            if result is None:
                self._stirred.pop(model, None)
            else:
                yield result

    def _next(self, model: str, now: float) -> Match | Unfit | None:
        queue = self._queues[model]
        replicas = self._fleet.alive(model, now)
        for waiting in queue.candidates():
            _, demand = self._demands[waiting.reply_id]
            outcome = place(demand, replicas)
            if isinstance(outcome, Placed):
                queue.take(waiting)
                return self._match(waiting, demand, outcome, model, now)
            if outcome is Wait.NEVER_FITS:
                self.leave(waiting.reply_id)
                return Unfit(waiting.reply_id, f"{demand.tokens_max} tokens are more than any replica has room for.")
        return None

    def _match(self, waiting: Waiting, demand: Demand, placed: Placed, model: str, now: float) -> Match:
        del self._demands[waiting.reply_id]
        self._rate(waiting.tier, model).left(now)
        self._fleet.claim(
            placed.replica, waiting.reply_id, tokens=placed.uncached_tokens, blocks=demand.blocks, now=now
        )
        return Match(waiting.reply_id, placed, now - waiting.since_s, waiting.tier, model)

    def _rate(self, tier: Tier, model: str) -> ServedRate:
        return self._rates.setdefault((tier, model), ServedRate())

    def counts(self) -> dict[tuple[Tier, str], int]:
        """How many wait, per queue that ever was."""
        return {(tier, model): queue.waiting(tier) for model, queue in self._queues.items() for tier in LANE_ORDER}

    def views(self, router: str, now: float) -> list[QueueView]:
        """What to broadcast: a view of each queue in which somebody waits. To be asked once a QUEUE_VIEW_S."""
        views = []
        for (tier, model), count in self.counts().items():
            rate = self._rate(tier, model)
            rate.waiting(count, now)
            if count == 0:
                continue
            order = [waiting.reply_id for waiting in self._queues[model].order(tier, QUEUE_VIEW_REPLIES_MAX)]
            views.append(
                queue_view(
                    router=router, tier=tier, model=model, order=order, waiting=count, served_per_s=rate.per_s(now)
                )
            )
        return views
