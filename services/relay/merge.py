"""The entries of one reply on their way to its streams: encoded once, cut into frames, paid for with credits. Pure.

    tape     [accepted][open][chunk][chunk][chunk][chunk] ...      one per reply, shared by all its streams
                             ^                    ^
                             a slow stream        a quick one      a stream is a position and a few counters

A slow client costs nothing: what it has not taken stays on the shared tape, and goes out in few large frames once
its credits come back. Each frame costs one credit; the gateway returns one per frame written to the client.
"""

from bisect import bisect_right
from enum import StrEnum

import msgspec

from shared.limits import FRAME_BYTES_MAX, SLOW_READER_S, STREAM_CREDITS
from shared.messages import Accepted, End, Message, Notice, Open, SequencedEntry, encode


class Closing(StrEnum):
    """Why nothing more comes on a stream."""

    ENDED = "ended"  # the `end` entry was sent
    GONE = "gone"  # the log is no longer there
    DRAINING = "draining"  # this relay leaves: open again, elsewhere
    SLOW = "slow"  # the client took nothing for too long


class _PackedFrame(Message, frozen=True, kw_only=True, tag="Frame"):
    """`shared.messages.Frame` with its entries already encoded: the same bytes on the bus, built once per entry."""

    stream_id: str
    number: int
    entries: list[msgspec.Raw]
    notice: Notice | None = None
    closing: str | None = None


_pack = msgspec.msgpack.Encoder().encode


class Tape:
    """One reply's entries in order, each encoded once, whatever the number of its streams."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.opened = False  # a router has dispatched it
        self.ended = False
        self.last_seq = 0
        self._seqs: list[int] = []
        self._pieces: list[msgspec.Raw] = []
        self._ends: list[int] = []  # bytes up to and including each piece

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def waiting(self) -> bool:
        """Accepted, but no router has dispatched it yet."""
        return self.accepted is not None and not self.opened and not self.ended

    def append(self, item: SequencedEntry) -> None:
        """The next entry; entries come in order and once, as LogMerge delivers them."""
        if item.seq <= self.last_seq:
            raise ValueError(f"sequence {item.seq} does not follow {self.last_seq}")
        piece = _pack(item)
        self._seqs.append(item.seq)
        self._pieces.append(msgspec.Raw(piece))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(piece))
        self.last_seq = item.seq
        if isinstance(item.entry, Accepted):
            self.accepted = item.entry
        elif isinstance(item.entry, Open):
            self.opened = True
        elif isinstance(item.entry, End):
            self.ended = True

    def cut(self, after_seq: int, bytes_max: int) -> tuple[list[msgspec.Raw], int]:
        """The longest run after `after_seq` that fits `bytes_max`, at least one entry when there is one.

        Returns the encoded entries and the sequence of the last of them (`after_seq` when there is none).
        """
        start = bisect_right(self._seqs, after_seq)
        if start == len(self._seqs):
            return [], after_seq
        before = self._ends[start - 1] if start else 0
        end = max(bisect_right(self._ends, before + bytes_max, lo=start), start + 1)
        return self._pieces[start:end], self._seqs[end - 1]


class Outlet:
    """One stream's place on the tape and its credits.

    next_frame() ──> a frame          one credit less; ask again
                 ──> None             nothing to send, closed, or no credit: then the clock of slowness runs
    credited()                        frames were written to the client
    close()      ──> the last frame   costs no credit; nothing follows
    """

    def __init__(
        self,
        stream_id: str,
        tape: Tape,
        *,
        after_seq: int = 0,
        window: int = STREAM_CREDITS,
        slow_s: float = SLOW_READER_S,
    ) -> None:
        self.stream_id = stream_id
        self.closed: Closing | None = None
        self.sent_seq = after_seq  # the last entry sent, or held by the gateway before
        self._tape = tape
        self._window = max(1, min(window, STREAM_CREDITS))  # frames in flight at most
        self._slow_s = slow_s
        self._in_flight = 0
        self._number = 0
        self._notice: Notice | None = None
        self._blocked_s: float | None = None

    @property
    def credits_left(self) -> int:
        return self._window - self._in_flight

    @property
    def behind(self) -> bool:
        """There is something to send: entries, a notice, or the word that the reply has ended."""
        news = self._tape.last_seq > self.sent_seq or self._tape.ended or self._notice is not None
        return news and self.closed is None

    def credited(self, count: int) -> None:
        """The gateway wrote `count` frames. More than were sent counts as all of them: messages may repeat."""
        if count > 0:
            self._in_flight = max(0, self._in_flight - count)
            self._blocked_s = None

    def notify(self, notice: Notice, now: float) -> None:
        """A word to a waiting client: sent with the next frame when there is a credit, dropped when there is none."""
        if self.credits_left > 0:
            self._notice = notice
        else:
            self._block(now)

    def next_frame(self, now: float, bytes_max: int = FRAME_BYTES_MAX) -> bytes | None:
        """The next frame to send at `now`, or None."""
        if not self.behind:
            return None
        if self.credits_left <= 0:
            self._block(now)
            return None
        pieces, self.sent_seq = self._tape.cut(self.sent_seq, bytes_max)
        if self._tape.ended and self.sent_seq >= self._tape.last_seq:
            self.closed = Closing.ENDED
        self._in_flight += 1
        return self._frame(pieces)

    def close(self, why: Closing) -> bytes | None:
        """The last frame, without entries; None when the stream is closed already."""
        if self.closed is not None:
            return None
        self.closed, self._notice = why, None
        return self._frame([])

    def slow(self, now: float) -> bool:
        """The client has taken nothing for `slow_s` although there was something to send."""
        return self.closed is None and self._blocked_s is not None and now - self._blocked_s >= self._slow_s

    def _block(self, now: float) -> None:
        if self._blocked_s is None:
            self._blocked_s = now

    def _frame(self, pieces: list[msgspec.Raw]) -> bytes:
        self._number += 1
        notice, self._notice = self._notice, None
        return encode(
            _PackedFrame(
                stream_id=self.stream_id, number=self._number, entries=pieces, notice=notice, closing=self.closed
            )
        )
