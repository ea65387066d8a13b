"""The states of a reply: a table, and nothing outside it."""

import itertools

import pytest

from services.conversation.replies import Event, State, before, step
from shared.errors import IllegalEventError


def test_nothing_leaves_ended() -> None:
    """An ended reply refuses every event, so no end ever becomes another."""
    for event in Event:
        with pytest.raises(IllegalEventError):
            step(State.ENDED, event)
        assert State.ENDED not in before(event)


def test_every_way_leads_to_an_end() -> None:
    """From every state an end is possible, and no event leads back to accepted."""
    for state, event in itertools.product(set(State) - {State.ENDED}, Event):
        if state in before(event):
            assert step(state, event) is not State.ACCEPTED
    assert before(Event.ENDED) == (State.ACCEPTED, State.QUEUED, State.RUNNING)


def test_a_late_word_that_it_is_queued_changes_nothing() -> None:
    """A router may open before the send has noted that the lane took the request."""
    assert step(step(State.ACCEPTED, Event.OPENED), Event.QUEUED) is State.RUNNING
