"""The drills' client sees whatever is wrong with a stream: it is what every other figure of a drill rests on."""

import pytest

from tests.drill.follower import Follower, script, word
from tests.drill.wire import Event

SEED, TOKENS = 7, 12
IDS = script(SEED, TOKENS)


def delta(first: int, count: int, *, ids: list[int] | None = None, text: str | None = None, number: int = -1) -> Event:
    """The event of tokens [first, first + count), or one that pretends to be."""
    right = IDS[first : first + count]
    return Event(
        type="response.output_text.delta",
        sequence_number=number if number >= 0 else 1000 + 16 * (first + count - 1),
        delta="".join(map(word, right)) if text is None else text,
        token_ids=tuple(right if ids is None else ids),
    )


def heard(*events: Event) -> list[str]:
    """What the client finds wrong."""
    follower = Follower(["http://nowhere"], "key", seed=SEED, tokens=TOKENS)
    for event in events:
        follower._take(event)
    return follower.story.wrong


def test_a_right_stream_is_right() -> None:
    """Single tokens, several at once, and the end."""
    end = Event(type="response.incomplete", sequence_number=2000, response={"status": "incomplete"})
    assert heard(delta(0, 1), delta(1, 4), delta(5, 7), end) == []


@pytest.mark.parametrize(
    "events",
    [
        (delta(0, 2), delta(3, 1)),  # lost
        (delta(0, 2), delta(1, 2)),  # repeated
        (delta(0, 3, ids=[IDS[0], IDS[2], IDS[1]]),),  # out of order
        (delta(0, 2), delta(2, 1, ids=[IDS[2] + 1])),  # another token
        (delta(0, 2, text=" w0000 w0000"),),  # the right tokens with another text
        (delta(0, 2, number=1000),),  # a number that belongs to another token
        (delta(0, 2), delta(2, 1, number=1016)),  # a number that came before
    ],
)
def test_whatever_is_wrong_is_seen(events: tuple[Event, ...]) -> None:
    """Lost, repeated, out of order, other tokens, other text, other numbers."""
    assert heard(*events)


def test_a_pause_is_the_gap_around_a_moment() -> None:
    """The gap that a fault lies in, also when the last token was still on its way then."""
    follower = Follower(["http://nowhere"], "key", seed=SEED, tokens=TOKENS)
    follower.story.arrivals = [(1.0, 1), (1.1, 2), (2.0, 3), (2.1, 4)]
    assert follower.story.pause_at(1.5) == pytest.approx(0.9)
    assert follower.story.pause_at(1.05) == pytest.approx(0.9)
    assert follower.story.pause_at(9.0) is None
    assert follower.story.longest_pause() == pytest.approx(0.9)
