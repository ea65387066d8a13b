"""Which dispatch is taken, which is known, which is refused."""

import pytest

from services.replica.attempt import Outcome, Over
from services.replica.attempts import AttemptTable, Capacity, Known, Taken
from shared.limits import ATTEMPTS_REMEMBERED, REPLICA_QUEUE_MAX
from shared.messages import (
    Accepted,
    Ask,
    Dispatch,
    DispatchRefused,
    GenerateRequest,
    RequestEcho,
    Sampling,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier


def table(**changes) -> AttemptTable:
    made = AttemptTable("replica-1", "m")
    made.capacity = Capacity(**{"blocks_total": 64, "context_max": 512, "running_max": 2, **changes})
    return made


def dispatch(
    reply: int = 1, *, number: int = 1, delivered: int = 1, router: str = "router-1", model: str = "m", budget: int = 10
) -> Dispatch:
    accepted = Accepted(
        reply_id=f"resp_local01{reply:026}",
        org="o",
        user="u",
        created_s=0.0,
        model=model,
        tier=Tier.FREE,
        budget=budget,
        seed=1,
        input_tokens=5,
        deadline_s=600.0,
        echo=RequestEcho(),
    )
    request = GenerateRequest(
        accepted=accepted, accepted_seq=1, prompt=pack_ids(range(5)), block_hashes=b"", sampling=Sampling(seed=1)
    )
    return Dispatch(
        request=request,
        attempt=number,
        open_seq=2,
        written=b"",
        router=router,
        ack_subject=f"ack.{delivered}",
        delivered=delivered,
        deadline_left_s=600.0,
    )


def take(made: AttemptTable, *args, **kwargs) -> Taken | Known | DispatchRefused:
    return made.on_dispatch(dispatch(*args, **kwargs), now=0.0, epoch_s=0.0)


def over(made: AttemptTable, taken: Taken) -> None:
    taken.attempt.cancelled(EndReason.USER_STOP)
    assert taken.attempt.freed(0.0) == [Over(Outcome.ENDED, "")]
    made.forget(taken.attempt)


def test_the_same_dispatch_twice_is_one_attempt():
    """A dispatch whose answer was lost comes again and changes nothing."""
    made = table()
    first = take(made)
    again = take(made)
    assert isinstance(first, Taken)
    assert isinstance(again, Known)
    assert again.attempt is first.attempt
    assert (again.ordinal, again.released, made.taken, len(made)) == (1, None, 1, 1)


def test_the_same_dispatch_from_a_newer_delivery():
    """It reports to the newer delivery's router, and the other one is named to be told."""
    made = table()
    take(made)
    again = take(made, delivered=2, router="router-2")
    assert isinstance(again, Known)
    assert (again.released, again.attempt.router) == ("router-1", "router-2")


def test_an_attempt_that_is_over_is_not_begun_again():
    """A late dispatch of it is refused, in a way that does not end the reply."""
    made = table()
    first = take(made)
    over(made, first)
    refused = take(made)
    assert isinstance(refused, DispatchRefused)
    assert refused.reason == "over"
    assert isinstance(take(made, number=2), Taken)
    assert isinstance(take(made, number=1), DispatchRefused), "an older one while a later one runs"


def test_a_later_attempt_replaces_the_one_here():
    """The router opened again, on the same replica: the earlier attempt goes, its sequence under another name."""
    made = table()
    first = take(made)
    second = take(made, number=2)
    assert isinstance(second, Taken)
    assert second.replaced is not None
    assert second.replaced[0] is first.attempt
    assert first.attempt.sequence_id != second.attempt.sequence_id
    assert made.of_reply(second.attempt.reply_id) is second.attempt
    first.attempt.freed(0.0)
    made.forget(first.attempt)
    assert made.of_reply(second.attempt.reply_id) is second.attempt, "the earlier one's end takes nothing from it"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "other_model"),
        ({"budget": 600}, "never_fits"),
        ({"accepting": False}, "draining"),
        ({"ready": False}, "not_ready"),
        ({"taken": 2 + REPLICA_QUEUE_MAX}, "full"),
    ],
)
def test_refusals_say_why(change: dict, reason: str):
    """Each with the word the router understands."""
    made = table()
    made.accepting = change.pop("accepting", True)
    for n in range(change.pop("taken", 0)):
        assert isinstance(take(made, 100 + n), Taken)
    if not change.pop("ready", True):
        made.capacity = None
    before = made.taken
    refused = take(made, **change)
    assert isinstance(refused, DispatchRefused)
    assert refused.reason == reason
    assert made.taken == before


def test_asked_for_what_runs():
    """It says which attempt runs and to whom it reports from now on."""
    made = table()
    taken = take(made, number=3)
    ask = Ask(reply_id=taken.attempt.reply_id, router="router-2", ack_subject="ack.9", delivered=9)
    holding, attempt, released = made.on_ask(ask)
    assert (holding.running, holding.attempt, holding.router) == (True, 3, "router-2")
    assert (attempt, released) == (taken.attempt, "router-1")
    stale = Ask(reply_id=taken.attempt.reply_id, router="router-1", ack_subject="ack.1", delivered=1)
    holding, _, released = made.on_ask(stale)
    assert (holding.router, released) == ("router-2", None)


def test_asked_for_what_does_not_run():
    """Unknown and over are the same: not here."""
    made = table()
    taken = take(made)
    over(made, taken)
    ask = Ask(reply_id=taken.attempt.reply_id, router="router-1", ack_subject="a", delivered=2)
    assert made.on_ask(ask)[0].running is False


def test_what_is_remembered_is_bounded():
    """Old attempts are forgotten; the log still refuses their writers."""
    made = table(running_max=1)
    for n in range(ATTEMPTS_REMEMBERED + 5):
        over(made, take(made, n))
    assert len(made._over) == ATTEMPTS_REMEMBERED
