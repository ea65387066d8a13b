"""One reader of one log: whatever the network does, entries come out in order, once, without holes."""

from hypothesis import given
from hypothesis import strategies as st

from shared.log_merge import Deliver, Fetch, LogMerge
from shared.messages import End, SequencedEntry
from shared.outcomes import EndReason


def entry(number: int) -> End:
    return End(reason=EndReason.FAILED, by=str(number))


def log_of(*seqs: int) -> list[SequencedEntry]:
    return [SequencedEntry(seq=seq, entry=entry(seq)) for seq in seqs]


def previous(log: list[SequencedEntry], at: int) -> int:
    return log[at - 1].seq if at else 0


def delivered(commands) -> list[int]:
    return [command.item.seq for command in commands if isinstance(command, Deliver)]


def test_start_asks_for_everything_after_what_the_reader_has():
    """A reader that has entry 7 catches up from there, and what it has is not shown again."""
    merge = LogMerge(after_seq=7)
    assert merge.start() == [Fetch(7)]
    assert delivered(merge.fetched(log_of(3, 7, 9))) == [9]


def test_live_entries_in_order_are_delivered_at_once():
    """No fetch is needed while each entry names the one delivered before."""
    merge = LogMerge()
    merge.start()
    merge.fetched([])
    log = log_of(3, 4, 9)
    for at, item in enumerate(log):
        assert merge.live(item.seq, previous(log, at), item.entry) == [Deliver(item)]


def test_a_hole_is_fetched_and_not_skipped():
    """An entry whose predecessor was not delivered waits until the fetch has brought what is missing."""
    merge = LogMerge()
    merge.start()
    merge.fetched(log_of(3))
    assert merge.live(9, 5, entry(9)) == [Fetch(3)]
    assert delivered(merge.fetched(log_of(5))) == [5, 9]


def test_one_fetch_at_a_time():
    """While a fetch is under way another hole asks for nothing; what it needs is asked for afterwards."""
    merge = LogMerge()
    assert merge.start() == [Fetch(0)]
    assert merge.live(9, 5, entry(9)) == []
    assert merge.live(12, 9, entry(12)) == []
    assert merge.quiet() == []
    commands = merge.fetched(log_of(3))
    assert delivered(commands) == [3]
    assert commands[-1] == Fetch(3)


def test_a_fetch_that_brings_nothing_is_not_repeated_at_once():
    """A copy of the stream that lags is asked again by the next live entry or the quiet timer, not in a loop."""
    merge = LogMerge()
    merge.start()
    merge.live(9, 5, entry(9))
    assert merge.fetched([]) == []
    assert merge.quiet() == [Fetch(0)]
    assert delivered(merge.fetched(log_of(5))) == [5, 9]


def test_what_came_in_the_wrong_order_past_a_hole_needs_no_second_fetch():
    """Once the hole is filled, all that waited behind it is delivered, whatever order it came in."""
    merge = LogMerge()
    merge.start()
    merge.live(12, 9, entry(12))
    merge.live(9, 5, entry(9))
    assert merge.fetched(log_of(5)) == [Deliver(item) for item in log_of(5, 9, 12)]


def test_after_a_failed_fetch_the_next_sign_asks_again():
    """No answer leaves the reader able to ask: by the next live entry, and by the quiet timer."""
    merge = LogMerge()
    merge.start()
    merge.fetch_failed()
    assert merge.live(9, 5, entry(9)) == [Fetch(0)]
    merge.fetch_failed()
    assert merge.quiet() == [Fetch(0)]


def test_duplicates_are_delivered_once():
    """An entry that comes live twice, or live and fetched, is shown once."""
    merge = LogMerge()
    merge.start()
    assert delivered(merge.live(3, 0, entry(3))) == [3]
    assert merge.live(3, 0, entry(3)) == []
    assert delivered(merge.fetched(log_of(3, 4))) == [4]
    assert merge.live(4, 3, entry(4)) == []


@st.composite
def deliveries(draw):
    """A log, how it grew, and a schedule: live messages lost, doubled and reordered, fetches that see a prefix or fail."""
    seqs = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=14)))
    arrivals = draw(st.lists(st.sampled_from(range(len(seqs))), max_size=2 * len(seqs)))
    looks = draw(st.lists(st.one_of(st.none(), st.integers(0, len(seqs))), max_size=8))
    after = draw(st.sampled_from([0, *seqs]))
    return log_of(*seqs), arrivals, looks, after


@given(deliveries())
def test_loss_duplicates_and_reordering_change_nothing(case):
    """The output is at any time a prefix of the log, in order, and after one good look all of it."""
    log, arrivals, looks, after = case
    merge, out, open_fetches = LogMerge(after), [], []
    wanted = [item.seq for item in log if item.seq > after]

    def perform(commands):
        out.extend(delivered(commands))
        open_fetches.extend(command for command in commands if isinstance(command, Fetch))
        assert len(open_fetches) <= 1, "one fetch at a time"
        assert out == wanted[: len(out)], "in order, once, no holes"

    def answer(upto: int | None) -> None:
        fetch = open_fetches.pop()
        if upto is None:
            merge.fetch_failed()
        else:
            perform(merge.fetched([item for item in log[:upto] if item.seq > fetch.after_seq]))

    perform(merge.start())
    looks = list(looks)
    for at in arrivals:
        perform(merge.live(log[at].seq, previous(log, at), log[at].entry))
        if open_fetches and looks:
            answer(looks.pop())
    for _ in range(3):
        if not open_fetches:
            perform(merge.quiet())
        answer(len(log))
    assert out == wanted
