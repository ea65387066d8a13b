"""The rules, and each of them taken away: what the model must catch.

`Rules()` is the real code. A rule is taken away by a subclass that leaves it out, or by a switch that an actor looks at.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from services.router import lease_events as lease
from services.router.lease_table import LeaseTable
from services.router.leases import Lease, State
from shared.limits import ATTEMPTS_MAX
from shared.log_merge import Deliver, LogMerge
from shared.messages import Chunk, Dispatch, End, Entry, Open, SequencedEntry, encode, pack_ids
from shared.outcomes import EndReason
from shared.token_log import Append, LogView, LogWriter, WriterState, end_move

if TYPE_CHECKING:
    from tests.model.scene import Scene


def _as_it_is(_: "Scene", dispatch: Dispatch) -> Dispatch:
    return dispatch


@dataclass(frozen=True)
class Rules:
    """Which code takes part."""

    writer: Callable[..., LogWriter] = LogWriter
    merge: Callable[[int], LogMerge] = LogMerge
    table: Callable[..., LeaseTable] = LeaseTable
    end_move: Callable[[LogView, End], tuple[int | None, End] | None] = end_move
    dispatch: Callable[["Scene", Dispatch], Dispatch] = field(default=_as_it_is)
    unconditional_append: bool = False
    unconditional_open: bool = False
    captured_subject: bool = False
    enders_insist: bool = True
    readers_ask_again: bool = True


# --- the writer ------------------------------------------------------------------------------------------


class _GrowingWriter(LogWriter):
    """A retry takes the tokens sampled meanwhile along."""

    def unknown(self) -> Append:
        sent = super().unknown()
        if not self._pending or not isinstance(sent.entry, Chunk):
            return sent
        more = self._cut_chunk()
        at = len(sent.entry.text)
        entry = Chunk(
            attempt=self._attempt,
            first_index=self.appended,
            ids=sent.entry.ids + more.ids,
            text=sent.entry.text + more.text,
            text_ends=sent.entry.text_ends + tuple(at + end for end in more.text_ends),
        )
        self._in_flight = Append(sent.expected_seq, entry, encode(entry))
        return self._in_flight


class _DeafWriter(LogWriter):
    """Takes a refusal for a missed sequence, and goes on behind whatever stands there."""

    def refused(self, standing: SequencedEntry | None) -> WriterState:
        if standing is not None:
            self.acked(standing.seq)
        return self.state


class _StubbornWriter(LogWriter):
    """Takes every refusal for a lagging copy's, and waits for a better one."""

    def refused(self, standing: SequencedEntry | None) -> WriterState:
        if standing is not None and self._in_flight is not None and standing.entry == self._in_flight.entry:
            return super().refused(standing)
        return self.state


class _HastyWriter(LogWriter):
    """Sends the next chunk already while the one before it is in flight."""

    _ahead: Chunk | None = None

    def next_append(self) -> Append | None:
        sent = self._in_flight
        if sent is None and self._ahead is not None and self.state is WriterState.WRITING:
            self._in_flight, self._ahead = Append(self._expected, self._ahead, encode(self._ahead)), None
            return self._in_flight
        if sent is None or not isinstance(sent.entry, Chunk) or not self._pending or self._ahead is not None:
            return super().next_append()
        before, self.appended = self.appended, self.appended + sent.entry.count
        self._ahead = self._cut_chunk()
        self.appended = before
        return Append(self._expected, self._ahead, encode(self._ahead))


# --- the reader ------------------------------------------------------------------------------------------


class _SkippingMerge(LogMerge):
    """Shows what comes next, whether or not something is missing before it."""

    def live(self, seq: int, previous_seq: int, entry: Entry) -> list[Any]:
        if seq <= self.last_seq:
            return []
        self.last_seq = seq
        return [Deliver(SequencedEntry(seq=seq, entry=entry))]


# --- the canceller -----------------------------------------------------------------------------------------


def _end_anyway(view: LogView, end: End) -> tuple[int | None, End] | None:
    """Unconditional: whatever stands there by now."""
    move = end_move(view, end)
    return None if move is None else (None, end)


# --- the lease ---------------------------------------------------------------------------------------------

_Handler = Callable[[Any, Any, float], list[lease.Command]]


def _table(**changes: dict[type, _Handler]) -> dict[State, dict[type, _Handler]]:
    return {state: {**row, **changes.get(state.name, {})} for state, row in Lease._TABLE.items()}


class _Verdict(Lease):
    """A redelivery is a verdict: whoever ran the reply is taken for dead."""

    def _ask(self, opened: Open, now: float) -> list[lease.Command]:
        self._note_over(self.view.last_seq)
        return self._attempt_over(now)


class _EarlyAck(Lease):
    """The message is acked as soon as a replica has taken the reply."""

    def _held_by(self, router: str, now: float) -> list[lease.Command]:
        commands = super()._held_by(router, now)
        return [*commands, lease.Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)]


class _AckBeforeArchive(Lease):
    """The message is acked when an end stands; the archive is written afterwards."""

    def _archive(self, now: float) -> list[lease.Command]:
        return [lease.Ack(reply_id=self.reply_id, ack_subject=self._ack_subject), *super()._archive(now)]


class _TidyOldDelivery(Lease):
    """An older delivery is acked, to tidy up: one replaced by a newer, or one whose lease another router adopted."""

    def on(self, event: Any, now: float) -> list[lease.Command]:
        old = lease.Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)
        return ([old] if isinstance(event, lease.Delivered) else []) + super().on(event, now)

    def _let_go(self, event: Any, now: float) -> list[lease.Command]:
        return [*super()._let_go(event, now), lease.Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)]


class _CountDeliveries(Lease):
    """A reply that was delivered three times has had its attempts."""

    def _attempt_over(self, now: float) -> list[lease.Command]:
        if self._delivered >= ATTEMPTS_MAX:
            return self._end(EndReason.FAILED, "", now)
        return super()._attempt_over(now)


class _DrainAcks(Lease):
    """A router that leaves acks what waits, instead of giving it back."""

    def _wait(self, now: float) -> list[lease.Command]:
        commands = super()._wait(now)
        return [
            lease.Ack(reply_id=command.reply_id, ack_subject=command.ack_subject)
            if isinstance(command, lease.Nak)
            else command
            for command in commands
        ]


class _Endless(Lease):
    """Attempts are not counted."""

    def _attempt_over(self, now: float) -> list[lease.Command]:
        return self._wait(now)


class _NeverLooks(Lease):
    """A router waits for the replica's report, however long it takes."""

    def _held_by(self, router: str, now: float) -> list[lease.Command]:
        commands = super()._held_by("", now)
        self._timer = float("inf")
        return commands

    def _attempt_ended(self, event: lease.AttemptEnded, now: float) -> list[lease.Command]:
        return [] if event.outcome == "adopted" else super()._attempt_ended(event, now)

    _TABLE = _table(RUNNING={lease.AttemptEnded: _attempt_ended})


class _Impatient(Lease):
    """Whoever gets no answer asks again at once."""

    def _pause(self, now: float, pause_s: float) -> list[lease.Command]:
        return self._read(now)


class _Forgetful(Lease):
    """A refusal at the open is not read again: the reply is dispatched all the same."""

    def _open_anyway(self, _: lease.OpenRefused, now: float) -> list[lease.Command]:
        assert self._opening is not None
        return self._dispatch(self._opening, now)

    _TABLE = _table(OPENING={lease.OpenRefused: _open_anyway})


def _leases(kind: type[Lease]) -> type[LeaseTable]:
    class Table(LeaseTable):
        lease_type: ClassVar[type[Lease]] = kind

    return Table


def _written_as_shown(scene: "Scene", dispatch: Dispatch) -> Dispatch:
    """The continuation is built from what a client has been shown."""
    view = LogView().apply_all(scene.readers[0].shown)
    return Dispatch(
        request=dispatch.request,
        attempt=dispatch.attempt,
        open_seq=dispatch.open_seq,
        written=pack_ids(view.ids),
        router=dispatch.router,
        ack_subject=dispatch.ack_subject,
        deadline_left_s=dispatch.deadline_left_s,
        delivered=dispatch.delivered,
    )


# --- each rule taken away ------------------------------------------------------------------------------------

TAKEN_AWAY: dict[str, Rules] = {
    "appends are conditional": Rules(unconditional_append=True),
    "opens are conditional": Rules(unconditional_open=True),
    "a retried chunk is the same chunk": Rules(writer=_GrowingWriter),
    "a refused writer drops its sequence": Rules(writer=_DeafWriter),
    "a replaced writer frees its blocks": Rules(writer=_StubbornWriter),
    "one append in flight": Rules(writer=_HastyWriter),
    "a redelivery is a question": Rules(table=_leases(_Verdict)),
    "no ack before an end stands": Rules(table=_leases(_EarlyAck)),
    "no ack before ENDED has stored it": Rules(table=_leases(_AckBeforeArchive)),
    "old deliveries are forgotten": Rules(table=_leases(_TidyOldDelivery)),
    "attempts are counted by opens": Rules(table=_leases(_CountDeliveries)),
    "a router looks after what it hears nothing of": Rules(table=_leases(_NeverLooks)),
    "who gets no answer waits": Rules(table=_leases(_Impatient)),
    "attempts are bounded": Rules(table=_leases(_Endless)),
    "a draining router gives back": Rules(table=_leases(_DrainAcks)),
    "a refused open is read again": Rules(table=_leases(_Forgetful)),
    "a continuation is what the log holds": Rules(dispatch=_written_as_shown),
    "a reader fetches holes": Rules(merge=_SkippingMerge),
    "a quiet reader asks again": Rules(readers_ask_again=False),
    "readers use the republished subject": Rules(captured_subject=True),
    "an end is conditional": Rules(end_move=_end_anyway),
    "a canceller insists": Rules(enders_insist=False),
}
