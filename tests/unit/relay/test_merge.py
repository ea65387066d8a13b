"""Frames and credits: what a gateway receives is the log, whatever the order of appends, credits and notices."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.relay.merge import Closing, Outlet, Tape
from shared.limits import SLOW_READER_S, STREAM_CREDITS
from shared.messages import (
    Accepted,
    Chunk,
    End,
    Entry,
    Frame,
    Notice,
    Open,
    RequestEcho,
    SequencedEntry,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier

ACCEPTED = Accepted(
    reply_id="resp_local0001ARZ3NDEKTSV4RRFFQ69G5FAV",
    org="o",
    user="u",
    created_s=1.0,
    model="m",
    tier=Tier.FREE,
    budget=64,
    seed=1,
    input_tokens=3,
    deadline_s=600.0,
    echo=RequestEcho(),
)
OPEN = Open(attempt=1, replica="r1", model_version="1", first_index=0)
END = End(reason=EndReason.STOP_TOKEN, by="r1/1")
QUEUED = Notice(kind="queued", position=3, eta_s=1.5)
_frame = decoder(Frame)


def chunk(index: int, text: str = "x") -> Chunk:
    return Chunk(attempt=1, first_index=index, ids=pack_ids([index]), text=text, text_ends=(len(text),))


def log_of(tokens: int, *, ended: bool = True, step: int = 3) -> list[SequencedEntry]:
    """accepted, open, `tokens` chunks of one token, end; sequences with gaps, as other replies share the stream."""
    entries: list[Entry] = [ACCEPTED, OPEN, *(chunk(i) for i in range(tokens)), *([END] if ended else [])]
    return [SequencedEntry(seq=7 + step * i, entry=entry) for i, entry in enumerate(entries)]


def tape_of(log: list[SequencedEntry]) -> Tape:
    tape = Tape()
    for item in log:
        tape.append(item)
    return tape


def take_all(outlet: Outlet, now: float = 0.0, bytes_max: int = 1 << 18) -> list[Frame]:
    """Every frame the outlet gives, each credited at once."""
    frames = []
    while (data := outlet.next_frame(now, bytes_max)) is not None:
        frames.append(_frame.decode(data))
        outlet.credited(1)
    return frames


def test_a_packed_frame_is_the_frame_of_the_contract():
    """The bytes sent decode to, and equal, the encoding of shared.messages.Frame."""
    log = log_of(3)
    data = Outlet("s1", tape_of(log)).next_frame(0.0)
    expected = Frame(stream_id="s1", number=1, entries=tuple(log), closing="ended")
    assert data is not None
    assert _frame.decode(data) == expected
    assert data == encode(expected)


def test_everything_behind_goes_in_one_frame():
    """A stream that gets its credits back receives all it missed at once, not one frame per entry."""
    log = log_of(500)
    assert [len(frame.entries) for frame in take_all(Outlet("s", tape_of(log)))] == [len(log)]


def test_a_frame_never_passes_its_bytes_unless_one_entry_does():
    """Frames are cut by size between entries; an entry that is larger alone goes alone."""
    tape = tape_of([*log_of(0, ended=False), SequencedEntry(seq=90, entry=chunk(0, "y" * 5000))])
    for index in range(1, 40):
        tape.append(SequencedEntry(seq=90 + index, entry=chunk(index, "z" * 100)))
    frames = take_all(Outlet("s", tape), bytes_max=1000)
    for frame in frames:
        assert len(frame.entries) == 1 or sum(len(msgspec.msgpack.encode(item)) for item in frame.entries) <= 1000
    assert len(frames) < 40
    assert [item.seq for frame in frames for item in frame.entries][-1] == 129


def test_a_stream_starts_after_what_its_gateway_has():
    """`after_seq` skips entries that are on the tape already and entries that come to it later alike."""
    log = log_of(4)
    for known in range(len(log)):
        late = Tape()
        outlets = [
            Outlet("early", tape_of(log), after_seq=log[known].seq),
            Outlet("late", late, after_seq=log[known].seq),
        ]
        for item in log:
            late.append(item)
        for outlet in outlets:
            frames = take_all(outlet)
            assert [item for frame in frames for item in frame.entries] == log[known + 1 :]
            assert frames[-1].closing == Closing.ENDED


def test_without_credits_nothing_is_sent_and_with_them_all_of_it():
    """Frames in flight never pass the window; what is held back is not lost."""
    tape, outlet, sent = Tape(), None, []
    log = log_of(50, ended=False)
    tape.append(log[0])
    outlet = Outlet("s", tape, window=2)
    for item in log[1:]:
        if (data := outlet.next_frame(0.0)) is not None:
            sent.append(_frame.decode(data))
        tape.append(item)
    assert (len(sent), outlet.credits_left) == (2, 0)
    outlet.credited(1)
    data = outlet.next_frame(0.0)
    assert data is not None
    assert [item for frame in [*sent, _frame.decode(data)] for item in frame.entries] == log


def test_slow_is_said_only_with_something_to_send():
    """The clock of slowness runs while a stream without credits has something to send, and a credit stops it."""
    tape = tape_of(log_of(0, ended=False))
    outlet = Outlet("s", tape, window=1)
    assert outlet.next_frame(0.0) is not None
    assert outlet.next_frame(1.0) is None
    assert not outlet.slow(1000.0)  # nothing is waiting
    tape.append(SequencedEntry(seq=100, entry=chunk(0)))
    assert outlet.next_frame(1001.0) is None
    assert not outlet.slow(1001.0 + SLOW_READER_S - 0.1)
    assert outlet.slow(1001.0 + SLOW_READER_S)
    outlet.credited(1)
    assert not outlet.slow(1001.0 + SLOW_READER_S)


def test_a_notice_is_dropped_without_credits_and_counts_as_something_to_send():
    """A gateway that takes nothing while its reply waits in a queue is slow too: a dead one must not seem present."""
    outlet = Outlet("s", tape_of(log_of(0, ended=False)[:1]), window=1)
    assert outlet.next_frame(0.0) is not None
    outlet.notify(QUEUED, 5.0)
    assert outlet.next_frame(5.0) is None
    outlet.credited(1)
    assert outlet.next_frame(6.0) is None
    outlet.notify(QUEUED, 7.0)
    assert _frame.decode(outlet.next_frame(7.0) or b"").notice == QUEUED
    outlet.notify(QUEUED, 8.0)
    assert outlet.slow(8.0 + SLOW_READER_S)


@pytest.mark.parametrize("why", [Closing.GONE, Closing.DRAINING, Closing.SLOW])
def test_a_closing_frame_needs_no_credit_and_is_the_last(why):
    """The word that nothing more comes is not held back, is said once, and nothing follows it."""
    outlet = Outlet("s", tape_of(log_of(2, ended=False)), window=1)
    assert outlet.next_frame(0.0) is not None
    last = _frame.decode(outlet.close(why) or b"")
    assert (last.number, last.closing, last.entries) == (2, why, ())
    assert outlet.close(why) is None
    outlet.credited(5)
    assert outlet.next_frame(0.0) is None


def test_a_stream_that_has_everything_still_hears_the_end():
    """A gateway that opens after the `end` entry it already has is told so in an empty frame."""
    log = log_of(2)
    frames = take_all(Outlet("s", tape_of(log), after_seq=log[-1].seq))
    assert [(frame.entries, frame.closing) for frame in frames] == [((), Closing.ENDED)]


def test_the_tape_refuses_what_is_out_of_order():
    """An entry that does not follow the last is a defect of the follower, and raises."""
    tape = tape_of(log_of(1, ended=False))
    with pytest.raises(ValueError, match="does not follow"):
        tape.append(SequencedEntry(seq=tape.last_seq, entry=chunk(1)))


def test_a_reply_waits_until_a_router_opens_it():
    """Only a reply that was accepted and neither opened nor ended is waiting in a queue."""
    tape = Tape()
    seen = [tape.waiting]
    for item in log_of(1):
        tape.append(item)
        seen.append(tape.waiting)
    assert seen == [False, True, False, False, False]


@dataclass
class Gateway:
    """What a careful gateway would check, frame by frame."""

    window: int
    sent: int = 0
    credited: int = 0
    items: list[SequencedEntry] = field(default_factory=list)
    closed: bool = False

    def take(self, data: bytes) -> None:
        frame = _frame.decode(data)
        self.sent += 1
        assert not self.closed, "a frame after the last"
        assert frame.number == self.sent
        assert self.sent - self.credited <= self.window
        self.items.extend(frame.entries)
        self.closed = frame.closing == Closing.ENDED


MOVES = st.lists(st.sampled_from(["append", "append", "send", "credit", "notice"]), max_size=120)


@given(
    moves=MOVES, window=st.integers(1, STREAM_CREDITS + 5), bytes_max=st.integers(1, 4000), tokens=st.integers(0, 40)
)
def test_any_order_of_moves_delivers_the_log_once_in_order(moves, window, bytes_max, tokens):
    """Numbers are contiguous, credits hold, and what arrives is the log: a prefix at any time, all of it at last."""
    log, tape = log_of(tokens), Tape()
    outlet, gateway = Outlet("s", tape, window=window), Gateway(min(window, STREAM_CREDITS))
    left = list(log)

    def send(now: float) -> bool:
        data = outlet.next_frame(now, bytes_max)
        if data is not None:
            gateway.take(data)
        return data is not None

    for now, move in enumerate(moves):
        if move == "append" and left:
            tape.append(left.pop(0))
        elif move == "send":
            send(float(now))
        elif move == "credit" and gateway.credited < gateway.sent:
            gateway.credited += 1
            outlet.credited(1)
        elif move == "notice":
            outlet.notify(QUEUED, float(now))
        assert gateway.items == log[: len(gateway.items)]
    for item in left:
        tape.append(item)
    for _ in range(len(log) + 2):
        outlet.credited(gateway.sent - gateway.credited)
        gateway.credited = gateway.sent
        if not send(1e6):
            break
    assert gateway.items == log
    assert gateway.closed
