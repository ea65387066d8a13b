"""The states of a reply as conversation keeps them, as a table.

ACCEPTED ──QUEUED──> QUEUED ──OPENED──> RUNNING ──┐
    │                   │                 │  ^────┘ OPENED again: another attempt
    └──────ENDED────────┴─────ENDED───────┴─────────> ENDED: for good, its reason never changes
"""

from enum import StrEnum

from shared.errors import IllegalEventError
from shared.messages import Accepted, EndedReply, Usage
from shared.outcomes import EndReason


class State(StrEnum):
    ACCEPTED = "accepted"  # stored; its request may not be in the lane yet
    QUEUED = "queued"  # in its lane
    RUNNING = "running"  # a router has opened its log to a replica
    ENDED = "ended"


class Event(StrEnum):
    QUEUED = "queued"  # the lane took the request
    OPENED = "opened"  # an `open` entry stands
    ENDED = "ended"  # an `end` entry stands


_TABLE: dict[tuple[State, Event], State] = {
    (State.ACCEPTED, Event.QUEUED): State.QUEUED,
    (State.ACCEPTED, Event.OPENED): State.RUNNING,  # a router was faster than the word that the lane took it
    (State.ACCEPTED, Event.ENDED): State.ENDED,
    (State.QUEUED, Event.OPENED): State.RUNNING,
    (State.QUEUED, Event.ENDED): State.ENDED,
    (State.RUNNING, Event.QUEUED): State.RUNNING,
    (State.RUNNING, Event.OPENED): State.RUNNING,
    (State.RUNNING, Event.ENDED): State.ENDED,
}


def step(state: State, event: Event) -> State:
    """The state after `event`; raises IllegalEventError when it may not happen."""
    try:
        return _TABLE[state, event]
    except KeyError:
        raise IllegalEventError(f"{event} cannot happen to a reply that is {state}") from None


def before(event: Event) -> tuple[State, ...]:
    """The states in which `event` may happen: the guard of the rows' updates."""
    return tuple(state for state in State if (state, event) in _TABLE)


def never_written(accepted: Accepted, reason: EndReason, detail: str, now_s: float) -> EndedReply:
    """A reply whose log is empty or lost: nothing of it can be shown any more."""
    return EndedReply(
        accepted=accepted,
        reason=reason,
        text="",
        ids=b"",
        usage=Usage(input_tokens=accepted.input_tokens, output_tokens=0),
        attempts=0,
        ended_s=now_s,
        detail=detail,
    )
