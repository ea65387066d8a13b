"""Who is next: lanes in their order with a trickle for the later ones, users inside a lane in fair turns of tokens.

    resumed     ──> replies that had begun elsewhere: their reader is waiting in mid-sentence
    paid        ──> user a │ user b │ ...      deficit round robin, in tokens
    free        ──> user c │ ...               passed over, a lane earns LANE_TRICKLE_SHARE of what was served
    background  ──> ...                        and is served once its credit pays for its head

A lane that is next but finds no room holds back the lanes after it (else small requests of a later lane would
starve a large one of an earlier lane); a trickle turn never holds back anybody. One queue per model. Pure.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.limits import FAIR_QUANTUM_TOKENS, LANE_TRICKLE_SHARE
from shared.tiers import LANE_ORDER, Tier


@dataclass(frozen=True)
class Waiting:
    """A request in the queue. `tokens` is what it may cost: its prompt and its budget."""

    reply_id: str
    tier: Tier
    user: str
    tokens: int
    since_s: float


@dataclass
class _Flow:
    """One user's requests in a lane, first come first served."""

    user: str
    items: deque[Waiting] = field(default_factory=deque)
    deficit: int = 0
    granted: bool = False  # has had its quantum of this turn


class FairLane:
    """Deficit round robin over users: each round gives every waiting user the same number of tokens."""

    def __init__(self, quantum: int = FAIR_QUANTUM_TOKENS) -> None:
        self._quantum = quantum
        self._flows: dict[str, _Flow] = {}
        self._turn: deque[_Flow] = deque()

    def __len__(self) -> int:
        return sum(len(flow.items) for flow in self._turn)

    def add(self, item: Waiting) -> None:
        flow = self._flows.get(item.user)
        if flow is None:
            flow = self._flows[item.user] = _Flow(item.user)
            self._turn.append(flow)
        flow.items.append(item)

    def head(self) -> Waiting | None:
        """Whose turn it is; the same until it is taken or removed, except that a new user may come in between."""
        if not self._turn:
            return None
        self._advance()
        return self._turn[0].items[0]

    def take(self) -> Waiting:
        """Serve the head."""
        self._advance()
        flow = self._turn[0]
        item = flow.items.popleft()
        flow.deficit -= item.tokens
        self._drop_if_empty(flow)
        return item

    def remove(self, reply_id: str) -> Waiting | None:
        for flow in self._turn:
            for item in flow.items:
                if item.reply_id == reply_id:
                    flow.items.remove(item)
                    self._drop_if_empty(flow)
                    return item
        return None

    def order(self, most: int) -> list[Waiting]:
        """The first `most` in the order they would be served if nobody else came."""
        copy = FairLane(self._quantum)
        for flow in self._turn:
            copy._turn.append(_Flow(flow.user, deque(flow.items), flow.deficit, flow.granted))
        copy._flows = {flow.user: flow for flow in copy._turn}
        return [copy.take() for _ in range(min(most, len(copy)))]

    def __iter__(self) -> Iterator[Waiting]:
        for flow in self._turn:
            yield from flow.items

    def _advance(self) -> None:
        """Turn until the first user can pay for the own head; each gets a quantum as the turn comes to them."""
        passed = 0
        while True:
            first = self._turn[0]
            if not first.granted:
                first.deficit += self._quantum
                first.granted = True
            if first.deficit >= first.items[0].tokens:
                return
            first.granted = False
            self._turn.rotate(-1)
            passed += 1
            if passed == len(self._turn):
                self._skip_rounds()
                passed = 0

    def _skip_rounds(self) -> None:
        """Nobody could pay within a round: grant at once all rounds but the one in which somebody can."""
        missing = min(flow.items[0].tokens - flow.deficit for flow in self._turn)
        rounds = -(-missing // self._quantum) - 1
        for flow in self._turn:
            flow.deficit += rounds * self._quantum

    def _drop_if_empty(self, flow: _Flow) -> None:
        """A user with nothing waiting keeps no savings."""
        if not flow.items:
            self._turn.remove(flow)
            del self._flows[flow.user]


class FairQueue:
    """What waits for one model, over all lanes."""

    def __init__(self) -> None:
        self._resumed: deque[Waiting] = deque()
        self._lanes = {tier: FairLane() for tier in LANE_ORDER}
        self._credit = dict.fromkeys(LANE_ORDER, 0.0)
        self._where: dict[str, Tier | None] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, reply_id: str) -> bool:
        return reply_id in self._where

    def add(self, item: Waiting, *, resumed: bool = False) -> None:
        """Enter once; a reply that already waits keeps its place."""
        if item.reply_id in self._where:
            return
        if resumed:
            self._resumed.append(item)
        else:
            self._lanes[item.tier].add(item)
        self._where[item.reply_id] = None if resumed else item.tier

    def remove(self, reply_id: str) -> Waiting | None:
        """It ended while it waited, or was handed back."""
        if reply_id not in self._where:
            return None
        tier = self._where.pop(reply_id)
        if tier is not None:
            return self._lanes[tier].remove(reply_id)
        item = next(item for item in self._resumed if item.reply_id == reply_id)
        self._resumed.remove(item)
        return item

    def candidates(self) -> list[Waiting]:
        """Who may be placed now, best first: take the first that finds room.

        At most a trickle turn and the head of the first lane that waits: whoever stands behind that head waits too.
        """
        if self._resumed:
            return [self._resumed[0]]
        waiting = [tier for tier in LANE_ORDER if len(self._lanes[tier])]
        if not waiting:
            return []
        heads = [head for tier in waiting if (head := self._lanes[tier].head()) is not None]
        trickle = [head for head in heads[1:] if self._credit[head.tier] >= head.tokens]
        return [*trickle[:1], heads[0]]

    def take(self, item: Waiting) -> None:
        """`item`, one of `candidates()`, was placed: account for it."""
        tier = self._where.pop(item.reply_id)
        if tier is None:
            self._resumed.remove(item)
            return
        first = next(tier for tier in LANE_ORDER if len(self._lanes[tier]))
        self._lanes[tier].take()
        if tier is not first:
            self._credit[tier] -= item.tokens
            return
        for later in LANE_ORDER[LANE_ORDER.index(tier) + 1 :]:
            waits = len(self._lanes[later]) > 0
            self._credit[later] = self._credit[later] + item.tokens * LANE_TRICKLE_SHARE if waits else 0.0

    def waiting(self, tier: Tier) -> int:
        return len(self._lanes[tier]) + sum(item.tier is tier for item in self._resumed)

    def order(self, tier: Tier, most: int) -> list[Waiting]:
        """The first `most` of a lane in the order they will be served."""
        resumed = [item for item in self._resumed if item.tier is tier]
        return [*resumed, *self._lanes[tier].order(most)][:most]

    def __iter__(self) -> Iterator[Waiting]:
        yield from self._resumed
        for lane in self._lanes.values():
            yield from lane
