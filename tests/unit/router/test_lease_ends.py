"""Leases as dialogues: ends, logs that are gone or lag, draining, and the table of all leases."""

import copy

import pytest

from services.router import lease_events as ev
from services.router.lease_table import LeaseTable
from services.router.leases import State
from shared.errors import IllegalEventError
from shared.limits import (
    COMMAND_ANSWER_S,
    IDLE_END_S,
    LEASE_CHECK_S,
    LEASE_RETRY_S,
    UNANSWERED_S,
)
from shared.messages import (
    SequencedEntry,
)
from shared.outcomes import EndReason
from shared.token_log import LogView
from tests.unit.router.lease_talk import ME, OTHER, REPLY, Talk, chunk, delivered, end, kinds, opened, request, said

# --- ends ----------------------------------------------------------------------------------------------------


def test_an_ended_reply_is_archived_before_the_ack():
    """Reported over, read, archived, acked: in this order and no other."""
    talk = Talk().running()
    talk.log += [chunk(0), end()]
    assert kinds(talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome="ended"))) == ["ReadLog"]
    assert kinds(talk.read()) == ["Archive"]
    assert kinds(talk.answer(ev.Archived)) == ["Ack"]


def test_an_archive_that_fails_is_tried_again_and_nothing_is_acked():
    """The message stays in the lane until ENDED has the reply."""
    talk = Talk(delivered(), end())
    talk.read()
    for _ in range(5):
        assert talk.answer(ev.ArchiveFailed) == []
        talk.wait(LEASE_RETRY_S)
        assert kinds(talk.read()) == ["Archive"]


def test_a_reply_past_its_deadline_expires_wherever_it_is():
    """Queued or running: an honest end, with a sentence, and whoever runs it is told."""
    talk = Talk(delivered(deadline_left_s=3.0)).waiting()
    said_then = talk.wait(3.0)
    assert kinds(said_then)[-2:] == ["Unplace", "AppendEnd"]
    assert said(said_then, ev.AppendEnd).reason is EndReason.EXPIRED
    talk = Talk(delivered(deadline_left_s=3.0)).running()
    command = said(talk.wait(3.0), ev.AppendEnd)
    assert command.reason is EndReason.EXPIRED
    assert command.detail
    assert kinds(talk.answer(ev.EndStands)) == ["AnnounceEnd", "ReadLog"]


def test_a_reply_delivered_past_its_deadline_is_ended_and_leaves():
    """It came too late to be run, and is not dropped in silence."""
    talk = Talk(delivered(deadline_left_s=-1.0))
    assert said(talk.read(), ev.AppendEnd).reason is EndReason.EXPIRED
    talk.log.append(end(EndReason.EXPIRED))
    assert kinds(talk.answer(ev.EndStands)) == ["ReadLog"]
    assert kinds(talk.read()) == ["Archive"]


def test_a_queued_reply_nobody_waits_for_ends_as_idle():
    """IDLE_END_S without a client; each sign of one starts the count anew."""
    talk = Talk().waiting()
    talk.wait(IDLE_END_S - 1.0)
    talk.tell(ev.PresenceHeard(reply_id=REPLY))
    talk.wait(IDLE_END_S - 1.0)
    assert talk.state is State.WAITING
    assert said(talk.wait(1.0), ev.AppendEnd).reason is EndReason.IDLE


def test_background_replies_need_no_client():
    """They wait for as long as their deadline allows."""
    talk = Talk(delivered(background=True)).waiting()
    talk.wait(IDLE_END_S * 3)
    assert talk.state is State.WAITING


def test_a_running_reply_is_not_ended_as_idle_by_the_router():
    """While it runs, its replica counts."""
    talk = Talk().running()
    for _ in range(20):
        talk.wait(LEASE_CHECK_S)
        talk.log.append(chunk(len(talk.log) - 2))
        talk.read()
        talk.answer(ev.Answered, running=True, attempt=1, router=ME)
    assert talk.state is State.RUNNING


def test_an_end_that_could_not_be_written_is_tried_again_with_its_reason():
    """What was decided stays decided."""
    talk = Talk().waiting()
    talk.tell(ev.Unplaceable(reply_id=REPLY, detail="Too long."))
    talk.answer(ev.EndFailed)
    talk.wait(LEASE_RETRY_S)
    command = said(talk.read(), ev.AppendEnd)
    assert (command.reason, command.detail) == (EndReason.FAILED, "Too long.")


def test_anothers_end_is_archived_as_it_stands():
    """The router wanted another reason, but the user was first."""
    talk = Talk(delivered(deadline_left_s=-1.0))
    talk.read()
    talk.log.append(end(EndReason.USER_STOP))
    talk.answer(ev.EndStands)
    assert said(talk.read(), ev.Archive).view.ended == end(EndReason.USER_STOP)


# --- logs that are gone, or lag ------------------------------------------------------------------------------


def test_a_message_without_a_log_goes_back_for_a_while_and_leaves_after_its_deadline():
    """Deleted or lost: nothing can be written; it is not kept for ever either."""
    for deadline_left_s in (600.0, -1.0):
        talk = Talk(delivered(9, deadline_left_s=deadline_left_s))
        talk.log.clear()
        began = talk.now
        while talk.read() == []:
            talk.wait(LEASE_RETRY_S)
            if talk.state is State.ENDING:  # past its deadline, and nothing there to write an end into
                talk.answer(ev.EndFailed)
                talk.wait(LEASE_RETRY_S)
        assert talk.now - began >= UNANSWERED_S, "a copy that lags may have answered"
        assert talk.state is State.GONE
        if deadline_left_s > 0:
            assert said(talk.commands, ev.Nak).delay_s > 0
        else:
            assert talk.commands == [ev.Ack(reply_id=REPLY, ack_subject="ack.9")]


def test_a_read_that_lags_decides_nothing():
    """After a refused open the log must be longer than it was; a shorter answer is read again."""
    talk = Talk().waiting().opening()
    talk.answer(ev.OpenRefused)
    assert talk.read() == []
    talk.log.append(opened(replica="r2", router=OTHER))
    talk.wait(LEASE_RETRY_S)
    assert kinds(talk.read()) == ["AskReplica"]


def test_a_log_that_stays_shorter_is_believed_in_the_end():
    """A bucket restored from an older copy must not hold a reply for ever."""
    talk = Talk().waiting().opening()
    talk.answer(ev.OpenRefused)
    began = talk.now
    while talk.read() == []:
        talk.wait(LEASE_RETRY_S)
    assert talk.state is State.WAITING
    assert talk.now - began >= UNANSWERED_S


def test_a_read_that_fails_is_tried_again():
    """After a pause, and the delivery is kept meanwhile."""
    talk = Talk()
    for _ in range(4):
        talk.answer(ev.ReadFailed)
        assert talk.state is State.PAUSED
        assert kinds(talk.wait(LEASE_RETRY_S))[-1] == "ReadLog"


# --- draining ------------------------------------------------------------------------------------------------


def test_a_draining_router_gives_back_what_waits():
    """Out of the queue and back to the lane, for another router; never acked."""
    talk = Talk().waiting()
    assert talk.tell(ev.Drain()) == [
        ev.Unplace(reply_id=REPLY),
        ev.Nak(reply_id=REPLY, ack_subject="ack.1"),
    ]
    assert talk.state is State.GONE


def test_a_draining_router_sees_through_what_runs_and_gives_back_what_comes_back():
    """A running reply is not touched; when its attempt fails, it is given back instead of queued."""
    talk = Talk().running()
    assert talk.tell(ev.Drain()) == []
    talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome="handed_back"))
    assert kinds(talk.read()) == ["Nak"]


# --- the machine ---------------------------------------------------------------------------------------------


def test_answers_to_commands_no_longer_waited_for_are_dropped():
    """A late answer changes nothing, in whatever state."""
    talk = Talk().waiting().dispatching()
    ticket = said(talk.commands, ev.SendDispatch).ticket
    talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome="failed"))
    talk.read()
    assert talk.state is State.WAITING
    assert talk.tell(ev.DispatchTaken(reply_id=REPLY, ticket=ticket, router=ME)) == []
    assert talk.state is State.WAITING


def test_an_answer_that_never_comes_is_given_up():
    """Every wait has a deadline: the log is read again."""
    talk = Talk()
    assert kinds(talk.wait(COMMAND_ANSWER_S))[-1] == "ReadLog"


TALKS = {
    State.READING: Talk,
    State.WAITING: lambda: Talk().waiting(),
    State.OPENING: lambda: Talk().waiting().opening(),
    State.DISPATCHING: lambda: Talk().waiting().dispatching(),
    State.RUNNING: lambda: Talk().running(),
}


@pytest.mark.parametrize("state", TALKS)
@pytest.mark.parametrize("event", [ev.Placed(reply_id=REPLY, replica="r", model_version="1"), ev.Tick(), ev.Drain()])
def test_an_event_the_table_does_not_have_raises_and_changes_nothing(state, event):
    """Placed while nobody asked is the shell's mistake; ticks and drains are legal everywhere."""
    talk = TALKS[state]()
    before = {**vars(talk.lease)}
    if isinstance(event, ev.Placed) and state is not State.WAITING:
        with pytest.raises(IllegalEventError):
            talk.tell(event)
        assert vars(talk.lease) == before
    else:
        talk.tell(event)


# --- the table of leases -------------------------------------------------------------------------------------


def table(now: float = 0.0, suspects: tuple[str, ...] = ()) -> LeaseTable:
    return LeaseTable(ME, suspect=lambda replica, _: replica in suspects, now=now)


def test_events_of_replies_not_held_are_dropped():
    """Cancels, presence and reports are broadcast; most concern other routers."""
    leases = table()
    for event in (
        ev.CancelHeard(reply_id=REPLY),
        ev.PresenceHeard(reply_id=REPLY),
        ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome="ended"),
    ):
        assert leases.on(event, 0.0) == []


def test_a_lease_that_is_over_leaves_the_table():
    """And the next delivery of the same reply begins anew, with tickets that were never used."""
    leases = table()
    first = said(leases.on(delivered(1), 0.0), ev.ReadLog).ticket
    view = LogView().apply_all([SequencedEntry(seq=1, entry=request().accepted)])
    leases.on(ev.Drain(), 0.0)
    leases.on(ev.LogRead(reply_id=REPLY, ticket=first, view=view), 0.0)
    assert len(leases) == 0
    again = said(leases.on(delivered(2), 0.0), ev.ReadLog).ticket
    assert again > first
    assert leases.on(ev.LogRead(reply_id=REPLY, ticket=first, view=LogView()), 0.0) == []
    assert len(leases) == 1


def test_nothing_is_due_before_the_next_wake():
    """Ticks in between find nothing to do; the one at that time does."""
    leases = table()
    leases.on(delivered(1), 0.0)
    due = leases.next_wake
    assert leases.on_tick(due - 0.001) == []
    assert leases.on_tick(due) == [ev.Extend(reply_id=REPLY, ack_subject="ack.1")]
    assert leases.next_wake > due


def test_a_router_that_just_started_suspects_nobody():
    """Whoever has had no time to hear heartbeats must not take silence for death."""
    view = LogView().apply_all(
        SequencedEntry(seq=seq, entry=entry)
        for seq, entry in enumerate([request().accepted, opened(router=OTHER), chunk(0)], 1)
    )
    for age, expected in ((0.1, "AskReplica"), (5.0, None)):
        leases = table(suspects=("r1",))
        ticket = said(leases.on(delivered(2), age), ev.ReadLog).ticket
        said_then = kinds(leases.on(ev.LogRead(reply_id=REPLY, ticket=ticket, view=copy.deepcopy(view)), age))
        assert said_then == ([expected] if expected else [])


def test_what_is_delivered_to_a_draining_router_goes_back():
    """A delivery that was on its way when the drain began is not queued."""
    leases = table()
    leases.on(ev.Drain(), 0.0)
    ticket = said(leases.on(delivered(1), 0.0), ev.ReadLog).ticket
    view = LogView().apply_all([SequencedEntry(seq=1, entry=request().accepted)])
    assert kinds(leases.on(ev.LogRead(reply_id=REPLY, ticket=ticket, view=view), 0.0)) == ["Nak"]
    assert len(leases) == 0
