"""The rules of the token log: what may stand where, what a writer sends, what a canceller does, what is derived."""

import copy
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import TokenLogError
from shared.limits import ATTEMPTS_LOST_MAX, ATTEMPTS_MAX, CHUNK_TOKENS_MAX, EVENT_GAP, OPENS_MAX, OUTPUT_TOKENS_MAX
from shared.messages import (
    Accepted,
    Chunk,
    End,
    Entry,
    Open,
    RequestEcho,
    SequencedEntry,
    TokenLogprob,
    Usage,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import (
    EVENT_BASE,
    EVENT_CREATED,
    EVENT_NOTICE_LAST,
    EVENT_OPENING,
    LogView,
    LogWriter,
    WriterState,
    chunk_texts,
    closing_event,
    end_move,
    ended_reply,
    event_of_token,
    tokens_seen,
)

REPLY = "resp_local0000000000000000000000000000"


def accepted(**changes) -> Accepted:
    fields = {
        "reply_id": REPLY,
        "org": "o",
        "user": "u",
        "created_s": 1.0,
        "model": "m",
        "tier": Tier.FREE,
        "budget": 100,
        "seed": 5,
        "input_tokens": 7,
        "deadline_s": 600.0,
        "echo": RequestEcho(),
    }
    return Accepted(**{**fields, **changes})


def opened(attempt: int = 1, first_index: int = 0, returned: int = 0) -> Open:
    return Open(attempt=attempt, replica=f"r{attempt}", model_version="1", first_index=first_index, returned=returned)


def chunk(first_index: int, texts: list[str], *, attempt: int = 1, cached_tokens: int | None = None) -> Chunk:
    ends = [len("".join(texts[: at + 1])) for at in range(len(texts))]
    return Chunk(
        attempt=attempt,
        first_index=first_index,
        ids=pack_ids(range(100 + first_index, 100 + first_index + len(texts))),
        text="".join(texts),
        text_ends=tuple(ends),
        cached_tokens=cached_tokens,
    )


def end(reason: EndReason = EndReason.STOP_TOKEN) -> End:
    return End(reason=reason, by="test")


def view_of(*entries: Entry) -> LogView:
    """Entries at sequences 2, 4, 6, ..."""
    return LogView().apply_all(SequencedEntry(seq=2 + 2 * at, entry=entry) for at, entry in enumerate(entries))


# --- the fold --------------------------------------------------------------------------------------------


def test_a_log_folds_to_its_reply():
    """Text, ids, attempts and usage are those of the entries before the end, over both attempts."""
    view = view_of(
        accepted(),
        opened(),
        chunk(0, ["He", "", "llo"], cached_tokens=4),
        opened(2, first_index=3),
        chunk(3, [" you"], attempt=2, cached_tokens=6),
        end(),
    )
    assert view.text == "Hello you"
    assert view.texts == ["He", "", "llo", " you"]
    assert view.ids == [100, 101, 102, 103]
    assert (view.attempts, view.open_seq, view.last_seq) == (2, 8, 12)
    assert view.usage == Usage(input_tokens=7, output_tokens=4, cached_tokens=6)


def test_usage_needs_an_accepted_entry():
    """Nothing is billed to nobody."""
    with pytest.raises(TokenLogError):
        _ = LogView().usage


RUNNING = (accepted(), opened(), chunk(0, ["a", "b"]))
FORBIDDEN: dict[str, tuple[tuple[Entry, ...], Entry]] = {
    "open before accepted": ((), opened()),
    "chunk before accepted": ((), chunk(0, ["a"])),
    "end before accepted": ((), end()),
    "accepted twice": ((accepted(),), accepted()),
    "chunk before any open": ((accepted(),), chunk(0, ["a"])),
    "anything after the end": ((*RUNNING, end()), opened(2, first_index=2)),
    "a second end": ((*RUNNING, end()), end(EndReason.USER_STOP)),
    "a hole between chunks": (RUNNING, chunk(3, ["d"])),
    "a chunk that repeats tokens": (RUNNING, chunk(1, ["b"])),
    "a chunk of the attempt before": ((*RUNNING, opened(2, first_index=2)), chunk(2, ["c"], attempt=1)),
    "a chunk of an attempt to come": (RUNNING, chunk(2, ["c"], attempt=2)),
    "an empty chunk": (RUNNING, chunk(2, [])),
    "fewer text ends than tokens": (
        RUNNING,
        Chunk(attempt=1, first_index=2, ids=pack_ids([1, 2]), text="c", text_ends=(1,)),
    ),
    "text ends that fall back": (
        RUNNING,
        Chunk(attempt=1, first_index=2, ids=pack_ids([1, 2]), text="cd", text_ends=(2, 1)),
    ),
    "text past the last end": (RUNNING, Chunk(attempt=1, first_index=2, ids=pack_ids([1]), text="cd", text_ends=(1,))),
    "text ends past the text": (RUNNING, Chunk(attempt=1, first_index=2, ids=pack_ids([1]), text="c", text_ends=(2,))),
    "an attempt left out": (RUNNING, opened(3, first_index=2)),
    "an attempt twice": (RUNNING, opened(1, first_index=2)),
    "an open at another token": (RUNNING, opened(2, first_index=1)),
    "a first open that gives one back": ((accepted(),), opened(returned=1)),
    "an open that gives two back": (RUNNING, opened(2, first_index=2, returned=2)),
    "an open that takes back what was given back": (
        (*RUNNING, opened(2, first_index=2, returned=1)),
        opened(3, first_index=2, returned=0),
    ),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_what_may_not_stand_here_is_refused_and_changes_nothing(case):
    """Each forbidden entry raises TokenLogError and leaves the view as it was."""
    before, entry = FORBIDDEN[case]
    view = view_of(*before)
    kept = copy.deepcopy(view)
    with pytest.raises(TokenLogError):
        view.apply(100, entry)
    assert view == kept


@pytest.mark.parametrize("seq", [0, 5, 6])
def test_sequences_only_grow(seq):
    """An entry at or before the last sequence is refused and changes nothing."""
    view = view_of(*RUNNING)
    kept = copy.deepcopy(view)
    with pytest.raises(TokenLogError):
        view.apply(seq, chunk(2, ["c"]))
    assert view == kept


def test_the_first_storage_times_are_kept():
    """The view remembers when the first open and the first chunk were stored, and no later ones."""
    view = LogView()
    for seq, entry in enumerate((accepted(), opened(), chunk(0, ["a"]), opened(2, 1), chunk(1, ["b"], attempt=2)), 1):
        view.apply(seq, entry, float(seq))
    assert (view.opened_s, view.first_token_s) == (2.0, 3.0)


def test_an_ended_log_is_archived_as_it_stands():
    """The archive holds the text, ids, reason and usage before the end; a log without end is not archived."""
    view = view_of(*RUNNING)
    with pytest.raises(TokenLogError):
        ended_reply(view)
    view.apply(100, end(EndReason.USER_STOP))
    whole = ended_reply(view)
    assert (whole.text, whole.ids, whole.reason) == ("ab", pack_ids([100, 101]), EndReason.USER_STOP)
    assert (whole.usage, whole.attempts) == (view.usage, 1)


@given(st.lists(st.text(max_size=4), min_size=1, max_size=12))
def test_text_ends_tile_the_text(texts):
    """Whatever text each token releases, cutting the chunk by its ends gives the same pieces."""
    assert chunk_texts(chunk(0, texts)) == texts


# --- attempts --------------------------------------------------------------------------------------------


def view_with_opens(*returned: int) -> LogView:
    return view_of(accepted(), *(opened(at, returned=count) for at, count in enumerate(returned, 1)))


def test_attempts_are_counted_by_opens():
    """Three opens that wrote nothing, and none is left, however often the message was delivered."""
    assert [view_with_opens(*[0] * count).attempts_left() for count in range(ATTEMPTS_MAX + 1)] == [3, 2, 1, 0]


def test_attempts_given_back_do_not_count():
    """What a replica refused or handed back is not held against the reply."""
    assert view_with_opens(0, 1, 2).attempts_left() == ATTEMPTS_MAX - 1
    assert view_with_opens(0, 0, 0).attempts_left(given_back=True) == 1


def test_given_back_attempts_are_bounded_too():
    """A reply that is refused everywhere does not go round for ever."""
    view = view_with_opens(*range(OPENS_MAX))
    assert view.attempts_left() == 0
    assert view.attempts_left(given_back=True) == 0


def test_an_attempt_that_wrote_something_begins_the_count_anew():
    """Replicas killed beside a reply are not its fault: it goes on while it grows, up to a bound."""
    entries = [accepted()]
    left = []
    for attempt in range(1, ATTEMPTS_LOST_MAX + 1):
        entries += [opened(attempt, first_index=attempt - 1), chunk(attempt - 1, ["a"], attempt=attempt)]
        left.append(view_of(*entries).attempts_left())
    assert left == [3, 3, 3, 2, 1, 0]


def test_a_reply_that_kills_engines_at_one_place_fails_there():
    """The first attempt wrote, three more die where it died."""
    entries = [accepted(), opened(1), chunk(0, ["a"])]
    left = []
    for attempt in range(2, 5):
        entries.append(opened(attempt, first_index=1))
        left.append(view_of(*entries).attempts_left())
    assert left == [2, 1, 0]


# --- event numbers ---------------------------------------------------------------------------------------


@given(st.integers(0, OUTPUT_TOKENS_MAX - 1))
def test_a_token_has_one_number_and_gives_back_how_many_were_seen(index):
    """The number of the delta that ends with a token says how many tokens its reader has; the gaps belong to it."""
    number = event_of_token(index)
    assert tokens_seen(number) == index + 1
    assert tokens_seen(number - 1) == index
    assert tokens_seen(number + EVENT_GAP - 1) == index + 1


def test_events_are_numbered_in_the_order_they_are_shown():
    """created, notices, opening events, tokens, closing events: strictly increasing."""
    budget = 10
    numbers = [EVENT_CREATED, EVENT_NOTICE_LAST, EVENT_OPENING, EVENT_BASE, event_of_token(budget - 1)]
    numbers.append(closing_event(budget))
    assert numbers == sorted(set(numbers))
    assert closing_event(budget) > event_of_token(budget)


@pytest.mark.parametrize("event", [EVENT_CREATED, 1, EVENT_NOTICE_LAST, EVENT_OPENING, EVENT_BASE - 1])
def test_before_the_first_token_nothing_was_seen(event):
    """A reader that has only notices and opening events starts with token 0."""
    assert tokens_seen(event) == 0


# --- a canceller -----------------------------------------------------------------------------------------


def test_a_canceller_appends_after_the_last_entry():
    """The end expects the sequence that stands last, whatever it is."""
    assert end_move(view_of(accepted()), end()) == (2, end())
    assert end_move(view_of(*RUNNING), end()) == (6, end())


def test_a_canceller_is_done_when_an_end_stands():
    """Another's end is as good as its own; the first reason stands."""
    assert end_move(view_of(*RUNNING, end()), end(EndReason.USER_STOP)) is None


def test_what_was_never_accepted_cannot_be_ended():
    """An id without a log is an error, not a reply that ends."""
    with pytest.raises(TokenLogError):
        end_move(LogView(), end())


# --- a writer --------------------------------------------------------------------------------------------


def writer(first_index: int = 0) -> LogWriter:
    return LogWriter(attempt=1, open_seq=4, first_index=first_index)


def sent(log_writer: LogWriter):
    append = log_writer.next_append()
    assert append is not None
    return append


def test_tokens_become_a_conditional_chunk():
    """The first chunk expects the open's sequence and says where its tokens begin."""
    log_writer = writer(first_index=3)
    log_writer.offer([1, 2], ["a", "bc"], cached_tokens=5)
    append = sent(log_writer)
    assert append.expected_seq == 4
    assert append.entry == Chunk(
        attempt=1, first_index=3, ids=pack_ids([1, 2]), text="abc", text_ends=(1, 3), cached_tokens=5
    )
    assert append.data == encode(append.entry)


def test_log_probabilities_are_one_a_token_or_none():
    """A writer and a reader both refuse a chunk in which they do not match its tokens."""
    odds = (TokenLogprob(b"a", -0.5, ((b"b", -0.9),)), TokenLogprob(b"bc", -1.0))
    log_writer = writer()
    log_writer.offer([1, 2], ["a", "bc"], 0, odds)
    assert sent(log_writer).entry.logprobs == odds
    with pytest.raises(ValueError, match="log probabilities"):
        log_writer.offer([3], ["d"], None, odds)
    view = view_of(accepted(), Open(attempt=1, replica="r", model_version="v", first_index=0))
    wrong = Chunk(attempt=1, first_index=0, ids=pack_ids([1]), text="a", text_ends=(1,), logprobs=odds)
    with pytest.raises(TokenLogError, match="log probabilities"):
        view.apply(9, wrong)
    assert view.ids == []


def test_one_append_in_flight():
    """While an append is unanswered nothing else is sent; then the next one expects its sequence."""
    log_writer = writer()
    log_writer.offer([1], ["a"])
    sent(log_writer)
    log_writer.offer([2], ["b"])
    assert log_writer.next_append() is None
    assert log_writer.pending == 2
    log_writer.acked(9)
    append = sent(log_writer)
    assert (append.expected_seq, append.entry.first_index) == (9, 1)


def test_a_retry_is_byte_identical():
    """Tokens sampled meanwhile do not change what is sent again; they go into the next chunk."""
    log_writer = writer()
    log_writer.offer([1], ["a"])
    append = sent(log_writer)
    log_writer.offer([2], ["b"])
    assert log_writer.unknown() is append
    log_writer.acked(9)
    assert sent(log_writer).entry == chunk_of(1, [2], "b")


def chunk_of(first_index: int, ids: list[int], text: str) -> Chunk:
    return Chunk(
        attempt=1, first_index=first_index, ids=pack_ids(ids), text=text, text_ends=tuple(range(1, len(text) + 1))
    )


def test_a_refusal_over_its_own_entry_is_an_ack():
    """When the try before had landed, the writer goes on after it."""
    log_writer = writer()
    log_writer.offer([1], ["a"])
    append = sent(log_writer)
    log_writer.unknown()
    log_writer.offer([2], ["b"])
    assert log_writer.refused(SequencedEntry(seq=9, entry=append.entry)) is WriterState.WRITING
    assert (sent(log_writer).expected_seq, log_writer.appended) == (9, 1)


REPLACERS: dict[str, SequencedEntry | None] = {
    "another open": SequencedEntry(seq=9, entry=opened(2)),
    "an end": SequencedEntry(seq=9, entry=end(EndReason.USER_STOP)),
    "another chunk": SequencedEntry(seq=9, entry=chunk_of(0, [7], "z")),
    "no log at all": None,
}


@pytest.mark.parametrize("case", REPLACERS)
def test_a_replaced_writer_sends_nothing_more(case):
    """Whatever stands in its place, the writer drops its sequence."""
    log_writer = writer()
    log_writer.offer([1], ["a"])
    sent(log_writer)
    log_writer.offer([2], ["b"])
    log_writer.finish(end())
    assert log_writer.refused(REPLACERS[case]) is WriterState.REPLACED
    assert log_writer.next_append() is None
    assert log_writer.in_flight is None


def test_a_copy_that_lags_decides_nothing():
    """An entry not past the expected one cannot be what refused the append: it stays in flight."""
    log_writer = writer()
    log_writer.offer([1], ["a"])
    append = sent(log_writer)
    assert log_writer.refused(SequencedEntry(seq=4, entry=opened())) is WriterState.WRITING
    assert log_writer.in_flight is append
    assert log_writer.refused(SequencedEntry(seq=9, entry=append.entry)) is WriterState.WRITING
    assert log_writer.appended == 1


def test_the_end_comes_after_the_last_token():
    """Pending tokens go first; once the end is acked the writer is done, and the first reason stands."""
    log_writer = writer()
    log_writer.offer([1], ["a"])
    log_writer.finish(end(EndReason.MAX_TOKENS))
    log_writer.finish(end(EndReason.FAILED))
    assert isinstance(sent(log_writer).entry, Chunk)
    log_writer.acked(9)
    append = sent(log_writer)
    assert (append.expected_seq, append.entry) == (9, end(EndReason.MAX_TOKENS))
    log_writer.acked(12)
    assert log_writer.state is WriterState.ENDED
    assert log_writer.next_append() is None


def test_a_refused_end_that_had_landed_is_the_end():
    """An end whose ack was lost is recognised, not taken for another's."""
    log_writer = writer()
    log_writer.finish(end())
    append = sent(log_writer)
    log_writer.unknown()
    assert log_writer.refused(SequencedEntry(seq=9, entry=append.entry)) is WriterState.ENDED


def test_many_tokens_go_in_several_chunks():
    """No chunk holds more than its bound; together they hold every token once."""
    log_writer = writer()
    count = CHUNK_TOKENS_MAX * 2 + 1
    log_writer.offer(list(range(count)), ["x"] * count)
    sizes, seq = [], 4
    while (append := log_writer.next_append()) is not None:
        sizes.append(append.entry.count)
        seq += 1
        log_writer.acked(seq)
    assert sizes == [CHUNK_TOKENS_MAX, CHUNK_TOKENS_MAX, 1]
    assert log_writer.appended == count


MISUSES: dict[str, Callable[[LogWriter], object]] = {
    "an ack for nothing": lambda log_writer: log_writer.acked(9),
    "a refusal of nothing": lambda log_writer: log_writer.refused(None),
    "an unknown outcome of nothing": lambda log_writer: log_writer.unknown(),
    "tokens after the end": lambda log_writer: (log_writer.finish(end()), log_writer.offer([1], ["a"])),
}


@pytest.mark.parametrize("case", MISUSES)
def test_answers_without_an_append_are_errors(case):
    """A shell that loses track of its appends is told so."""
    with pytest.raises(TokenLogError):
        MISUSES[case](writer())


def test_ids_and_texts_come_in_pairs():
    """Each token comes with the text it releases, be it empty."""
    with pytest.raises(ValueError, match="2 tokens with 1 texts"):
        writer().offer([1, 2], ["a"])


class Server:
    """One key of the bus: appends are conditional on what stands last."""

    def __init__(self) -> None:
        self.entries = [SequencedEntry(seq=2, entry=accepted()), SequencedEntry(seq=4, entry=opened())]

    def append(self, expected_seq: int, entry: Entry) -> int | None:
        if self.entries[-1].seq != expected_seq:
            return None
        self.entries.append(SequencedEntry(seq=expected_seq + 3, entry=entry))
        return expected_seq + 3

    def view(self) -> LogView:
        return LogView().apply_all(self.entries)


def exchange(log_writer: LogWriter, server: Server, fate: str) -> None:
    """One try to append: the request may be lost, or its answer."""
    append = log_writer.in_flight or log_writer.next_append()
    if append is None:
        return
    seq = None if fate == "request lost" else server.append(append.expected_seq, append.entry)
    if fate != "answered":
        assert log_writer.unknown() is append
    elif seq is None:
        log_writer.refused(server.entries[-1])
    else:
        log_writer.acked(seq)


@given(
    st.lists(st.sampled_from(["request lost", "answer lost", "answered"]), max_size=40),
    st.one_of(st.none(), st.integers(0, 20)),
)
def test_lost_requests_and_answers_leave_one_whole_reply(fates, stop_at):
    """Each token stands once and in order; the reply is whole unless a stop came first, and the writer knows which."""
    server, log_writer, tokens = Server(), writer(), list(range(9))
    for step, fate in enumerate([*fates, *["answered"] * 60]):
        if step < len(tokens):
            log_writer.offer([tokens[step]], [str(step)])
        if step == len(tokens):
            log_writer.finish(end())
        move = end_move(server.view(), end(EndReason.USER_STOP)) if step == stop_at else None
        if move is not None:
            server.append(*move)
        exchange(log_writer, server, fate)
    view = server.view()
    assert view.ended is not None
    assert view.ids == tokens[: len(view.ids)]
    if view.ended == end():
        assert (view.ids, log_writer.state) == (tokens, WriterState.ENDED)
    else:
        assert log_writer.state is WriterState.REPLACED
