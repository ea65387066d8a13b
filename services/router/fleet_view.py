"""What the router believes of the replicas: rebuilt from heartbeats within a second, never stored.

    health.<replica> ──> figures, heard_s     a silent replica keeps its last figures: missing is not overload
    blocks.<replica> ──> prefix hashes        numbered; a gap asks for a snapshot and hides what is uncertain
    our dispatches   ──> claims               count against its room until a heartbeat covers them

Pure: times are arguments, in seconds of one monotonic clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.limits import (
    BLOCK_TOKENS,
    DISPATCH_CLAIM_S,
    HEARTBEAT_S,
    HEARTBEATS_MISSED_MAX,
    PROBE_AFTER_S,
    REPLICA_FORGET_S,
    STUCK_STEP_FACTOR,
    STUCK_STEP_S_MIN,
)
from shared.messages import BlocksChanged, ReplicaHealth, block_hash_list

SILENT_AFTER_S = HEARTBEAT_S * HEARTBEATS_MISSED_MAX


@dataclass(frozen=True)
class Claim:
    """A dispatch that no heartbeat has counted yet. `number` is None until the replica answered."""

    tokens: int  # prompt tokens it will have to compute
    blocks: int
    made_s: float
    number: int | None = None


@dataclass(frozen=True)
class NeedBlocks:
    """Ask the replica for a snapshot of its prefix blocks."""

    replica: str


@dataclass(frozen=True)
class Restarted:
    """Another process speaks under its name: what the one before ran is lost."""

    replica: str


@dataclass
class ReplicaView:
    """One replica as far as this router knows."""

    health: ReplicaHealth
    heard_s: float
    prefix: set[bytes] = field(default_factory=set)
    blocks_number: int | None = None  # None: the prefix set is not to be trusted, a snapshot is on its way
    claims: dict[str, Claim] = field(default_factory=dict)  # by reply
    probed: bool = False  # since the last heartbeat
    gone: bool = False  # nobody listens under its name

    def silent(self, now: float, deaf_s: float = 0.0) -> bool:
        """Enough heartbeats are missing, or nobody is there. Not yet a verdict: one whose log grows is alive.

        `deaf_s` is when we ourselves could hear again: silence before that says nothing.
        """
        return self.gone or now - max(self.heard_s, deaf_s) > SILENT_AFTER_S

    def stuck(self) -> bool:
        """Its heartbeats come, but its step does not end. A long step is not a hang: its prediction counts."""
        health = self.health
        return health.step_age_s > max(STUCK_STEP_S_MIN, STUCK_STEP_FACTOR * health.step_predicted_s)

    def queue_tokens(self) -> int:
        """Prompt tokens that stand before a new one."""
        return sum(self.health.waiting_tokens.values()) + sum(claim.tokens for claim in self.claims.values())

    def queue_length(self) -> int:
        return self.health.waiting + len(self.claims)

    def places_taken(self) -> int:
        return self.health.running + self.queue_length()

    def blocks_free(self) -> int:
        """Free blocks that nobody who waits there will need for its prompt."""
        waiting = sum(-(-tokens // BLOCK_TOKENS) for tokens in self.health.waiting_tokens.values())
        return self.health.blocks_free - waiting - sum(claim.blocks for claim in self.claims.values())

    def prefix_tokens(self, hashes: Sequence[bytes]) -> int:
        """Tokens of the longest run of leading blocks it holds."""
        if self.blocks_number is None:
            return 0
        held = 0
        for block in hashes:
            if block not in self.prefix:
                break
            held += 1
        return held * BLOCK_TOKENS


class FleetView:
    """All replicas of the region, by id."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaView] = {}
        self._suspects: set[str] = set()
        self._deaf_s = 0.0

    def on_health(self, health: ReplicaHealth, now: float) -> list[NeedBlocks | Restarted]:
        """A heartbeat. Another boot id is another process: nothing known of the one before holds."""
        view = self._replicas.get(health.replica)
        if view is None or view.health.boot_id != health.boot_id:
            self._replicas[health.replica] = ReplicaView(health, now)
            self._suspects.discard(health.replica)
            restarted = [Restarted(health.replica)] if view is not None else []
            return [*restarted, NeedBlocks(health.replica)]
        view.health, view.heard_s = health, now
        view.probed = view.gone = False
        view.claims = {key: claim for key, claim in view.claims.items() if not _covered(claim, health, now)}
        return []

    def on_blocks(self, changed: BlocksChanged) -> list[NeedBlocks]:
        """Prefix blocks stored and evicted. A gap in the numbers makes the set worthless until a snapshot comes."""
        view = self._replicas.get(changed.replica)
        if view is None or view.health.boot_id != changed.boot_id:
            return []  # its heartbeat will come, and ask
        if view.blocks_number is None or changed.number <= view.blocks_number:
            return []
        if changed.number != view.blocks_number + 1:
            view.blocks_number = None
            return [NeedBlocks(changed.replica)]
        view.blocks_number = changed.number
        view.prefix.update(block_hash_list(changed.stored))
        view.prefix.difference_update(block_hash_list(changed.evicted))
        return []

    def on_blocks_snapshot(self, snapshot: BlocksChanged) -> None:
        """The whole set, as of `snapshot.number`."""
        view = self._replicas.get(snapshot.replica)
        if view is not None and view.health.boot_id == snapshot.boot_id:
            view.prefix = set(block_hash_list(snapshot.stored))
            view.blocks_number = snapshot.number

    def claim(self, replica: str, reply_id: str, *, tokens: int, blocks: int, now: float) -> None:
        """A dispatch is decided: its room is taken before any heartbeat can say so."""
        view = self._replicas.get(replica)
        if view is not None:
            view.claims[reply_id] = Claim(tokens, blocks, now)

    def confirm(self, replica: str, reply_id: str, number: int) -> None:
        """The replica took it as its `number`th dispatch: heartbeats that count that many cover it."""
        view = self._replicas.get(replica)
        claim = view.claims.get(reply_id) if view else None
        if view is None or claim is None:
            return
        if number <= view.health.dispatches:
            del view.claims[reply_id]
        else:
            view.claims[reply_id] = Claim(claim.tokens, claim.blocks, claim.made_s, number)

    def release(self, replica: str, reply_id: str) -> None:
        """It was not dispatched after all, was refused, or is over."""
        view = self._replicas.get(replica)
        if view is not None:
            view.claims.pop(reply_id, None)

    def get(self, replica: str) -> ReplicaView | None:
        return self._replicas.get(replica)

    def alive(self, model: str, now: float) -> list[ReplicaView]:
        """Replicas of `model` that are heard of."""
        return [view for view in self._replicas.values() if view.health.model == model and not self._silent(view, now)]

    def suspect(self, replica: str, now: float) -> bool:
        """Heartbeats missing, or stuck in a step. With a log that stands still this is a verdict, alone it is not.

        Unknown replicas are suspect: nothing speaks for them.
        """
        view = self._replicas.get(replica)
        return view is None or self._silent(view, now) or view.stuck()

    def _silent(self, view: ReplicaView, now: float) -> bool:
        return view.silent(now, self._deaf_s)

    def deaf(self, now: float) -> None:
        """We are cut off from the bus: what we do not hear until now nobody is to be blamed for."""
        self._deaf_s = now

    def late(self, now: float) -> list[str]:
        """Replicas whose heartbeat is late and that were not yet probed for it. Each is named once."""
        late = []
        for name, view in self._replicas.items():
            if not view.probed and now - max(view.heard_s, self._deaf_s) > PROBE_AFTER_S:
                view.probed = True
                late.append(name)
        return late

    def nobody_there(self, replica: str, boot_id: str) -> None:
        """A probe found no listener: its process, or its connection, is gone. A heartbeat takes that back."""
        view = self._replicas.get(replica)
        if view is not None and view.health.boot_id == boot_id and view.probed:
            view.gone = True

    def new_suspects(self, now: float) -> list[str]:
        """Replicas that have become suspect since the last call."""
        suspects = {name for name in self._replicas if self.suspect(name, now)}
        new = sorted(suspects - self._suspects)
        self._suspects = suspects
        return new

    def forget(self, now: float) -> list[str]:
        """Drop replicas long silent, so that the view stays as large as the fleet; returns which."""
        gone = [name for name, view in self._replicas.items() if now - view.heard_s > REPLICA_FORGET_S]
        for name in gone:
            del self._replicas[name]
        return gone

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._replicas.values())


def _covered(claim: Claim, health: ReplicaHealth, now: float) -> bool:
    """The heartbeat counts it; or its fate stayed unknown so long that the heartbeats must be right without it."""
    if claim.number is not None:
        return claim.number <= health.dispatches
    return now - claim.made_s > DISPATCH_CLAIM_S
