"""What a lease is told and what it says: the events and commands of `services.router.leases`.

Commands with a `ticket` are answered by exactly one event with the same ticket; an error and a timeout are events too.
"""

from dataclasses import dataclass

from shared.messages import Ask, Dispatch, GenerateRequest, Open
from shared.outcomes import EndReason
from shared.token_log import LogView

# --- events: what happened -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    reply_id: str


@dataclass(frozen=True, kw_only=True)
class Delivered(Event):
    """A lane message came (again). `deadline_left_s` counts from the message's stream timestamp."""

    request: GenerateRequest
    ack_subject: str
    delivered: int
    deadline_left_s: float


@dataclass(frozen=True, kw_only=True)
class Answer(Event):
    ticket: int


@dataclass(frozen=True, kw_only=True)
class LogRead(Answer):
    """Answers ReadLog: the whole log as it stands. Without `accepted`: there is no log. The lease keeps `view`."""

    view: LogView


@dataclass(frozen=True, kw_only=True)
class ReadFailed(Answer):
    pass


@dataclass(frozen=True, kw_only=True)
class Placed(Event):
    """Answers Place, when a replica has room for it: its turn has come. (No room: it stays queued, no event.)"""

    replica: str
    model_version: str


@dataclass(frozen=True, kw_only=True)
class Unplaceable(Event):
    """No replica could ever run it; `detail` is a sentence for a person."""

    detail: str


@dataclass(frozen=True, kw_only=True)
class OpenAppended(Answer):
    seq: int


@dataclass(frozen=True, kw_only=True)
class OpenRefused(Answer):
    """Another entry stands last (WrongLastSequenceError)."""


@dataclass(frozen=True, kw_only=True)
class OpenUnknown(Answer):
    """No answer in time: it may stand or not."""


@dataclass(frozen=True, kw_only=True)
class DispatchTaken(Answer):
    """`Dispatched` came. `router`: whom the replica reports to. `number`: its how many-th dispatch it was there."""

    router: str
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class DispatchDeclined(Answer):
    """`DispatchRefused` came."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class DispatchUnknown(Answer):
    """Timeout or nobody listening: it may run or not."""


@dataclass(frozen=True, kw_only=True)
class Answered(Answer):
    """`Holding` came."""

    running: bool
    attempt: int
    router: str


@dataclass(frozen=True, kw_only=True)
class AskUnanswered(Answer):
    """Timeout or nobody listening."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Event):
    """`AttemptOver` came: ended | replaced | aborted | handed_back | failed | adopted."""

    attempt: int
    outcome: str


@dataclass(frozen=True, kw_only=True)
class CancelHeard(Event):
    """The control subject said that an `end` stands."""


@dataclass(frozen=True, kw_only=True)
class PresenceHeard(Event):
    """A client is attached."""


@dataclass(frozen=True, kw_only=True)
class EndStands(Answer):
    """Answers AppendEnd: an `end` stands, this one or another's."""


@dataclass(frozen=True, kw_only=True)
class EndFailed(Answer):
    """No `end` could be brought to stand in time."""


@dataclass(frozen=True, kw_only=True)
class Archived(Answer):
    """The ENDED stream has confirmed the reply."""


@dataclass(frozen=True, kw_only=True)
class ArchiveFailed(Answer):
    pass


# These concern many replies; the table hands them to the leases they concern.


@dataclass(frozen=True, kw_only=True)
class ReplicaSuspect:
    """Heartbeats are missing, or its step is stuck. Sent when it begins; `suspect()` says so as long as it lasts."""

    replica: str


@dataclass(frozen=True, kw_only=True)
class ReplicaRestarted:
    """Its boot id changed: what it ran is lost."""

    replica: str


@dataclass(frozen=True, kw_only=True)
class Drain:
    """The router leaves: give back what waits, take nothing new, see the rest through."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time passed."""


# --- commands: what the shell shall do ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    reply_id: str


@dataclass(frozen=True, kw_only=True)
class ReadLog(Command):
    """-> LogRead | ReadFailed"""

    ticket: int


@dataclass(frozen=True, kw_only=True)
class Place(Command):
    """Queue it for placement -> Placed | Unplaceable, when its turn comes. `avoid` has just turned it down."""

    avoid: str = ""


@dataclass(frozen=True, kw_only=True)
class Unplace(Command):
    """Out of the queue: it waits no more."""


@dataclass(frozen=True, kw_only=True)
class AppendOpen(Command):
    """Conditional on `expected_seq` -> OpenAppended | OpenRefused | OpenUnknown"""

    ticket: int
    expected_seq: int
    entry: Open


@dataclass(frozen=True, kw_only=True)
class SendDispatch(Command):
    """-> DispatchTaken | DispatchDeclined | DispatchUnknown, within DISPATCH_TIMEOUT_S"""

    ticket: int
    replica: str
    dispatch: Dispatch


@dataclass(frozen=True, kw_only=True)
class AskReplica(Command):
    """-> Answered | AskUnanswered, within ASK_TIMEOUT_S"""

    ticket: int
    replica: str
    ask: Ask


@dataclass(frozen=True, kw_only=True)
class AppendEnd(Command):
    """Read and append until an `end` stands -> EndStands | EndFailed, within LOG_END_S

    With `after_seq` once, after that entry only: the log that gave the reason may have grown since it was read.
    """

    ticket: int
    reason: EndReason
    detail: str
    after_seq: int | None = None


@dataclass(frozen=True, kw_only=True)
class AnnounceEnd(Command):
    """An `end` stands: say it on the cancel subject, so that whoever still runs it stops at once."""

    reason: EndReason


@dataclass(frozen=True, kw_only=True)
class Archive(Command):
    """Publish the ended reply whole to ENDED, deduplicated by its id -> Archived | ArchiveFailed"""

    ticket: int
    view: LogView


@dataclass(frozen=True, kw_only=True)
class Extend(Command):
    ack_subject: str


@dataclass(frozen=True, kw_only=True)
class Ack(Command):
    """The lease is over. Not answered: if it is lost the message comes again, and the log says what to do."""

    ack_subject: str


@dataclass(frozen=True, kw_only=True)
class Nak(Command):
    """The lease is over, the message goes back to its lane. Not answered."""

    ack_subject: str
    delay_s: float = 0.0
