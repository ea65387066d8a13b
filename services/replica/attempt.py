"""One attempt at a reply in a replica's shell: the engine's tokens become a log, and somebody hears when it is over.

                 tokens, within its deadline, somebody listening
                    ┌──────────┐
                    └─> RUNNING ─┬─ engine: natural end ───────> VERDICT ──> ENDING ─ `end` stands ─┐
                                 ├─ idle, expired, cannot run ─────────────> ENDING                 │
                                 ├─ handed back, engine lost ──────────────> FLUSHING ─ written ────┤
                                 └─ an `end` or another `open` stands (also from the others) ───────┤
                                                                                                    v
                                          OVER <── blocks free ──────────────────────────────── LEAVING

The log side (a `LogWriter`, the append in flight included) and the engine side (blocks held or free) finish in either
order; only when both have is the attempt over and reported. The last window of a natural end is looked at before its
`end` is written.
Pure: times are arguments, the shell performs the commands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from shared.errors import IllegalEventError
from shared.limits import ACK_WAIT_S, IDLE_END_S, SAFETY_VERDICT_S, SAFETY_WINDOW_CHARS
from shared.messages import Dispatch, End, Open, SequencedEntry, TokenLogprob
from shared.outcomes import EndReason
from shared.token_log import Append, LogWriter, WriterState

# --- what the shell shall do ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """The engine shall drop it at the next step. `cause` is a metric label."""

    cause: str


@dataclass(frozen=True, slots=True)
class CheckWindow:
    """Ask safety about the text that ends the reply; the answer, or its lack, is told by `verdict`."""

    text: str


class Outcome(StrEnum):
    """How an attempt was over, as its router hears it."""

    ENDED = "ended"
    REPLACED = "replaced"
    HANDED_BACK = "handed_back"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Over:
    """It writes no more and its blocks are free: tell the router, write down the cost, forget it."""

    outcome: Outcome
    detail: str


Command = AbortSequence | CheckWindow | Over


class Phase(Enum):
    RUNNING = "running"
    VERDICT = "verdict"
    ENDING = "ending"
    FLUSHING = "flushing"
    LEAVING = "leaving"
    OVER = "over"


class Turn(Enum):
    """What moves an attempt from phase to phase."""

    FINISHED = "finished"  # the engine came to a natural end
    DECIDED = "decided"  # the reason of our own `end` is known
    GIVEN_UP = "given_up"  # somebody else shall go on with it
    SETTLED = "settled"  # the log side is finished: ours, or another's entry stands
    FREED = "freed"  # both sides are


_TURNS: Mapping[tuple[Phase, Turn], Phase] = {
    (Phase.RUNNING, Turn.FINISHED): Phase.VERDICT,
    (Phase.RUNNING, Turn.DECIDED): Phase.ENDING,
    (Phase.RUNNING, Turn.GIVEN_UP): Phase.FLUSHING,
    (Phase.RUNNING, Turn.SETTLED): Phase.LEAVING,
    (Phase.VERDICT, Turn.DECIDED): Phase.ENDING,
    (Phase.VERDICT, Turn.SETTLED): Phase.LEAVING,
    (Phase.ENDING, Turn.SETTLED): Phase.LEAVING,
    (Phase.FLUSHING, Turn.SETTLED): Phase.LEAVING,
    (Phase.LEAVING, Turn.FREED): Phase.OVER,
}


class Attempt:
    """The state of one (reply, attempt) in this replica."""

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        replica: str,
        now: float,
        epoch_s: float,
        idle_end_s: float = IDLE_END_S,
        cores: int = 1,
    ) -> None:
        """`epoch_s` added to `now` gives seconds since the epoch. A step of the engine takes `cores`."""
        accepted = dispatch.request.accepted
        self.reply_id = accepted.reply_id
        self.number = dispatch.attempt
        self.sequence_id = f"{accepted.reply_id}.{dispatch.attempt}"
        self.accepted = accepted
        self.first_index = len(dispatch.written) // 4
        self.writer = LogWriter(attempt=dispatch.attempt, open_seq=dispatch.open_seq, first_index=self.first_index)
        self.phase = Phase.RUNNING
        self.blocks_held = True
        self.aborting = False
        self.sampled_tokens = 0
        self.cached_tokens = 0
        self.engine_s = 0.0
        self.sampled_s = (0.0, 0.0)  # when the first and the last token of the chunk in flight were sampled
        self._unsent_s: tuple[float, float] | None = None  # the same of those not yet sent
        # the lease: whom it reports to, and which delivery it keeps alive
        self.router, self.ack_subject, self.delivered = dispatch.router, dispatch.ack_subject, dispatch.delivered
        self._epoch_s, self._cores = epoch_s, cores
        self._by = f"{replica}#{dispatch.attempt}"
        self._outcome: tuple[Outcome, str] = (Outcome.ENDED, "")
        self._deadline = now + dispatch.deadline_left_s
        self._present_at = now
        self._idle_end_s = idle_end_s
        self._natural: EndReason | None = None
        self._verdict_by: float | None = None
        self._texts: list[str] = []  # bounded by the budget
        self._last_append_s: float | None = None
        self._appended_at_extend = self.first_index

    def _go(self, turn: Turn) -> None:
        phase = _TURNS.get((self.phase, turn))
        if phase is None:
            raise IllegalEventError(f"{turn.value} while {self.phase.value}: {self.reply_id}")
        self.phase = phase

    @property
    def over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def core_s(self) -> float:
        """What it cost so far as the engine told, in seconds of a core."""
        return self.engine_s * self._cores

    @property
    def output_tokens(self) -> int:
        """Tokens of this attempt that stand in the log."""
        return self.writer.appended - self.first_index

    # --- from the engine -------------------------------------------------------------------------------

    def tokens(
        self,
        ids: tuple[int, ...],
        texts: tuple[str, ...],
        cached_tokens: int | None,
        sampled_s: float,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Sampled tokens. What comes after the reply was ended or given up is dropped."""
        if self.phase is not Phase.RUNNING or not ids:
            return
        if cached_tokens is not None:
            self.cached_tokens = cached_tokens
        self.writer.offer(ids, texts, cached_tokens, logprobs)
        self.sampled_tokens += len(ids)
        self._texts.extend(texts)
        self._unsent_s = (self._unsent_s[0] if self._unsent_s else sampled_s, sampled_s)

    def finished(self, reason: EndReason, engine_s: float, now: float) -> list[Command]:
        """The engine is done with it and holds none of its blocks."""
        self.blocks_held = False
        self.engine_s += engine_s
        if self.phase is not Phase.RUNNING:
            return self._settle_if_done()
        if not reason.natural:
            return self.fail(f"the engine ended it as {reason}")
        self._natural = reason
        self._go(Turn.FINISHED)
        window = "".join(self._texts)[-SAFETY_WINDOW_CHARS:]
        if not window:
            return self.verdict(None, now)  # nothing was written: nothing to look at
        self._verdict_by = now + SAFETY_VERDICT_S
        return [CheckWindow(window)]

    def freed(self, engine_s: float) -> list[Command]:
        """The engine confirms an abort: blocks are free."""
        self.blocks_held = False
        self.engine_s += engine_s
        return self._settle_if_done()

    def refused(self, reason: str, detail: str, now: float) -> list[Command]:
        """The engine did not take it in: others may (`full`), or nobody can."""
        self.blocks_held = False
        if self.phase is not Phase.RUNNING:
            return self._settle_if_done()
        if reason == "full":
            return self._give_up(Outcome.HANDED_BACK, detail)
        return self._end(EndReason.FAILED, now, detail=detail)

    # --- from safety ---------------------------------------------------------------------------------------

    def verdict(self, category: str | None, now: float, *, checked: bool = True) -> list[Command]:
        """The last window: None is fine, else what it was flagged as; `checked` False when nobody answered in time."""
        if self.phase is not Phase.VERDICT or self._natural is None:
            return []
        if category is not None:
            return self._end(EndReason.SAFETY, now, detail=category)
        return self._end(self._natural, now, checked=checked)

    # --- from the log ----------------------------------------------------------------------------------------

    def due_at(self, interval_s: float) -> float | None:
        """When the next append should go out; None when there is none.

        The first token and whatever ends the attempt go at once, other tokens `interval_s` after the append before.
        """
        if self.phase in (Phase.LEAVING, Phase.OVER) or self.writer.in_flight is not None:
            return None
        if self.writer.pending == 0:
            return 0.0 if self.phase is Phase.ENDING else None
        if self.phase is not Phase.RUNNING or self._last_append_s is None:
            return 0.0
        return self._last_append_s + interval_s

    def next_append(self, now: float) -> Append | None:
        append = self.writer.next_append()
        if append is not None:
            self._last_append_s = now
            self.sampled_s, self._unsent_s = self._unsent_s or self.sampled_s, None
        return append

    def acked(self, seq: int) -> list[Command]:
        """The append in flight stands."""
        self.writer.acked(seq)
        return self._log_moved()

    def append_refused(self, standing: SequencedEntry | None) -> list[Command]:
        """Another entry stands where ours should: ours after all, an `end`, or another attempt's.

        When the append is in flight still, the entry was read from a copy that lags: read it again.
        """
        if self.writer.refused(standing) is not WriterState.REPLACED:
            return [] if self.writer.in_flight is not None else self._log_moved()
        if self.phase is Phase.LEAVING:
            return self._settle_if_done()
        if standing is not None and isinstance(standing.entry, End):
            return self._settle(Outcome.ENDED, "", cause=standing.entry.reason.value)
        by = standing.entry.replica if standing is not None and isinstance(standing.entry, Open) else "nobody we know"
        return self._settle(Outcome.REPLACED, f"by {by}", cause="replaced")

    def _log_moved(self) -> list[Command]:
        if self.writer.state is WriterState.ENDED and self.phase is not Phase.LEAVING:
            return self._settle(Outcome.ENDED, "", cause="ended")
        return self._settle_if_done()

    # --- from outside ------------------------------------------------------------------------------------------

    def cancelled(self, reason: EndReason) -> list[Command]:
        """An `end` stands already: nothing more needs writing."""
        if self.phase in (Phase.LEAVING, Phase.OVER):
            return []
        return self._settle(Outcome.ENDED, "", cause=reason.value)

    def superseded(self) -> list[Command]:
        """A later attempt of the same reply was sent to this same replica."""
        if self.phase in (Phase.LEAVING, Phase.OVER):
            return []
        return self._settle(Outcome.REPLACED, "by a later attempt here", cause="replaced")

    def present(self, now: float) -> None:
        """A client is attached."""
        self._present_at = now

    def hand_back(self, detail: str) -> list[Command]:
        """The replica leaves: what was sampled is written, another goes on."""
        return self._give_up(Outcome.HANDED_BACK, detail) if self.phase is Phase.RUNNING else []

    def fail(self, detail: str) -> list[Command]:
        """The engine is lost, or lost it: what was sampled is written, another goes on."""
        return self._give_up(Outcome.FAILED, detail) if self.phase is Phase.RUNNING else []

    def engine_lost(self) -> list[Command]:
        """Its process is gone, and all blocks with it."""
        self.blocks_held = False
        if self.phase is Phase.RUNNING:
            return self.fail("the engine stopped")
        return self._settle_if_done()

    def tick(self, now: float) -> list[Command]:
        """Deadlines: of the verdict, of the reply, of a client's silence."""
        if self.phase is Phase.VERDICT and self._verdict_by is not None and now >= self._verdict_by:
            return self.verdict(None, now, checked=False)
        if self.phase is not Phase.RUNNING:
            return []
        if now >= self._deadline:
            return self._end(EndReason.EXPIRED, now, detail="The reply was not finished before its deadline.")
        if not self.accepted.echo.background and now >= self._present_at + self._idle_end_s:
            return self._end(EndReason.IDLE, now)
        return []

    # --- the lease -----------------------------------------------------------------------------------------------

    def take_over(self, router: str, ack_subject: str, delivered: int) -> str | None:
        """A delivery's router asks for it. The newest is reported to; returns the router that is thereby released."""
        if delivered < self.delivered:
            return None
        before = self.router
        self.router, self.ack_subject, self.delivered = router, ack_subject, delivered
        return before if before != router else None

    def may_extend(self, now: float, *, engine_moves: bool) -> bool:
        """Whether the delivery may be kept: the log grew since the last time, or the engine is inside its step.

        An append that hangs is no progress, however well the engine does.
        """
        grew = self.writer.appended > self._appended_at_extend
        self._appended_at_extend = self.writer.appended
        sent = self._last_append_s
        hangs = self.writer.in_flight is not None and sent is not None and now - sent > ACK_WAIT_S
        return grew or (engine_moves and not hangs)

    # --- leaves ---------------------------------------------------------------------------------------------------

    def _end(self, reason: EndReason, now: float, *, detail: str = "", checked: bool = True) -> list[Command]:
        self._go(Turn.DECIDED)
        ended_s = self._epoch_s + now
        core_s = self.core_s if self._natural is not None else None  # else the engine has not told it yet
        self.writer.finish(
            End(reason=reason, by=self._by, detail=detail, checked=checked, ended_s=ended_s, core_s=core_s)
        )
        return self._abort(reason.value)

    def _give_up(self, outcome: Outcome, detail: str) -> list[Command]:
        self._go(Turn.GIVEN_UP)
        self._outcome = (outcome, detail)
        return [*self._abort(outcome.value), *self._settle_if_done()]

    def _settle(self, outcome: Outcome, detail: str, *, cause: str) -> list[Command]:
        """The log side is finished."""
        self._go(Turn.SETTLED)
        self._outcome = (outcome, detail)
        return [*self._abort(cause), *self._settle_if_done()]

    def _settle_if_done(self) -> list[Command]:
        """Whatever is finished by now."""
        if self.phase is Phase.FLUSHING and self.writer.pending == 0 and self.writer.in_flight is None:
            self._go(Turn.SETTLED)
        if self.phase is Phase.LEAVING and not self.blocks_held and self.writer.in_flight is None:
            self._go(Turn.FREED)
            return [Over(*self._outcome)]
        return []

    def _abort(self, cause: str) -> list[Command]:
        if not self.blocks_held or self.aborting:
            return []
        self.aborting = True
        return [AbortSequence(cause)]
