"""Leases: what a router does with a lane message from its delivery until its reply has ended.

A `Lease` is one reply in this router's hands, a state machine without I/O: `on(event, now) -> list[Command]`.
`lease_table.LeaseTable` owns all of them, routes events and keeps the timers.

                                    ┌───────────── PAUSED (look again later)
    Delivered ─> READING <──────────┴──────────────────────────────────────────────┐
                   │ LogRead: the log decides                                      │ whatever is in doubt
                   ├─ no open, or the last one is over ─> WAITING ─Placed─> OPENING ┤   is settled by reading
                   ├─ our open, nothing written ────────> DISPATCHING <── appended ─┤   the log again
                   ├─ an open stands ───────────────────> ASKING ─Answered─> RUNNING ┤
                   ├─ past deadline, attempts, idle ────> ENDING ─EndStands────────┤
                   └─ an end stands ────────────────────> ARCHIVING ─Archived─> Ack, GONE

Rules (why: docs/adr/0002-leases-and-redelivery.md):

- A redelivery is a question. The replica of the last `open` is asked; if it runs the reply, the lease is adopted.
- A new `open` needs a refusal, a hand-back, a report that the attempt is over, a replica that is suspect or does not
  answer *and* a log that did not grow meanwhile, or one that says it runs but lets its lease lapse again and again.
- Attempts are counted in the log. An `open` whose replica refused it or handed it back is named so by the next `open`
  (`returned`) and does not count; if the router dies in between it does count, which errs on the safe side. One that
  wrote something begins the count anew (docs/adr/0011-attempts-that-wrote.md).
- An `open` after which nothing was written may be dispatched again, to the same replica only: a replica takes a
  dispatch of the same (reply, attempt) once. So a lost dispatch costs no attempt and no second writer.
- The message is acked when an `end` stands and `ENDED` has stored the reply, never before. It is given back (nak) only
  while no attempt of ours runs.
- Deliveries are numbered: the newest is acted on, older ones are forgotten. A replica that already reports to the
  router of a newer delivery says so, and this router lets go without a word.
- While the replica runs the reply, the replica extends the delivery, not the router.

How the shell performs commands: each is performed once, without waiting for others; commands with a `ticket` are
answered by exactly one event with the same ticket (an error or a timeout is an event too). Late answers are harmless.
`Place` and `Unplace` are performed at once, in the same turn. Pure: `now` is seconds on one monotonic clock.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar

from services.router.lease_events import (
    Ack,
    AnnounceEnd,
    Answer,
    Answered,
    AppendEnd,
    AppendOpen,
    Archive,
    Archived,
    ArchiveFailed,
    AskReplica,
    AskUnanswered,
    AttemptEnded,
    CancelHeard,
    Command,
    Delivered,
    DispatchDeclined,
    DispatchTaken,
    DispatchUnknown,
    Drain,
    EndFailed,
    EndStands,
    Extend,
    LogRead,
    Nak,
    OpenAppended,
    OpenRefused,
    OpenUnknown,
    Place,
    Placed,
    PresenceHeard,
    ReadFailed,
    ReadLog,
    ReplicaRestarted,
    ReplicaSuspect,
    SendDispatch,
    Tick,
    Unplace,
    Unplaceable,
)
from shared.errors import IllegalEventError
from shared.limits import (
    COMMAND_ANSWER_S,
    IDLE_END_S,
    LEASE_CHECK_S,
    LEASE_EXTEND_S,
    LEASE_RETRY_S,
    LOG_MISSING_S,
    PROGRESS_CHECK_S,
    QUESTIONS_MAX,
    UNANSWERED_S,
)
from shared.messages import Ask, Dispatch, Open, pack_ids
from shared.outcomes import EndReason
from shared.token_log import LogView

# --- one reply ---------------------------------------------------------------------------------------------


class State(Enum):
    READING = "reading"
    PAUSED = "paused"
    WAITING = "waiting"
    OPENING = "opening"
    DISPATCHING = "dispatching"
    ASKING = "asking"
    RUNNING = "running"
    ENDING = "ending"
    ARCHIVING = "archiving"
    GONE = "gone"


_RETURNED_REASONS = frozenset({"full", "draining", "not_ready", "other_model"})  # the next replica may take it

_ATTEMPT_STATES = frozenset({State.PAUSED, State.DISPATCHING, State.ASKING, State.RUNNING})

Suspect = Callable[[str, float], bool]
_Handler = Callable[[Any, Any, float], list[Command]]


class Lease:
    """One lane message in hand.

    `suspect(replica, now)` is the heartbeat verdict: silent, or stuck in a step. `tickets` are never used twice, not
    even by two leases of the same reply: an answer to the one before must not be taken for one to this.
    """

    def __init__(
        self,
        delivered: Delivered,
        *,
        router: str,
        suspect: Suspect,
        tickets: Iterator[int],
        now: float,
        idle_end_s: float = IDLE_END_S,
    ) -> None:
        self.reply_id = delivered.reply_id
        self.request = delivered.request
        self.state = State.READING
        self.view = LogView()
        self._router, self._suspect = router, suspect
        self._ack_subject, self._delivered = delivered.ack_subject, delivered.delivered
        self._deadline = now + delivered.deadline_left_s
        self._present_at, self._idle_end_s = now, idle_end_s
        self._draining = False
        self._tickets = tickets
        self._ticket = -1  # of the answer we wait for
        self._timer = now  # of the state: when a pause is over, a check is due, or an answer is overdue
        self._extend_at = now + LEASE_EXTEND_S
        self._opening: Open | None = None
        self._ending: tuple[EndReason, str] | None = None  # decided and not yet standing
        self._ends_anyhow = True  # whatever the log says by then
        # what is known of the last attempt in the log
        self._taken = 0  # the attempt that its replica has confirmed to us
        self._over = 0  # the attempt that is over: its replica says so, or we gave it up
        self._over_seq: int | None = 0  # the log's last sequence then (None: at the next look); if it grows, it lives
        self._returned = 0  # the attempt that was refused or handed back
        self._known_seq = delivered.request.accepted_seq  # the log reaches this far at least
        self._lagging_s: float | None = None  # since when all that we read ends before that
        self._still = (0, now)  # the log's last sequence, and since when we have seen no other
        self._unanswered_s: float | None = None  # since when the replica leaves us without an answer
        self._question = (-1, 0)  # sequence at the last redelivery of a running reply, and how many found it there

    # --- what others may ask

    @property
    def waiting(self) -> bool:
        return self.state is State.WAITING

    @property
    def replica(self) -> str | None:
        """The replica of the last `open`, as far as known."""
        return self.view.opened.replica if self.view.opened else None

    @property
    def wake_at(self) -> float:
        """When the next Tick may have something to do."""
        if self.state is State.GONE:
            return float("inf")
        may_expire = self._ending is None and (self.state is State.WAITING or self.state in _ATTEMPT_STATES)
        times = [self._deadline if may_expire else float("inf")]
        if self.state is State.WAITING:
            times.append(float("inf") if self._exempt else self._present_at + self._idle_end_s)
        else:
            times.append(self._timer)
        if self.state is not State.RUNNING:
            times.append(self._extend_at)
        return min(times)

    @property
    def _exempt(self) -> bool:
        return self.request.accepted.echo.background

    # --- the door

    def start(self, now: float) -> list[Command]:
        """The first command."""
        return self._read(now)

    def on(self, event: Any, now: float) -> list[Command]:
        """What to do now. Raises IllegalEventError, and changes nothing, when the table has no such event."""
        if isinstance(event, Answer) and event.ticket != self._ticket:
            return []  # of a command we no longer wait for
        handler = self._TABLE[self.state].get(type(event))
        if handler is None:
            raise IllegalEventError(f"{type(event).__name__} while {self.state.value}: {self.reply_id}")
        return handler(self, event, now)

    def _go(self, state: State, timer: float) -> None:
        self.state, self._timer = state, timer

    def _next_ticket(self) -> int:
        self._ticket = next(self._tickets)
        return self._ticket

    # --- reading: the log decides

    def _read(self, now: float) -> list[Command]:
        self._go(State.READING, now + COMMAND_ANSWER_S)
        return [ReadLog(reply_id=self.reply_id, ticket=self._next_ticket())]

    def _read_on(self, _: Any, now: float) -> list[Command]:
        return self._read(now)

    def _pause(self, now: float, pause_s: float) -> list[Command]:
        self._next_ticket()
        self._go(State.PAUSED, now + pause_s)
        return []

    def _pause_on(self, _: Any, now: float) -> list[Command]:
        return self._pause(now, LEASE_RETRY_S)

    def _log_read(self, event: LogRead, now: float) -> list[Command]:
        if self._lags(event.view, now):
            return self._pause(now, LEASE_RETRY_S)
        self.view = event.view
        if self.view.last_seq != self._still[0]:
            self._still, self._unanswered_s = (self.view.last_seq, now), None
        if self._over_seq is None:
            self._over_seq = self.view.last_seq
        elif self.view.last_seq != self._over_seq:
            self._over = self._returned = 0
        if self.view.ended is not None:
            return self._archive(now)
        if self.view.accepted is None:
            return self._log_missing(now)
        if now >= self._deadline:
            return self._expire(now)
        if self._ending is not None:
            return self._end(*self._ending, now)
        return self._attempt(now)

    def _attempt(self, now: float) -> list[Command]:
        """The reply shall go on: with the attempt that stands, or with another."""
        opened = self.view.opened
        if opened is None:
            return self._wait(now)
        if self._gave_up(opened, now):
            self._note_over(self.view.last_seq)
        if self._is_over:
            return self._attempt_over(now)
        if self._suspect(opened.replica, now):
            return self._pause(now, PROGRESS_CHECK_S)
        if self._dispatchable and opened.router == self._router:
            return self._dispatch(opened, now)
        return self._ask(opened, now)

    def _lags(self, view: LogView, now: float) -> bool:
        """A copy of the stream answered that is behind what we know. Not for ever: then the log itself was lost."""
        if view.last_seq < self._known_seq:
            if self._lagging_s is None:
                self._lagging_s = now
            if now < self._lagging_s + UNANSWERED_S:
                return True
        self._lagging_s, self._known_seq = None, view.last_seq
        return False

    def _log_missing(self, now: float) -> list[Command]:
        """Deleted, or lost with its bucket: nothing can be written. Past the deadline nobody waits for it either."""
        self._go(State.GONE, now)
        if now < self._deadline:
            return [Nak(reply_id=self.reply_id, ack_subject=self._ack_subject, delay_s=LOG_MISSING_S)]
        return [Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)]

    @property
    def _dispatchable(self) -> bool:
        """Nothing was written after the open, and its replica never told us that it took it."""
        return self.view.last_seq == self.view.open_seq and self._taken < self.view.attempts

    @property
    def _is_over(self) -> bool:
        return 0 < self.view.attempts <= self._over

    def _note_over(self, seq: int | None) -> None:
        """Until the log grows past `seq`: then somebody has dispatched the same open again, or it was only slow."""
        self._over, self._over_seq = self.view.attempts, seq

    def _gave_up(self, opened: Open, now: float) -> bool:
        """The verdict on the last attempt: no progress, and a reason to think that none will come."""
        still_since = self._still[1]
        if self._suspect(opened.replica, now):
            return now >= still_since + PROGRESS_CHECK_S
        if self._question[1] >= QUESTIONS_MAX and self._question[0] == self.view.last_seq:
            return now >= still_since + UNANSWERED_S
        return self._unanswered_s is not None and now >= self._unanswered_s + UNANSWERED_S

    def _attempt_over(self, now: float) -> list[Command]:
        if self.view.attempts_left(given_back=self._returned == self.view.attempts) <= 0:
            detail = "The model could not finish this reply. Please try again."
            return self._end(EndReason.FAILED, detail, now, after_seq=self.view.last_seq)
        return self._wait(now)

    # --- waiting: queued for placement

    def _wait(self, now: float) -> list[Command]:
        if self._draining:
            self._go(State.GONE, now)
            return [Nak(reply_id=self.reply_id, ack_subject=self._ack_subject)]
        self._go(State.WAITING, now)
        avoid = self.replica if self._is_over else None
        return [Place(reply_id=self.reply_id, avoid=avoid or "")]

    def _leave_queue(self, then: list[Command]) -> list[Command]:
        return [Unplace(reply_id=self.reply_id), *then]

    def _placed(self, event: Placed, now: float) -> list[Command]:
        self._opening = Open(
            attempt=self.view.attempts + 1,
            replica=event.replica,
            model_version=event.model_version,
            first_index=len(self.view.ids),
            router=self._router,
            returned=self.view.returned + (1 if 0 < self._returned == self.view.attempts else 0),
        )
        self._go(State.OPENING, now + COMMAND_ANSWER_S)
        return [
            AppendOpen(
                reply_id=self.reply_id,
                ticket=self._next_ticket(),
                expected_seq=self.view.last_seq,
                entry=self._opening,
            )
        ]

    def _unplaceable(self, event: Unplaceable, now: float) -> list[Command]:
        return self._end(EndReason.FAILED, event.detail, now)

    def _waiting_cancelled(self, _: CancelHeard, now: float) -> list[Command]:
        return self._leave_queue(self._read(now))

    def _waiting_tick(self, _: Tick, now: float) -> list[Command]:
        if now >= self._deadline:
            return self._leave_queue(self._expire(now))
        if not self._exempt and now >= self._present_at + self._idle_end_s:
            return self._leave_queue(self._end(EndReason.IDLE, "", now))
        return self._extend(now)

    def _waiting_drain(self, _: Drain, now: float) -> list[Command]:
        self._draining = True
        return self._leave_queue(self._wait(now))

    # --- opening and dispatching

    def _opened(self, event: OpenAppended, now: float) -> list[Command]:
        assert self._opening is not None
        self.view.apply(event.seq, self._opening)
        self._known_seq = event.seq
        self._still, self._unanswered_s = (event.seq, now), None
        return self._dispatch(self._opening, now)

    def _open_refused(self, _: OpenRefused, now: float) -> list[Command]:
        self._known_seq = self.view.last_seq + 1  # something stands behind what we have read
        return self._read(now)

    def _dispatch(self, opened: Open, now: float) -> list[Command]:
        if self._unanswered_s is None:
            self._unanswered_s = now
        self._go(State.DISPATCHING, now + COMMAND_ANSWER_S)
        dispatch = Dispatch(
            request=self.request,
            attempt=opened.attempt,
            open_seq=self.view.open_seq,
            written=pack_ids(self.view.ids),
            router=self._router,
            ack_subject=self._ack_subject,
            delivered=self._delivered,
            deadline_left_s=max(0.0, self._deadline - now),
        )
        return [
            SendDispatch(reply_id=self.reply_id, ticket=self._next_ticket(), replica=opened.replica, dispatch=dispatch)
        ]

    def _taken_on(self, event: DispatchTaken, now: float) -> list[Command]:
        return self._held_by(event.router, now)

    def _declined(self, event: DispatchDeclined, now: float) -> list[Command]:
        self._unanswered_s = None
        if event.reason == "over":  # it was taken before, by another router's leave, and ended without a word to us
            self._note_over(self.view.last_seq)
            return self._read(now)
        if event.reason not in _RETURNED_REASONS:
            return self._end(EndReason.FAILED, event.detail or "No model replica can run this request.", now)
        return self._give_back(now)

    def _give_back(self, now: float) -> list[Command]:
        """The attempt did no harm and none was done to it. The second time in a row a fresh heartbeat is awaited."""
        again = self._returned > 0 and self._returned == self.view.attempts - 1
        self._returned = self.view.attempts
        self._note_over(self.view.last_seq)
        return self._pause(now, LEASE_RETRY_S) if again else self._attempt_over(now)

    # --- asking: a question, not a verdict

    def _ask(self, opened: Open, now: float) -> list[Command]:
        if self._unanswered_s is None:
            self._unanswered_s = now
        self._go(State.ASKING, now + COMMAND_ANSWER_S)
        ask = Ask(reply_id=self.reply_id, router=self._router, ack_subject=self._ack_subject, delivered=self._delivered)
        return [AskReplica(reply_id=self.reply_id, ticket=self._next_ticket(), replica=opened.replica, ask=ask)]

    def _ask_later(self, _: DispatchUnknown | AskUnanswered, now: float) -> list[Command]:
        """Nobody listening is said at once: without a pause it would be asked a hundred times a second."""
        return self._pause(now, PROGRESS_CHECK_S)

    def _answered(self, event: Answered, now: float) -> list[Command]:
        if event.running and event.attempt == self.view.attempts:
            return self._held_by(event.router, now)
        self._unanswered_s = None
        if event.running and event.attempt > self.view.attempts:
            return self._read(now)  # the log has gone on
        opened = self.view.opened
        if opened is not None and self._dispatchable:
            return self._dispatch(opened, now)  # it never came there
        self._note_over(self.view.last_seq)
        return self._read(now)  # it may have ended just before it was asked

    def _held_by(self, router: str, now: float) -> list[Command]:
        """The replica runs it. If it reports to a newer delivery's router, this lease is over."""
        self._taken, self._unanswered_s = self.view.attempts, None
        if router not in ("", self._router):
            return self._let_go(None, now)
        self._go(State.RUNNING, now + LEASE_CHECK_S)
        return []

    def _let_go(self, _: Any, now: float) -> list[Command]:
        self._go(State.GONE, now)
        return []

    # --- running

    def _running_delivered(self, event: Delivered, now: float) -> list[Command]:
        self._keep_delivery(event, now)
        seq, asked = self._question
        self._question = (self._still[0], asked + 1 if seq == self._still[0] else 1)
        return self._read(now)

    def _attempt_ended(self, event: AttemptEnded, now: float) -> list[Command]:
        """A replica's report; in states that wait for the log or the queue it only adds to what is known."""
        if event.attempt != self.view.attempts:
            return []
        if event.outcome == "adopted":
            return self._let_go(event, now) if self.state is State.RUNNING else []
        self._unanswered_s = None
        if event.outcome in ("aborted", "failed", "handed_back"):
            self._note_over(None)
        if event.outcome == "handed_back":
            self._returned = event.attempt
        return self._read(now) if self.state in _ATTEMPT_STATES else []

    def _suspected(self, event: ReplicaSuspect | ReplicaRestarted, now: float) -> list[Command]:
        return self._read(now) if event.replica == self.replica else []

    # --- ending, archiving

    def _expire(self, now: float) -> list[Command]:
        return self._end(EndReason.EXPIRED, "The reply was not finished before its deadline.", now)

    def _end(self, reason: EndReason, detail: str, now: float, *, after_seq: int | None = None) -> list[Command]:
        self._ending, self._ends_anyhow = (reason, detail), after_seq is None
        self._go(State.ENDING, now + COMMAND_ANSWER_S)
        ticket = self._next_ticket()
        return [AppendEnd(reply_id=self.reply_id, ticket=ticket, reason=reason, detail=detail, after_seq=after_seq)]

    def _end_failed(self, _: EndFailed, now: float) -> list[Command]:
        """Again, unless the reason lay in a log that has grown since: then it is looked at anew."""
        if not self._ends_anyhow:
            self._ending = None
        return self._pause(now, LEASE_RETRY_S)

    def _end_stands(self, _: EndStands, now: float) -> list[Command]:
        assert self._ending is not None
        said: list[Command] = [AnnounceEnd(reply_id=self.reply_id, reason=self._ending[0])]
        return (said if self.view.opened is not None else []) + self._read(now)

    def _archive(self, now: float) -> list[Command]:
        self._go(State.ARCHIVING, now + COMMAND_ANSWER_S)
        return [Archive(reply_id=self.reply_id, ticket=self._next_ticket(), view=self.view)]

    def _archived(self, _: Archived, now: float) -> list[Command]:
        self._go(State.GONE, now)
        return [Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)]

    # --- in every state

    def _keep_delivery(self, event: Delivered, now: float) -> list[Command]:
        """The newest delivery's ack subject is the one to use; an older one is forgotten, not acked."""
        if event.delivered >= self._delivered:
            self._ack_subject, self._delivered = event.ack_subject, event.delivered
            self._extend_at = now + LEASE_EXTEND_S
        return []

    def _present(self, _: PresenceHeard, now: float) -> list[Command]:
        self._present_at = now
        return []

    def _drain_later(self, _: Drain, __: float) -> list[Command]:
        self._draining = True
        return []

    def _ignore(self, _: Any, __: float) -> list[Command]:
        return []

    def _extend(self, now: float) -> list[Command]:
        if now < self._extend_at:
            return []
        self._extend_at = now + LEASE_EXTEND_S
        return [Extend(reply_id=self.reply_id, ack_subject=self._ack_subject)]

    def _tick(self, _: Tick, now: float) -> list[Command]:
        """Pauses end, checks fall due, answers that never came are given up; until then the delivery is extended."""
        if now >= self._timer:
            return self._read(now)
        if now >= self._deadline and self._ending is None and self.state in _ATTEMPT_STATES:
            return self._expire(now)
        return self._extend(now) if self.state is not State.RUNNING else []

    # --- the table

    _COMMON: ClassVar[Mapping[type, _Handler]] = {
        Delivered: _keep_delivery,
        AttemptEnded: _attempt_ended,
        CancelHeard: _read_on,
        PresenceHeard: _present,
        ReplicaSuspect: _ignore,
        ReplicaRestarted: _ignore,
        Drain: _drain_later,
        Tick: _tick,
    }

    _TABLE: ClassVar[Mapping[State, Mapping[type, _Handler]]] = {
        State.READING: {**_COMMON, LogRead: _log_read, ReadFailed: _pause_on},
        State.PAUSED: {**_COMMON},
        State.WAITING: {
            **_COMMON,
            Placed: _placed,
            Unplaceable: _unplaceable,
            CancelHeard: _waiting_cancelled,
            Drain: _waiting_drain,
            Tick: _waiting_tick,
        },
        State.OPENING: {
            **_COMMON,
            OpenAppended: _opened,
            OpenRefused: _open_refused,
            OpenUnknown: _pause_on,
        },
        State.DISPATCHING: {
            **_COMMON,
            DispatchTaken: _taken_on,
            DispatchDeclined: _declined,
            DispatchUnknown: _ask_later,
            ReplicaSuspect: _suspected,
        },
        State.ASKING: {
            **_COMMON,
            Answered: _answered,
            AskUnanswered: _ask_later,
            ReplicaSuspect: _suspected,
        },
        State.RUNNING: {
            **_COMMON,
            Delivered: _running_delivered,
            ReplicaSuspect: _suspected,
            ReplicaRestarted: _suspected,
        },
        State.ENDING: {**_COMMON, EndStands: _end_stands, EndFailed: _end_failed, CancelHeard: _ignore},
        State.ARCHIVING: {**_COMMON, Archived: _archived, ArchiveFailed: _pause_on, CancelHeard: _ignore},
        State.GONE: {},
    }
