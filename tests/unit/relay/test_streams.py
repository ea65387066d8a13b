"""The relay's state, event by event: whatever happens in whatever order, each open is answered once and nothing leaks."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.relay.merge import Closing
from services.relay.streams import Closed, Command, Follow, Leave, Say, SayFrame, Streams
from shared import ids
from shared.limits import PRESENCE_S, SLOW_READER_S
from shared.messages import (
    Credit,
    Frame,
    OpenStream,
    QueueView,
    Refused,
    SequencedEntry,
    StreamOpened,
    decoder,
)
from shared.subjects import Names
from shared.tiers import Tier
from tests.unit.relay.test_merge import chunk, log_of

NAMES = Names("local")
REPLIES = [ids.reply_id("local", shard, 1_700_000_000_000, bytes(10)) for shard in range(3)]
_answer = decoder(StreamOpened | Refused)  # type: ignore[arg-type]
_frame = decoder(Frame)


class World:
    """A relay's state and everybody around it: gateways that check frames, followers that were started and left."""

    def __init__(self) -> None:
        self.streams = Streams("relay-1", NAMES, streams_max=6)
        self.now = 0.0
        self.followed: set[str] = set()
        self.fed: dict[str, int] = {}  # entries given to the follower of a reply
        self.answers: Counter[str] = Counter()
        self.asked: list[str] = []
        self.numbers: Counter[str] = Counter()
        self.closed: set[str] = set()
        self.said: list[str] = []

    def perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Follow):
                assert command.reply_id not in self.followed, "followed twice"
                self.followed.add(command.reply_id)
                self.fed[command.reply_id] = 0
            elif isinstance(command, Leave):
                self.followed.remove(command.reply_id)
            elif isinstance(command, SayFrame):
                self.frame(command.subject, command.data)
            elif isinstance(command, Say):
                self.say(command)

    def say(self, said: Say) -> None:
        if said.subject.startswith("answer"):
            self.answers[said.subject] += 1
            answer = _answer.decode(said.data)
            assert isinstance(answer, Refused) or answer.relay == "relay-1"
        elif said.subject.startswith("inbox"):
            self.frame(said.subject, said.data)
        else:
            self.said.append(said.subject)

    def frame(self, inbox: str, data: bytes) -> None:
        frame = _frame.decode(data)
        assert inbox not in self.closed, "a frame after the last"
        self.numbers[inbox] += 1
        assert frame.number == self.numbers[inbox]
        if frame.closing is not None:
            self.closed.add(inbox)

    # --- events -----------------------------------------------------------------------------------------------

    def open(self, which: int) -> None:
        number = len(self.asked)
        self.asked.append(f"answer{number}")
        request = OpenStream(reply_id=REPLIES[which], stream_id=f"s{number}", inbox=f"inbox{number}", credits=2)
        self.perform(self.streams.opened(request, f"answer{number}", self.now))

    def feed(self, which: int, count: int) -> None:
        reply = REPLIES[which]
        if reply in self.followed:
            log = log_of(4)
            news = log[self.fed[reply] : self.fed[reply] + count]
            self.fed[reply] += len(news)
            if news:
                self.perform(self.streams.news(reply, news, self.now))

    def lose(self, which: int, how: str) -> None:
        if REPLIES[which] in self.followed:
            lost = {"gone": self.streams.gone, "unreadable": self.streams.unreadable}[how]
            self.perform(lost(REPLIES[which]))

    def credit(self, stream: int, *, close: bool) -> None:
        self.perform(self.streams.credit(Credit(stream_id=f"s{stream}", count=1, close=close)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.streams.tick(self.now))

    def write(self) -> None:
        while self.streams.has_frames:
            self.perform(self.streams.next_frames(self.now, 3))

    def check(self) -> None:
        assert all(self.answers[asked] <= 1 for asked in self.asked)
        assert self.streams.replies == len(self.followed)
        assert len(self.streams) <= 6


EVENTS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 2)),
    st.tuples(st.just("feed"), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("lose"), st.integers(0, 2), st.sampled_from(["gone", "unreadable"])),
    st.tuples(st.just("credit"), st.integers(0, 12)),
    st.tuples(st.just("leave"), st.integers(0, 12)),
    st.tuples(st.just("time"), st.sampled_from([0.5, PRESENCE_S, SLOW_READER_S])),
    st.tuples(st.just("write")),
)


@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=60))
def test_any_order_of_events_answers_each_open_once_and_leaks_nothing(events):
    """Opens are answered exactly once, frames are numbered to the last, and in the end nobody is followed."""
    world = World()
    for event in events:
        kind, *args = event
        if kind == "credit":
            world.credit(args[0], close=False)
        elif kind == "leave":
            world.credit(args[0], close=True)
        elif kind == "time":
            world.pass_time(args[0])
        else:
            getattr(world, kind)(*args)
        world.check()
    world.perform(world.streams.drain())
    world.write()
    assert all(world.answers[asked] == 1 for asked in world.asked)
    assert (len(world.streams), world.streams.replies, world.followed) == (0, 0, set())


def opened(world: World, which: int = 0) -> None:
    """One stream of a reply of which everything but its chunks and end is known."""
    world.open(which)
    world.feed(which, 2)
    world.write()


def test_the_answer_stands_before_the_first_frame():
    """A gateway learns where its credits go before anything arrives."""
    world = World()
    request = OpenStream(reply_id=REPLIES[0], stream_id="s", inbox="inbox")
    world.streams.opened(request, "answer", 0.0)
    commands = world.streams.news(REPLIES[0], log_of(1), 0.0) + world.streams.next_frames(0.0, 10)
    subjects = [command.subject for command in commands if isinstance(command, Say | SayFrame)]
    assert subjects == ["answer", NAMES.presence(REPLIES[0]), "inbox"]


def test_a_client_that_left_while_its_stream_was_opened_is_not_present():
    """Its close comes before the log was looked at, or before the open itself: no stream, no presence, nobody follows."""
    for early in (True, False):
        world = World()
        if early:
            world.credit(0, close=True)
        world.open(0)
        world.credit(0, close=True)
        world.feed(0, 2)
        world.write()
        assert (world.answers["answer0"], len(world.streams), world.followed, world.said) == (1, 0, set(), [])


def test_presence_is_due_per_reply_and_not_per_stream():
    """Two streams of one reply are one presence message a period."""
    world = World()
    opened(world)
    world.open(0)
    world.said.clear()
    world.pass_time(PRESENCE_S - 0.1)
    assert world.said == []
    world.pass_time(0.2)
    assert world.said == [NAMES.presence(REPLIES[0])]


def test_a_slow_stream_is_closed_and_its_reply_left():
    """The last stream of a reply takes nothing: it is closed as slow, and the reply is followed no more."""
    world = World()
    opened(world)
    world.feed(0, 1)
    world.write()
    world.feed(0, 1)
    world.write()
    assert world.numbers["inbox0"] == 2
    commands = world.streams.tick(world.now + SLOW_READER_S)
    assert Closed(REPLIES[0], Closing.SLOW) in commands
    assert commands[-1] == Leave(REPLIES[0])


def test_the_wait_is_the_place_over_the_rate():
    """Position counts from 1; the honest wait is unknown while nothing is being served."""
    world = World()
    world.open(0)
    world.feed(0, 1)
    world.write()
    for served_per_s, eta_s in ((2.0, 1.0), (0.0, None)):
        view = QueueView(
            router="r", tier=Tier.FREE, model="m", waiting=9, served_per_s=served_per_s, reply_ids=("x", REPLIES[0])
        )
        world.credit(0, close=False)
        world.streams.queue_view(view, 0.0)
        frames = [command for command in world.streams.next_frames(0.0, 9) if isinstance(command, SayFrame)]
        notice = _frame.decode(frames[0].data).notice
        assert notice is not None
        assert (notice.position, notice.eta_s) == (2, eta_s)


def test_news_of_a_reply_that_was_left_is_ignored():
    """A follower that was cancelled may still hand something on; nobody hears it."""
    world = World()
    assert world.streams.news(REPLIES[0], [SequencedEntry(seq=1, entry=log_of(0)[0].entry)], 0.0) == []


def test_opens_that_wait_count_against_the_bound_and_give_their_room_back():
    """Six may be open or waiting; the seventh is refused, and after the six were refused there is room again."""
    world = World()
    for number in range(7):
        world.open(number % 3)
    assert world.answers == {"answer6": 1}
    for reply in REPLIES:
        world.perform(world.streams.absent(reply, 1_700_000_000.0))
    assert len(world.answers) == 7
    world.open(0)
    assert world.followed == {REPLIES[0]}


def test_a_stream_waits_in_line_once_however_much_there_is_to_say():
    """News that come faster than they are written make larger frames, not a longer line."""
    world = World()
    opened(world)
    for _ in range(3):
        world.feed(0, 1)
    assert len(world.streams.next_frames(0.0, 1)) == 1
    assert not world.streams.has_frames


def test_a_stream_that_left_while_it_was_in_line_gets_nothing():
    """The client is gone between the news and the write."""
    world = World()
    opened(world)
    world.open(0)
    world.feed(0, 1)
    world.credit(0, close=True)
    frames = [one for one in world.streams.next_frames(0.0, 9) if isinstance(one, SayFrame)]
    assert [frame.subject for frame in frames] == ["inbox1"]


def test_a_client_far_behind_gets_several_frames():
    """What does not fit one frame follows in the next, as far as credits go, without further news."""
    world = World()
    request = OpenStream(reply_id=REPLIES[0], stream_id="s0", inbox="inbox0", credits=8)
    world.perform(world.streams.opened(request, "answer0", 0.0))
    big = [SequencedEntry(seq=100 + i, entry=chunk(i, "x" * 200_000)) for i in range(3)]
    world.perform(world.streams.news(REPLIES[0], [*log_of(0, ended=False), *big], 0.0))
    world.write()
    assert world.numbers["inbox0"] == 3


def test_the_same_open_twice_is_one_stream():
    """A doubled open is answered again and begins nothing anew: no two frames of a stream have one number."""
    world = World()
    opened(world)
    world.write()
    request = OpenStream(reply_id=REPLIES[0], stream_id="s0", inbox="inbox0", credits=2)
    again = world.streams.opened(request, "answer again", world.now)
    assert [type(command) for command in again] == [Say]
    world.feed(0, 1)
    world.credit(0, close=False)
    world.write()
    assert world.numbers["inbox0"] == 2, "asserted in order by the world"
    assert len(world.streams) == 1
