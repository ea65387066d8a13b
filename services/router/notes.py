"""What a router did and why, for people: counts, and the journal of decisions with their inputs."""

import dataclasses
from collections import Counter

from services.router.fleet_view import FleetView
from services.router.hands import Asked
from services.router.lease_events import (
    Answer,
    Answered,
    AppendOpen,
    Archive,
    Archived,
    ArchiveFailed,
    AskReplica,
    AskUnanswered,
    DispatchDeclined,
    DispatchTaken,
    DispatchUnknown,
    EndFailed,
    OpenAppended,
    OpenUnknown,
    ReadFailed,
    SendDispatch,
)
from services.router.lease_table import LeaseTable
from services.router.leases import Lease, State
from services.router.metrics import RouterMetrics
from services.router.waiting_room import Match, Unfit, WaitingRoom
from shared.messages import AttemptOver
from shared.telemetry import Journal, Log

_FAILED = (ReadFailed, OpenUnknown, AskUnanswered, EndFailed, ArchiveFailed)


class Notes:
    def __init__(self, router: str, journal: Journal, count: RouterMetrics, log: Log) -> None:
        self.count = count
        self._router, self._journal, self._log = router, journal, log

    def decided(self, kind: str, reply_id: str | None, **inputs: object) -> None:
        """One line of the journal."""
        self._journal.note(kind, reply_id, router=self._router, **inputs)

    # --- placement ---------------------------------------------------------------------------------------

    def matched(self, match: Match) -> None:
        placed = match.placed
        self.count.queued_s.labels(match.tier, match.model).observe(match.waited_s)
        self.count.predicted_ttft_s.labels(match.model, placed.why).observe(placed.ttft_s)
        self.decided("placed", match.reply_id, waited_s=match.waited_s, **dataclasses.asdict(placed))

    def unfit(self, unfit: Unfit, model: str) -> None:
        self.count.unfit.labels(model).inc()
        self.decided("unfit", unfit.reply_id, detail=unfit.detail)

    # --- replicas ----------------------------------------------------------------------------------------

    def suspected(self, replica: str, fleet: FleetView, now: float) -> None:
        """With what spoke against it."""
        view = fleet.get(replica)
        figures: dict[str, object] = {}
        if view is not None:
            figures = {
                "silent_s": now - view.heard_s,
                "step_age_s": view.health.step_age_s,
                "step_predicted_s": view.health.step_predicted_s,
                "running": view.health.running,
            }
        self.count.suspects.labels(replica).inc()
        self._log.warning("replica_suspect", replica=replica, **figures)
        self.decided("suspected", None, replica=replica, **figures)

    def restarted(self, replica: str, boot_id: str) -> None:
        self._log.warning("replica_restarted", replica=replica, boot_id=boot_id)
        self.decided("replica_restarted", None, replica=replica, boot_id=boot_id)

    def attempt_over(self, over: AttemptOver) -> None:
        self.decided(
            "attempt_over",
            over.reply_id,
            attempt=over.attempt,
            replica=over.replica,
            outcome=over.outcome,
            detail=over.detail,
        )

    # --- acts --------------------------------------------------------------------------------------------

    def acted(self, command: Asked, answer: Answer, lease: Lease) -> None:
        """An act on the bus and what came of it."""
        model = lease.request.accepted.model
        if isinstance(answer, _FAILED):
            self.count.command_failures.labels(type(command).__name__).inc()
        match command:
            case AppendOpen():
                self._opened(command, answer, model)
            case SendDispatch():
                self._dispatched(command, answer)
            case AskReplica():
                self._asked(command, answer, model)
            case Archive():
                if isinstance(answer, Archived) and command.view.ended is not None:
                    reason = command.view.ended.reason.value
                    self.count.archived.labels(reason).inc()
                    self.decided("archived", command.reply_id, reason=reason, attempts=command.view.attempts)
            case _:
                pass  # reading and ending show in what follows from them

    def _opened(self, command: AppendOpen, answer: Answer, model: str) -> None:
        entry = command.entry
        if not isinstance(answer, OpenAppended):
            return
        self.count.opens.labels(model, str(entry.attempt)).inc()
        if entry.returned < entry.attempt - 1:
            self.count.failovers.labels(model).inc()
        self.decided(
            "opened" if entry.attempt == 1 else "resubmitted",
            command.reply_id,
            attempt=entry.attempt,
            replica=entry.replica,
            first_index=entry.first_index,
            returned=entry.returned,
            seq=answer.seq,
        )

    def _dispatched(self, command: SendDispatch, answer: Answer) -> None:
        outcome = "unknown"
        if isinstance(answer, DispatchTaken):
            outcome = "taken"
        elif isinstance(answer, DispatchDeclined):
            outcome = answer.reason
        else:
            assert isinstance(answer, DispatchUnknown)
        self.count.dispatches.labels(outcome).inc()
        dispatch = command.dispatch
        self.decided(
            "dispatched",
            command.reply_id,
            attempt=dispatch.attempt,
            replica=command.replica,
            outcome=outcome,
            delivered=dispatch.delivered,
        )

    def _asked(self, command: AskReplica, answer: Answer, model: str) -> None:
        if not isinstance(answer, Answered):
            return
        adopted = answer.running and answer.router in ("", self._router)
        if adopted:
            self.count.adopts.labels(model).inc()
        self.decided(
            "adopted" if adopted else "asked",
            command.reply_id,
            replica=command.replica,
            running=answer.running,
            attempt=answer.attempt,
            reports_to=answer.router,
            delivered=command.ask.delivered,
        )

    # --- once a second -----------------------------------------------------------------------------------

    def look(self, room: WaitingRoom, table: LeaseTable, replicas: dict[str, int]) -> None:
        """The gauges."""
        states = Counter(lease.state.value for lease in table.leases())
        leases = {state.value: states[state.value] for state in State if state is not State.GONE}
        self.count.look(room.counts(), leases, replicas)
