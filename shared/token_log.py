"""The token log of one reply: its rules, its only writers' moves, and what is derived from it.

A log is the history of one key, linear by construction: each append names the entry it follows, and the
server refuses it when another stands there. Ownership over time, as half-open token ranges:

    seq    7          9          12         13         20         21         25        26
        accepted    open 1     chunk      chunk      open 2     chunk      chunk      end
                    r1, from 0  [0, 1)     [1, 9)     r2, from 9  [9, 14)    [14, 30)
        conversation  router   `------- r1 ----'     router     `------- r2 -----'   whoever ends it

    `open 2` stands after seq 13, so whatever r1 still appends expects 13 and is refused: a zombie cannot write.

Pure: no clock, no bus. `LogView` folds entries, `LogWriter` decides a replica's next append, `end_move` a canceller's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import repeat

from shared.errors import TokenLogError
from shared.limits import ATTEMPTS_LOST_MAX, ATTEMPTS_MAX, CHUNK_TOKENS_MAX, EVENT_GAP, OPENS_MAX
from shared.messages import (
    Accepted,
    Chunk,
    End,
    EndedReply,
    Entry,
    Open,
    SequencedEntry,
    TokenLogprob,
    Usage,
    encode,
    pack_ids,
    unpack_ids,
)

# --- event numbers: a pure function of the log ---------------------------------------------------------

EVENT_CREATED = 0
EVENT_NOTICE_FIRST = 1  # queued notices while waiting: ephemeral, not replayed
EVENT_NOTICE_LAST = 989
EVENT_OPENING = 990  # the opening events, up to ten
EVENT_BASE = 1000


def event_of_token(index: int) -> int:
    """Number of the delta that ends with token `index`."""
    return EVENT_BASE + EVENT_GAP * index


def tokens_seen(event: int) -> int:
    """How many tokens a client has whose last event number is `event`."""
    return 0 if event < EVENT_BASE else (event - EVENT_BASE) // EVENT_GAP + 1


def closing_event(budget: int) -> int:
    """Number of the first closing event of a reply that may have `budget` tokens."""
    return EVENT_BASE + EVENT_GAP * (budget + 1)


# --- the fold --------------------------------------------------------------------------------------------


@dataclass
class LogView:
    """What a log says so far. `apply` takes entries in stream order and refuses what the rules forbid."""

    accepted: Accepted | None = None
    accepted_seq: int = 0
    opened: Open | None = None
    open_seq: int = 0
    attempts: int = 0
    returned: int = 0  # of the attempts, those refused or handed back
    fruitless: int = 0  # of the attempts before this one, the last in a row that were lost without a token
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # per token, the text it releases
    cached_tokens: int = 0
    ended: End | None = None
    last_seq: int = 0
    opened_s: float | None = None  # when the first open was stored, where that is known
    first_token_s: float | None = None  # when the first chunk was stored, likewise

    def apply(self, seq: int, entry: Entry, stored_s: float | None = None) -> None:
        """Fold the next entry; raises TokenLogError and changes nothing when it may not stand here.

        `stored_s` is the server's timestamp, seconds since the epoch.
        """
        if seq <= self.last_seq:
            raise TokenLogError(f"sequence {seq} does not follow {self.last_seq}")
        if self.ended is not None:
            raise TokenLogError(f"{type(entry).__name__} after the end")
        if isinstance(entry, Accepted):
            self._accept(seq, entry)
        elif self.accepted is None:
            raise TokenLogError(f"{type(entry).__name__} before accepted: the log's head is missing")
        elif isinstance(entry, Open):
            self._open(seq, entry)
            self.opened_s = self.opened_s or stored_s
        elif isinstance(entry, Chunk):
            self._chunk(entry)
            self.first_token_s = self.first_token_s or stored_s
        else:
            self.ended = entry
        self.last_seq = seq

    def _accept(self, seq: int, entry: Accepted) -> None:
        if self.accepted is not None:
            raise TokenLogError("accepted twice")
        self.accepted, self.accepted_seq = entry, seq

    def _open(self, seq: int, entry: Open) -> None:
        if entry.attempt != self.attempts + 1:
            raise TokenLogError(f"attempt {entry.attempt} follows attempt {self.attempts}")
        if entry.first_index != len(self.ids):
            raise TokenLogError(f"open at token {entry.first_index}, but the log holds {len(self.ids)}")
        if entry.returned - self.returned not in (0, min(1, self.attempts)):
            raise TokenLogError(f"{entry.returned} of {self.attempts} attempts given back, after {self.returned}")
        self.fruitless = self._fruitless(given_back=entry.returned > self.returned)
        self.opened, self.open_seq, self.attempts, self.returned = entry, seq, entry.attempt, entry.returned

    def _fruitless(self, *, given_back: bool) -> int:
        """The same with the last attempt, which is over."""
        if self.opened is None or len(self.ids) > self.opened.first_index:
            return 0
        return self.fruitless + (not given_back)

    def attempts_left(self, *, given_back: bool = False) -> int:
        """How often it may be opened again, now that the last attempt is over.

        Attempts are counted by `open` entries, never by deliveries. Those given back unharmed do not count, and those
        that wrote something begin the count anew, up to a bound: a reply that kills engines does so at one place, one
        whose replicas were killed beside it goes on. `given_back` says of the last what only the next `open` will say.
        """
        spent = self.attempts - self.returned - given_back
        return min(
            ATTEMPTS_MAX - self._fruitless(given_back=given_back),
            ATTEMPTS_LOST_MAX - spent,
            OPENS_MAX - self.attempts,
        )

    def _chunk(self, entry: Chunk) -> None:
        if self.opened is None or entry.attempt != self.opened.attempt:
            raise TokenLogError(f"a chunk of attempt {entry.attempt} under attempt {self.attempts}")
        if entry.first_index != len(self.ids):
            raise TokenLogError(f"chunk at token {entry.first_index}, but the log holds {len(self.ids)}")
        if entry.count == 0 or len(entry.text_ends) != entry.count:
            raise TokenLogError(f"a chunk of {entry.count} tokens with {len(entry.text_ends)} text ends")
        if entry.logprobs and len(entry.logprobs) != entry.count:
            raise TokenLogError(f"a chunk of {entry.count} tokens with {len(entry.logprobs)} log probabilities")
        texts = chunk_texts(entry)
        self.ids.extend(unpack_ids(entry.ids))
        self.texts.extend(texts)
        if entry.cached_tokens is not None:
            self.cached_tokens = max(self.cached_tokens, entry.cached_tokens)

    def copy(self) -> "LogView":
        """Another one that says the same and goes its own way."""
        return replace(self, ids=list(self.ids), texts=list(self.texts))

    def apply_all(self, entries: Iterable[SequencedEntry]) -> "LogView":
        for item in entries:
            self.apply(item.seq, item.entry)
        return self

    @property
    def text(self) -> str:
        """The text before `end` is the reply: shown, stored, billed and continued alike."""
        return "".join(self.texts)

    @property
    def usage(self) -> Usage:
        """Output tokens are the ids before `end`."""
        if self.accepted is None:
            raise TokenLogError("no usage without an accepted entry")
        return Usage(
            input_tokens=self.accepted.input_tokens,
            output_tokens=len(self.ids),
            cached_tokens=self.cached_tokens,
        )


def ended_reply(view: LogView) -> EndedReply:
    """An ended log whole, as it is published and archived; raises TokenLogError for one that has not ended."""
    if view.accepted is None or view.ended is None:
        raise TokenLogError("a reply is whole when its log has ended")
    end = view.ended
    return EndedReply(
        accepted=view.accepted,
        reason=end.reason,
        text=view.text,
        ids=pack_ids(view.ids),
        usage=view.usage,
        attempts=view.attempts,
        ended_s=end.ended_s,
        checked=end.checked,
        detail=end.detail,
        first_token_s=view.first_token_s,
        opened_s=view.opened_s,
        core_s=end.core_s,
    )


def chunk_texts(chunk: Chunk) -> list[str]:
    """The text of each token of a chunk; raises TokenLogError when the ends do not tile the text."""
    texts, start = [], 0
    for end in chunk.text_ends:
        if not start <= end <= len(chunk.text):
            raise TokenLogError(f"text end {end} outside {start}..{len(chunk.text)}")
        texts.append(chunk.text[start:end])
        start = end
    if start != len(chunk.text):
        raise TokenLogError(f"text of {len(chunk.text)} characters, but tokens end at {start}")
    return texts


# --- a canceller ------------------------------------------------------------------------------------------


def end_move(view: LogView, end: End) -> tuple[int, End] | None:
    """The append that would end this log now: (expected sequence, entry); None when an `end` stands already.

    A canceller whose append is refused, or whose outcome is unknown, reads the log again and asks again, until
    an `end` stands: its own or another's.
    """
    if view.ended is not None:
        return None
    if view.accepted is None:
        raise TokenLogError("nothing was accepted under this id")
    return view.last_seq, end


# --- a replica --------------------------------------------------------------------------------------------


class WriterState(Enum):
    WRITING = "writing"
    ENDED = "ended"  # an `end` stands: ours
    REPLACED = "replaced"  # another entry stood where ours should: drop the sequence


@dataclass(frozen=True)
class Append:
    """One conditional append; a retry sends the same bytes with the same expectation."""

    expected_seq: int
    entry: Chunk | End
    data: bytes


class LogWriter:
    """A replica's side of one attempt: one append in flight, immutable chunks, the end last.

    offer() ──> pending ──next_append()──> in flight ──acked()──────> next one
                                               │ ├────unknown()────> the same one again
                                               │ └────refused()────> acked, if what stands there is ours
                                               └───────────────────> REPLACED, if it is not
    """

    def __init__(self, *, attempt: int, open_seq: int, first_index: int) -> None:
        self.state = WriterState.WRITING
        self.appended = first_index  # tokens in the log, as far as this writer knows
        self._attempt = attempt
        self._expected = open_seq
        self._pending: list[tuple[int, str, TokenLogprob | None]] = []
        self._cached_tokens: int | None = None
        self._end: End | None = None
        self._in_flight: Append | None = None

    def offer(
        self,
        ids: Sequence[int],
        texts: Sequence[str],
        cached_tokens: int | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Tokens sampled and the text each releases. `cached_tokens` comes with an attempt's first token.

        `logprobs` is one per token, always or never.
        """
        if len(ids) != len(texts) or (logprobs and len(logprobs) != len(ids)):
            raise ValueError(f"{len(ids)} tokens with {len(texts)} texts and {len(logprobs)} log probabilities")
        if self._end is not None:
            raise TokenLogError("tokens after the end")
        self._pending.extend(zip(ids, texts, logprobs or repeat(None), strict=False))
        if cached_tokens is not None:
            self._cached_tokens = cached_tokens

    def finish(self, end: End) -> None:
        """Nothing more will be offered; `end` is appended after the last token. The first reason stands."""
        if self._end is None:
            self._end = end

    @property
    def pending(self) -> int:
        """Tokens not yet in the log, the ones in flight included."""
        in_flight = self._in_flight.entry.count if self._in_flight and isinstance(self._in_flight.entry, Chunk) else 0
        return len(self._pending) + in_flight

    @property
    def in_flight(self) -> Append | None:
        return self._in_flight

    def next_append(self) -> Append | None:
        """What to send now: None while one is in flight, when there is nothing to say, or when it is over."""
        if self.state is not WriterState.WRITING or self._in_flight is not None:
            return None
        entry: Chunk | End
        if self._pending:
            entry = self._cut_chunk()
        elif self._end is not None:
            entry = self._end
        else:
            return None
        self._in_flight = Append(self._expected, entry, encode(entry))
        return self._in_flight

    def _cut_chunk(self) -> Chunk:
        taken, self._pending = self._pending[:CHUNK_TOKENS_MAX], self._pending[CHUNK_TOKENS_MAX:]
        ends, at = [], 0
        for _, text, _ in taken:
            at += len(text)
            ends.append(at)
        cached, self._cached_tokens = self._cached_tokens, None
        return Chunk(
            attempt=self._attempt,
            first_index=self.appended,
            ids=pack_ids(token for token, _, _ in taken),
            text="".join(text for _, text, _ in taken),
            text_ends=tuple(ends),
            cached_tokens=cached,
            logprobs=tuple(odds for _, _, odds in taken if odds is not None),
        )

    def acked(self, seq: int) -> None:
        """The append in flight stands at `seq`."""
        sent = self._in_flight
        if sent is None:
            raise TokenLogError("an ack with nothing in flight")
        self._in_flight = None
        self._expected = seq
        if isinstance(sent.entry, Chunk):
            self.appended += sent.entry.count
        else:
            self.state = WriterState.ENDED

    def unknown(self) -> Append:
        """The deadline passed with no answer: send the same again. It may have landed; `refused` tells."""
        if self._in_flight is None:
            raise TokenLogError("no append whose outcome could be unknown")
        return self._in_flight

    def refused(self, standing: SequencedEntry | None) -> WriterState:
        """Another sequence stands last. `standing` is the last entry: ours when an earlier try had landed.

        None: the log is gone. An entry not past the expected one was read from a copy that lags: the append stays
        in flight, read again.
        """
        sent = self._in_flight
        if sent is None:
            raise TokenLogError("a refusal with nothing in flight")
        if standing is not None and standing.seq <= sent.expected_seq:
            return self.state
        if standing is not None and standing.entry == sent.entry:
            self.acked(standing.seq)
        else:
            self._in_flight = None
            self.state = WriterState.REPLACED
        return self.state
