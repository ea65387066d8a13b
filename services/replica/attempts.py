"""All attempts of a replica: which dispatch is taken, which is known already, which is refused, and who is asked for.

A dispatch of the same (reply, attempt) is taken once, however often it comes; a later attempt of a reply ends the one
before; an attempt that is over is never begun again. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from services.replica.attempt import Attempt, Command
from shared.limits import ATTEMPTS_REMEMBERED, BLOCK_TOKENS, IDLE_END_S, REPLICA_QUEUE_MAX
from shared.messages import Ask, Dispatch, DispatchRefused, Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the engine can hold, as it said when it was ready."""

    blocks_total: int
    context_max: int
    running_max: int
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Taken:
    """Submit it. `replaced`: an earlier attempt of the reply, here, with what to do about it."""

    attempt: Attempt
    ordinal: int
    replaced: tuple[Attempt, list[Command]] | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """It runs here already. `released`: a router that it no longer reports to."""

    attempt: Attempt
    ordinal: int
    released: str | None


class AttemptTable:
    """Attempts by reply and by sequence. `capacity` is None until the engine is ready."""

    def __init__(self, replica: str, model: str, *, idle_end_s: float = IDLE_END_S) -> None:
        self.capacity: Capacity | None = None
        self.accepting = True
        self.taken = 0  # dispatches since boot
        self._replica, self._model, self._idle_end_s = replica, model, idle_end_s
        self._by_reply: dict[str, Attempt] = {}
        self._by_sequence: dict[str, Attempt] = {}
        self._ordinals: dict[str, int] = {}
        self._over: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_sequence.values()))

    def of_reply(self, reply_id: str) -> Attempt | None:
        return self._by_reply.get(reply_id)

    def of_sequence(self, sequence_id: str) -> Attempt | None:
        return self._by_sequence.get(sequence_id)

    def ordinal(self, attempt: Attempt) -> int:
        """The how many-th dispatch since boot it was."""
        return self._ordinals[attempt.sequence_id]

    def on_dispatch(self, dispatch: Dispatch, *, now: float, epoch_s: float) -> Taken | Known | DispatchRefused:
        """Decide on a dispatch. What is taken counts from here on."""
        reply_id, number = dispatch.request.reply_id, dispatch.attempt
        current = self._by_reply.get(reply_id)
        if current is not None and current.number == number:
            released = current.take_over(dispatch.router, dispatch.ack_subject, dispatch.delivered)
            return Known(current, self.ordinal(current), released)
        later_here = current is not None and current.number > number
        if later_here or (reply_id, number) in self._over:
            return self._refusal("over", f"attempt {number} is over here")
        refusal = self._refuse(dispatch)
        if refusal is not None:
            return refusal
        attempt = Attempt(
            dispatch,
            replica=self._replica,
            now=now,
            epoch_s=epoch_s,
            idle_end_s=self._idle_end_s,
            cores=self.capacity.cores if self.capacity is not None else 1,
        )
        replaced = (current, current.superseded()) if current is not None else None
        self.taken += 1
        self._by_reply[reply_id] = self._by_sequence[attempt.sequence_id] = attempt
        self._ordinals[attempt.sequence_id] = self.taken
        return Taken(attempt, self.taken, replaced)

    def _refuse(self, dispatch: Dispatch) -> DispatchRefused | None:
        accepted, capacity = dispatch.request.accepted, self.capacity
        if capacity is None:
            return self._refusal("not_ready", "the engine is not ready")
        if accepted.model != self._model:
            return self._refusal("other_model", f"this replica serves {self._model}")
        if not self.accepting:
            return self._refusal("draining", "this replica takes nothing new")
        most = len(dispatch.request.prompt) // 4 + accepted.budget
        room = min(capacity.context_max, capacity.blocks_total * BLOCK_TOKENS)
        if most > room:
            return self._refusal("never_fits", f"{most} tokens are more than the {room} a replica has room for")
        here = sum(attempt.blocks_held for attempt in self._by_sequence.values())
        if here >= capacity.running_max + REPLICA_QUEUE_MAX:
            return self._refusal("full", f"{here} sequences are here")
        return None

    def _refusal(self, reason: str, detail: str) -> DispatchRefused:
        return DispatchRefused(replica=self._replica, reason=reason, detail=detail)

    def on_ask(self, ask: Ask) -> tuple[Holding, Attempt | None, str | None]:
        """(the answer, the attempt it concerns, a router that is thereby released)."""
        attempt = self._by_reply.get(ask.reply_id)
        if attempt is None:
            return Holding(replica=self._replica, reply_id=ask.reply_id, running=False), None, None
        released = attempt.take_over(ask.router, ask.ack_subject, ask.delivered)
        holding = Holding(
            replica=self._replica,
            reply_id=ask.reply_id,
            running=True,
            attempt=attempt.number,
            router=attempt.router,
        )
        return holding, attempt, released

    def forget(self, attempt: Attempt) -> None:
        """It is over."""
        del self._by_sequence[attempt.sequence_id]
        del self._ordinals[attempt.sequence_id]
        if self._by_reply.get(attempt.reply_id) is attempt:
            del self._by_reply[attempt.reply_id]
        self._over[(attempt.reply_id, attempt.number)] = None
        while len(self._over) > ATTEMPTS_REMEMBERED:
            self._over.popitem(last=False)
