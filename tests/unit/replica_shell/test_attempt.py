"""One attempt: what the engine writes becomes a log, and it is over only when both log and blocks are done with."""

import random

import pytest

from services.replica.attempt import AbortSequence, Attempt, CheckWindow, Outcome, Over, Phase
from shared.errors import IllegalEventError
from shared.limits import ACK_WAIT_S, CHUNK_INTERVAL_S_MIN, IDLE_END_S, SAFETY_VERDICT_S, SAFETY_WINDOW_CHARS
from shared.messages import (
    Accepted,
    Chunk,
    Dispatch,
    End,
    GenerateRequest,
    Open,
    RequestEcho,
    Sampling,
    SequencedEntry,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import LogView

REPLY = "resp_local01" + "0" * 26
EPOCH_S = 1000.0


def dispatch(
    *, number: int = 1, written: int = 0, background: bool = False, delivered: int = 1, router: str = "router-1"
) -> Dispatch:
    accepted = Accepted(
        reply_id=REPLY,
        org="o",
        user="u",
        created_s=0.0,
        model="m",
        tier=Tier.FREE,
        budget=100,
        seed=1,
        input_tokens=5,
        deadline_s=600.0,
        echo=RequestEcho(background=background),
    )
    request = GenerateRequest(
        accepted=accepted, accepted_seq=1, prompt=pack_ids(range(5)), block_hashes=b"", sampling=Sampling(seed=1)
    )
    return Dispatch(
        request=request,
        attempt=number,
        open_seq=2,
        written=pack_ids(range(written)),
        router=router,
        ack_subject=f"ack.{router}.{delivered}",
        delivered=delivered,
        deadline_left_s=600.0,
    )


def attempt(*, cores: int = 1, **changes) -> Attempt:
    return Attempt(dispatch(**changes), replica="replica-1", now=0.0, epoch_s=EPOCH_S, cores=cores)


class Log:
    """The server's side of a log: conditional appends, with faults when told."""

    def __init__(self, open_seq: int = 2) -> None:
        self.entries: list[SequencedEntry] = [
            SequencedEntry(seq=open_seq, entry=Open(attempt=1, replica="replica-1", model_version="1", first_index=0))
        ]

    def write(self, one: Attempt, now: float = 0.0) -> list:
        """Send what is due until nothing is; returns what the attempt decided."""
        decided = []
        while (due := one.due_at(0.0)) is not None and due <= now:
            append = one.next_append(now)
            assert append is not None
            decided += self.deliver(one, append)
        return decided

    def deliver(self, one: Attempt, append) -> list:
        if append.expected_seq != self.entries[-1].seq:
            return one.append_refused(self.entries[-1])
        self.put(append.entry)
        return one.acked(self.entries[-1].seq)

    def put(self, entry) -> None:
        self.entries.append(SequencedEntry(seq=self.entries[-1].seq + 3, entry=entry))

    @property
    def chunks(self) -> list[Chunk]:
        return [item.entry for item in self.entries if isinstance(item.entry, Chunk)]

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in unpack_ids(chunk.ids)]

    @property
    def end(self) -> End | None:
        last = self.entries[-1].entry
        return last if isinstance(last, End) else None


def test_first_token_at_once_then_coalesced():
    """The first token goes out as soon as it is sampled, later ones an interval after the append before."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    assert one.due_at(CHUNK_INTERVAL_S_MIN) == 0.0
    append = one.next_append(5.0)
    one.tokens((8,), ("b",), None, 0.0)
    assert one.due_at(CHUNK_INTERVAL_S_MIN) is None, "one append in flight"
    log.deliver(one, append)
    assert one.due_at(CHUNK_INTERVAL_S_MIN) == 5.0 + CHUNK_INTERVAL_S_MIN
    one.tokens((9,), ("c",), None, 0.0)
    log.write(one, 6.0)
    assert [unpack_ids(chunk.ids) for chunk in log.chunks] == [[7], [8, 9]]


def test_a_natural_end_waits_for_its_verdict_and_its_tokens():
    """The last tokens are shown at once, the end after the verdict; then it is over, the blocks being free already."""
    one, log = attempt(), Log()
    one.tokens((7, 8), ("a", "b"), 3, 0.0)
    assert one.finished(EndReason.STOP_TOKEN, 0.5, 1.0) == [CheckWindow("ab")]
    assert log.write(one, 1.0) == []
    assert log.ids == [7, 8]
    assert log.end is None
    assert one.verdict(None, 1.1) == []
    assert log.write(one, 1.1) == [Over(Outcome.ENDED, "")]
    assert log.end == End(reason=EndReason.STOP_TOKEN, by="replica-1#1", ended_s=EPOCH_S + 1.1, core_s=0.5)
    assert (one.output_tokens, one.cached_tokens, one.engine_s) == (2, 3, 0.5)
    assert one.verdict("late", 2.0) == [], "a late verdict changes nothing here"


def test_log_probabilities_go_with_their_tokens():
    """They stand in the chunk of the tokens that they belong to, and nobody who did not ask has any."""
    odds = tuple(TokenLogprob(bytes([token]), -float(token)) for token in (7, 8, 9))
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0, odds[:1])
    log.write(one, 1.0)
    one.tokens((8, 9), ("b", "c"), None, 0.0, odds[1:])
    log.write(one, 2.0)
    assert [chunk.logprobs for chunk in log.chunks] == [odds[:1], odds[1:]]


def test_a_cost_is_told_in_seconds_of_a_core():
    """An engine whose steps take four cores costs four times its own seconds; an end it did not come to has no cost."""
    one, log = attempt(cores=4), Log()
    one.finished(EndReason.MAX_TOKENS, 0.5, 1.0)
    log.write(one, 1.0)
    assert log.end is not None
    assert log.end.core_s == 2.0
    other, log = attempt(), Log()
    other.tick(1e9)
    log.write(other, 1e9)
    assert log.end is not None
    assert (log.end.reason, log.end.core_s) == (EndReason.EXPIRED, None)


def test_a_flagged_window_ends_as_safety():
    """The reason says so, and the category is in the detail."""
    one, log = attempt(), Log()
    one.tokens((7,), ("x",), 0, 0.0)
    one.finished(EndReason.MAX_TOKENS, 0.0, 1.0)
    one.verdict("violence", 1.0)
    log.write(one, 1.0)
    assert log.end is not None
    assert (log.end.reason, "violence" in log.end.detail) == (EndReason.SAFETY, True)


def test_no_verdict_in_time_is_marked():
    """Past its deadline the end is written unchecked."""
    one, log = attempt(), Log()
    one.tokens((7,), ("x",), 0, 0.0)
    one.finished(EndReason.MAX_TOKENS, 0.0, 1.0)
    assert one.tick(1.0 + SAFETY_VERDICT_S / 2) == []
    one.tick(1.0 + SAFETY_VERDICT_S)
    log.write(one, 2.0)
    assert log.end is not None
    assert (log.end.reason, log.end.checked) == (EndReason.MAX_TOKENS, False)


def test_the_window_is_the_end_of_the_text():
    """Safety sees the last characters, whatever tokens they came in; without text there is nothing to see."""
    one = attempt()
    for n in range(600):
        one.tokens((n,), (f"{n % 10}",), None, 0.0)
    (check,) = one.finished(EndReason.MAX_TOKENS, 0.0, 1.0)
    assert check.text == "".join(f"{n % 10}" for n in range(600))[-SAFETY_WINDOW_CHARS:]
    silent = attempt()
    assert silent.finished(EndReason.STOP_TOKEN, 0.0, 1.0) == []
    assert silent.phase is Phase.ENDING


def test_a_cancel_aborts_and_drops_late_tokens():
    """An `end` stands already: the engine drops it, nothing more is appended, and it is over when its blocks are free."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    log.write(one)
    log.put(End(reason=EndReason.USER_STOP, by="conversation-1"))
    assert one.cancelled(EndReason.USER_STOP) == [AbortSequence("user_stop")]
    one.tokens((8,), ("b",), None, 0.0)
    assert one.due_at(0.0) is None
    assert one.cancelled(EndReason.USER_STOP) == [], "twice is once"
    assert one.freed(0.2) == [Over(Outcome.ENDED, "")]
    assert log.ids == [7]


def test_a_cancel_waits_for_the_append_in_flight():
    """What the log holds of it is known before it is reported over."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    append = one.next_append(0.0)
    one.cancelled(EndReason.USER_STOP)
    assert one.freed(0.0) == []
    assert log.deliver(one, append) == [Over(Outcome.ENDED, "")]
    assert one.output_tokens == 1


def test_a_refused_append_learns_of_the_end():
    """The control message was lost: the log itself says that it has ended."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    log.put(End(reason=EndReason.IDLE, by="router-1"))
    assert log.write(one) == [AbortSequence("idle")]
    assert one.freed(0.0) == [Over(Outcome.ENDED, "")]


def test_a_replaced_writer_drops_the_sequence():
    """Another attempt was opened: a zombie counts it and goes."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    log.put(Open(attempt=2, replica="replica-2", model_version="1", first_index=0))
    assert log.write(one) == [AbortSequence("replaced")]
    (over,) = one.freed(0.0)
    assert (over.outcome, over.detail) == (Outcome.REPLACED, "by replica-2")


def test_an_earlier_try_had_landed():
    """A refusal by one's own entry is an ack that was lost."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    append = one.next_append(0.0)
    log.put(append.entry)
    again = one.writer.unknown()
    assert again.data == append.data
    assert log.deliver(one, again) == []
    one.tokens((8,), ("b",), None, 0.0)
    log.write(one, 9.0)
    assert log.ids == [7, 8]


def test_a_lagging_read_decides_nothing():
    """When the entry that stands cannot be the cause of the refusal, the append stays in flight."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    append = one.next_append(0.0)
    assert one.append_refused(log.entries[0]) == []
    assert one.writer.in_flight is append
    assert one.due_at(0.0) is None


def test_idle_ends_it_unless_in_the_background():
    """Nobody attached for IDLE_END_S: aborted, and the `end` says idle after the tokens that were sampled."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    one.present(10.0)
    assert one.tick(10.0 + IDLE_END_S - 0.1) == []
    assert one.tick(10.0 + IDLE_END_S) == [AbortSequence("idle")]
    one.tokens((8,), ("late",), None, 0.0)
    assert log.write(one, 50.0) == [], "its blocks are not free yet"
    assert one.freed(0.0) == [Over(Outcome.ENDED, "")]
    assert (log.ids, log.end.reason) == ([7], EndReason.IDLE)
    assert attempt(background=True).tick(IDLE_END_S * 2) == []


def test_the_deadline_ends_it():
    """Also in the background."""
    one, log = attempt(background=True), Log()
    assert one.tick(600.0) == [AbortSequence("expired")]
    log.write(one, 600.0)
    assert (log.end.reason, log.end.detail != "") == (EndReason.EXPIRED, True)


def test_handing_back_writes_what_was_sampled():
    """Another replica goes on from there."""
    one, log = attempt(), Log()
    one.tokens((7, 8), ("a", "b"), 0, 0.0)
    assert one.hand_back("draining") == [AbortSequence("handed_back")]
    assert one.freed(0.1) == []
    assert log.write(one) == [Over(Outcome.HANDED_BACK, "draining")]
    assert log.ids == [7, 8]
    assert log.end is None


def test_handing_back_with_nothing_written():
    """There is nothing to flush: it is over when the engine says so."""
    one = attempt()
    one.hand_back("draining")
    assert one.freed(0.0) == [Over(Outcome.HANDED_BACK, "draining")]


def test_the_engine_did_not_take_it():
    """A full engine hands back; what nobody can run ends as failed, with the reason."""
    full, log = attempt(), Log()
    assert full.refused("full", "no place", 0.0) == [Over(Outcome.HANDED_BACK, "no place")]
    never = attempt()
    assert never.refused("never_fits", "too long", 0.0) == []
    assert log.write(never) == [Over(Outcome.ENDED, "")]
    assert (log.end.reason, log.end.detail) == (EndReason.FAILED, "too long")


def test_the_engine_dies():
    """What was sampled is written, and others hear that the attempt failed."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 0.0)
    assert one.engine_lost() == []
    assert [type(over) for over in log.write(one)] == [Over]
    assert log.ids == [7]
    ending = attempt()
    ending.cancelled(EndReason.USER_STOP)
    assert ending.engine_lost() == [Over(Outcome.ENDED, "")]


def test_the_engine_ends_it_without_a_natural_reason():
    """That is a failed attempt, not a reply's end."""
    one = attempt()
    (over,) = one.finished(EndReason.FAILED, 0.0, 0.0)
    assert over.outcome is Outcome.FAILED


def test_a_finish_that_crosses_a_cancel():
    """The engine finished while it was told to drop it: the blocks are free, the stop stands."""
    one = attempt()
    one.cancelled(EndReason.USER_STOP)
    assert one.finished(EndReason.STOP_TOKEN, 0.3, 1.0) == [Over(Outcome.ENDED, "")]


def test_leases_go_to_the_newest_delivery():
    """A newer delivery's router takes over and the one before is released; an older one changes nothing."""
    one = attempt(delivered=2)
    assert one.take_over("router-2", "ack.b", 3) == "router-1"
    assert one.take_over("router-1", "ack.old", 2) is None
    assert (one.router, one.ack_subject) == ("router-2", "ack.b")
    assert one.take_over("router-2", "ack.c", 4) is None, "the same router is not released"
    assert one.ack_subject == "ack.c"


def test_a_lease_is_kept_only_while_something_moves():
    """A grown log, or an engine inside its step; never for an append that hangs."""
    one, log = attempt(), Log()
    assert one.may_extend(0.0, engine_moves=True), "it waits in a live engine"
    assert not one.may_extend(0.5, engine_moves=False)
    one.tokens((7,), ("a",), 0, 0.0)
    log.write(one, 0.6)
    assert one.may_extend(1.0, engine_moves=False)
    assert not one.may_extend(1.5, engine_moves=False)
    one.tokens((8,), ("b",), None, 0.0)
    one.next_append(2.0)
    assert one.may_extend(2.5, engine_moves=True)
    assert not one.may_extend(2.0 + ACK_WAIT_S + 0.1, engine_moves=True)


def test_when_tokens_were_sampled_goes_with_their_chunk():
    """The first and the last time of what a chunk holds, for benches."""
    one, log = attempt(), Log()
    one.tokens((7,), ("a",), 0, 100.0)
    append = one.next_append(0.0)
    assert one.sampled_s == (100.0, 100.0)
    one.tokens((8,), ("b",), None, 101.0)
    one.tokens((9,), ("c",), None, 102.0)
    log.deliver(one, append)
    one.tokens((10,), ("d",), None, 103.0)
    one.next_append(1.0)
    assert one.sampled_s == (101.0, 103.0)


def test_illegal_turns_raise_and_change_nothing():
    """The table has no way from the end back."""
    one = attempt()
    one.cancelled(EndReason.USER_STOP)
    one.freed(0.0)
    assert one.over
    with pytest.raises(IllegalEventError):
        one._end(EndReason.IDLE, 0.0)
    assert one.phase is Phase.OVER


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_ends_well(seed: int):
    """Whatever crosses, the log is legal, holds a prefix of what was sampled, and the attempt is over exactly once."""
    rng = random.Random(seed)
    one, log = attempt(), Log()
    overs, sampled, in_flight, now = [], 0, None, 0.0
    finished = False

    def run(commands: list) -> None:
        nonlocal finished
        for command in commands:
            if isinstance(command, Over):
                overs.append(command)
            elif isinstance(command, CheckWindow) and rng.random() < 0.5:
                run(one.verdict(rng.choice([None, "bad"]), now))

    def end_from_outside() -> None:
        if log.end is None:
            log.put(End(reason=EndReason.USER_STOP, by="c"))

    for _ in range(400):
        now += rng.random() * 0.2
        act = rng.randrange(12)
        if act < 5 and not finished and not one.aborting:
            one.tokens((sampled,), (f"<{sampled}>",), None, now)
            sampled += 1
        elif act < 7 and in_flight is None and (due := one.due_at(0.02)) is not None and due <= now:
            in_flight = one.next_append(now)
        elif act < 9 and in_flight is not None:
            if rng.random() < 0.2:
                in_flight = one.writer.unknown()
            else:
                sent, in_flight = in_flight, None
                run(log.deliver(one, sent))
        elif act == 9 and rng.random() < 0.1 and not finished and not one.aborting:
            finished = True
            run(one.finished(EndReason.MAX_TOKENS, 0.0, now))
        elif act == 10 and one.aborting and not finished:
            finished = True
            run(one.freed(0.0))
        elif act == 11 and rng.random() < 0.05:
            turn = rng.randrange(3)
            if turn == 0:
                end_from_outside()
            else:
                run(one.hand_back("drain") if turn == 1 else one.tick(now + 700.0))
        run(one.tick(now))
    if not one.over:
        end_from_outside()
        run(one.cancelled(EndReason.USER_STOP))
        if in_flight is not None and one.writer.in_flight is not None:
            run(log.deliver(one, in_flight))
        if not finished:
            run(one.freed(0.0))
    assert one.over
    assert len(overs) == 1
    ids = log.ids
    assert ids == list(range(len(ids)))
    assert len(ids) <= sampled
    view = LogView()
    view.apply(1, dispatch().request.accepted)
    view.apply_all(log.entries)
    assert view.text == "".join(f"<{n}>" for n in ids)
    if overs[0].outcome is Outcome.ENDED:
        assert log.end is not None
