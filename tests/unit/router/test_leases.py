"""Leases, as dialogues: what a router is told about one reply, and what it does."""

import copy

import pytest

from services.router import lease_events as ev
from services.router.leases import State
from shared.limits import (
    ACK_WAIT_S,
    ATTEMPTS_MAX,
    LEASE_CHECK_S,
    LEASE_EXTEND_S,
    LEASE_RETRY_S,
    OPENS_MAX,
    PROGRESS_CHECK_S,
    QUESTIONS_MAX,
    UNANSWERED_S,
)
from shared.messages import (
    pack_ids,
)
from shared.outcomes import EndReason
from tests.unit.router.lease_talk import ME, OTHER, REPLY, Talk, chunk, delivered, end, kinds, opened, said

# --- from the lane to a replica ----------------------------------------------------------------------------


def test_a_new_reply_is_read_placed_opened_and_dispatched():
    """The open expects the accepted entry; the dispatch names the open and holds nothing written."""
    talk = Talk()
    assert kinds(talk.commands) == ["ReadLog"]
    assert kinds(talk.read()) == ["Place"]
    talk.opening()
    command = said(talk.commands, ev.AppendOpen)
    assert (command.expected_seq, command.entry) == (1, opened())
    talk.answer(ev.OpenAppended, seq=2)
    command = said(talk.commands, ev.SendDispatch)
    assert command.replica == "r1"
    assert (command.dispatch.attempt, command.dispatch.open_seq, command.dispatch.written) == (1, 2, b"")
    assert (command.dispatch.ack_subject, command.dispatch.delivered) == ("ack.1", 1)
    assert command.dispatch.deadline_left_s == pytest.approx(600.0)
    assert talk.answer(ev.DispatchTaken, router=ME) == []
    assert talk.state is State.RUNNING


def test_a_waiting_delivery_is_extended_a_running_one_is_not():
    """The router keeps the message while it waits; the replica does while it runs."""
    talk = Talk().waiting()
    extensions = [command for command in talk.wait(2.0) if isinstance(command, ev.Extend)]
    assert len(extensions) == 2.0 / LEASE_EXTEND_S
    talk.running()
    assert talk.wait(LEASE_CHECK_S - 0.1) == []


def test_a_lost_dispatch_is_sent_again_under_the_same_open():
    """Nothing written, no answer: the same attempt goes to the same replica, and costs no other."""
    talk = Talk().waiting().dispatching()
    first = said(talk.commands, ev.SendDispatch)
    talk.answer(ev.DispatchUnknown)
    assert kinds(talk.wait(PROGRESS_CHECK_S)) == ["ReadLog"]
    again = said(talk.read(), ev.SendDispatch)
    assert (again.replica, again.dispatch.attempt, again.dispatch.open_seq) == (
        first.replica,
        first.dispatch.attempt,
        first.dispatch.open_seq,
    )


def test_an_open_of_unknown_outcome_is_looked_for():
    """If it stands it is dispatched; if not, the reply is placed again."""
    talk = Talk().waiting().opening()
    entry = said(talk.commands, ev.AppendOpen).entry
    talk.answer(ev.OpenUnknown)
    talk.wait(LEASE_RETRY_S)
    stands = copy.deepcopy(talk)
    assert kinds(talk.read()) == ["Place"]
    stands.log.append(entry)
    assert said(stands.read(), ev.SendDispatch).dispatch.attempt == 1


def test_a_refused_open_is_read_again():
    """Another router was first: its replica is asked, and its lease adopted."""
    talk = Talk().waiting().opening()
    talk.log.append(opened(replica="r2", router=OTHER))
    assert kinds(talk.answer(ev.OpenRefused)) == ["ReadLog"]
    command = said(talk.read(), ev.AskReplica)
    assert (command.replica, command.ask.ack_subject, command.ask.delivered) == ("r2", "ack.1", 1)
    assert talk.answer(ev.Answered, running=True, attempt=1, router=ME) == []
    assert talk.state is State.RUNNING


def test_a_reply_stopped_while_it_waits_is_archived_and_acked():
    """The open is refused, the end stands, the archive has it: only then the message leaves the lane."""
    talk = Talk().waiting().opening()
    talk.log.append(end(EndReason.USER_STOP))
    talk.answer(ev.OpenRefused)
    assert said(talk.read(), ev.Archive).view.ended == end(EndReason.USER_STOP)
    assert talk.answer(ev.Archived) == [ev.Ack(reply_id=REPLY, ack_subject="ack.1")]
    assert talk.state is State.GONE


def test_a_cancel_that_is_heard_takes_a_waiting_reply_out_of_the_queue():
    """It does not wait for its turn to learn that it has ended."""
    talk = Talk().waiting()
    talk.log.append(end(EndReason.USER_STOP))
    assert kinds(talk.tell(ev.CancelHeard(reply_id=REPLY))) == ["Unplace", "ReadLog"]
    assert kinds(talk.read()) == ["Archive"]


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["full", "draining", "not_ready", "other_model"])
def test_a_refusal_sends_the_reply_back_to_wait_and_does_not_count(reason):
    """The next open says in the log that the one before was given back; the replica is avoided."""
    talk = Talk().waiting().dispatching()
    assert talk.answer(ev.DispatchDeclined, reason=reason) == [ev.Place(reply_id=REPLY, avoid="r1")]
    talk.opening("r2")
    assert said(talk.commands, ev.AppendOpen).entry == opened(2, "r2", returned=1)


def test_a_refused_last_attempt_is_not_the_last():
    """Two attempts were lost, the third was refused: it may still be tried elsewhere."""
    talk = Talk(delivered(), opened(1), opened(2), opened(3))
    talk.read()
    assert kinds(talk.answer(ev.DispatchDeclined, reason="full")) == ["Place"]


def test_an_attempt_that_was_over_at_the_replica_counts():
    """Dispatched again under a standing open, it turns out to have run there: not given back, spent."""
    talk = Talk(delivered(2), opened(router=OTHER))
    talk.read()
    talk.answer(ev.Answered, running=False, attempt=0, router="")
    assert kinds(talk.answer(ev.DispatchDeclined, reason="over")) == ["ReadLog"]
    talk.read()
    talk.opening("r2")
    assert said(talk.commands, ev.AppendOpen).entry == opened(2, "r2", returned=0)


def test_the_second_refusal_in_a_row_waits_for_fresh_heartbeats():
    """A full fleet is not asked round and round."""
    talk = Talk().waiting().dispatching()
    talk.answer(ev.DispatchDeclined, reason="full")
    talk.dispatching("r2")
    assert talk.answer(ev.DispatchDeclined, reason="full") == []
    assert talk.state is State.PAUSED
    assert kinds(talk.wait(LEASE_RETRY_S)) == ["ReadLog"]
    assert kinds(talk.read()) == ["Place"]


@pytest.mark.parametrize("reason", ["never_fits", "bad_request"])
def test_what_no_replica_can_run_fails_at_once(reason):
    """The sentence of the replica is the sentence for the person."""
    talk = Talk().waiting().dispatching()
    command = said(talk.answer(ev.DispatchDeclined, reason=reason, detail="Too long."), ev.AppendEnd)
    assert (command.reason, command.detail) == (EndReason.FAILED, "Too long.")


def test_what_cannot_be_placed_anywhere_fails_at_once():
    """Placement knows before any open."""
    talk = Talk().waiting()
    command = said(talk.tell(ev.Unplaceable(reply_id=REPLY, detail="Too long.")), ev.AppendEnd)
    assert (command.reason, command.detail) == (EndReason.FAILED, "Too long.")


def test_given_back_attempts_end_too():
    """After OPENS_MAX opens the reply fails, although none of them counted."""
    entries = [opened(at, returned=at - 1) for at in range(1, OPENS_MAX + 1)]
    talk = Talk(delivered(), *entries)
    said(talk.read(), ev.SendDispatch)
    talk.answer(ev.DispatchDeclined, reason="full")
    assert said(talk.commands, ev.AppendEnd).reason is EndReason.FAILED


# --- a redelivery is a question ------------------------------------------------------------------------------


def test_a_redelivery_asks_the_replica_and_adopts_the_lease():
    """A reply that another router opened and a replica runs is not opened again."""
    talk = Talk(delivered(2), opened(router=OTHER), chunk(0))
    assert said(talk.read(), ev.AskReplica).replica == "r1"
    assert talk.answer(ev.Answered, running=True, attempt=1, router=ME) == []
    assert talk.state is State.RUNNING


def test_an_open_that_never_reached_its_replica_is_dispatched_by_whoever_holds_the_message():
    """The router that opened it died: the same attempt, the same replica, no new open."""
    talk = Talk(delivered(2), opened(router=OTHER))
    talk.read()
    command = said(talk.answer(ev.Answered, running=False, attempt=0, router=""), ev.SendDispatch)
    assert (command.replica, command.dispatch.attempt, command.dispatch.open_seq) == ("r1", 1, 2)


def test_a_replica_that_runs_a_later_attempt_knows_more_of_the_log():
    """Nothing is dispatched under an open that was followed by another: the log is read again."""
    talk = Talk(delivered(2), opened(router=OTHER))
    talk.read()
    assert kinds(talk.answer(ev.Answered, running=True, attempt=2, router=OTHER)) == ["ReadLog"]


def test_what_was_written_and_is_not_running_goes_on_elsewhere():
    """The continuation holds the tokens of the log up to its own open."""
    talk = Talk(delivered(2), opened(router=OTHER), chunk(0), chunk(1))
    talk.read()
    assert kinds(talk.answer(ev.Answered, running=False, attempt=0, router="")) == ["ReadLog"]
    assert talk.read() == [ev.Place(reply_id=REPLY, avoid="r1")]
    talk.dispatching("r2")
    dispatch = said(talk.commands, ev.SendDispatch).dispatch
    assert (dispatch.attempt, dispatch.open_seq, dispatch.written) == (2, 5, pack_ids([0, 1]))


def test_a_reply_that_ended_just_before_it_was_asked_for_is_not_opened():
    """Not running may mean finished: the log is read once more."""
    talk = Talk(delivered(2), opened(router=OTHER), chunk(0))
    talk.read()
    talk.log.append(end())
    talk.answer(ev.Answered, running=False, attempt=0, router="")
    assert kinds(talk.read()) == ["Archive"]


def test_the_router_of_a_newer_delivery_keeps_the_reply():
    """Told so by the replica, this one lets go: no ack, no nak, no extension."""
    talk = Talk(delivered(2), opened(router=OTHER), chunk(0))
    talk.read()
    assert talk.answer(ev.Answered, running=True, attempt=1, router=OTHER) == []
    assert talk.state is State.GONE


@pytest.mark.parametrize("outcome", ["adopted"])
def test_a_router_whose_lease_was_adopted_lets_go(outcome):
    """The replica says that it now reports to a newer delivery."""
    talk = Talk().running()
    assert talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome=outcome)) == []
    assert talk.state is State.GONE


def test_a_redelivery_while_running_is_a_question_too():
    """The router's own running reply is asked for, with the new ack subject, and goes on."""
    talk = Talk().running()
    assert kinds(talk.tell(delivered(2))) == ["ReadLog"]
    assert said(talk.read(), ev.AskReplica).ask.ack_subject == "ack.2"
    talk.answer(ev.Answered, running=True, attempt=1, router=ME)
    assert talk.state is State.RUNNING


def test_the_newest_delivery_is_acked_and_the_older_ones_are_not():
    """Deliveries seen in any order leave one ack subject in use."""
    talk = Talk(delivered(2), opened(), chunk(0), end())
    talk.tell(delivered(3))
    talk.tell(delivered(1))
    talk.read()
    assert talk.answer(ev.Archived) == [ev.Ack(reply_id=REPLY, ack_subject="ack.3")]


def test_a_reply_whose_lease_lapses_again_and_again_without_progress_moves():
    """The replica says that it runs, but nobody extends the delivery and the log stands still."""
    talk = Talk().running()
    for number in range(2, 2 + QUESTIONS_MAX):
        assert talk.state is State.RUNNING
        talk.now += ACK_WAIT_S
        talk.tell(delivered(number))
        talk.read()
        if talk.state is State.ASKING:
            talk.answer(ev.Answered, running=True, attempt=1, router=ME)
    assert talk.state is State.WAITING


def test_elections_alone_do_not_move_a_reply():
    """Many redeliveries at once say nothing about the replica."""
    talk = Talk().running()
    for number in range(2, 20):
        talk.tell(delivered(number))
        talk.read()
        talk.answer(ev.Answered, running=True, attempt=1, router=ME)
    assert talk.state is State.RUNNING


# --- verdicts ------------------------------------------------------------------------------------------------


def test_a_suspect_replica_with_a_still_log_is_replaced():
    """Heartbeats missing, and the log looked at twice: then another open."""
    talk = Talk().running()
    talk.log.append(chunk(0))
    talk.suspects.add("r1")
    assert kinds(talk.tell(ev.ReplicaSuspect(replica="r1"))) == ["ReadLog"]
    talk.read()
    assert talk.state is State.PAUSED
    assert kinds(talk.wait(PROGRESS_CHECK_S)) == ["ReadLog"]
    assert talk.read() == [ev.Place(reply_id=REPLY, avoid="r1")]
    talk.opening("r2")
    assert said(talk.commands, ev.AppendOpen).entry == opened(2, "r2", tokens=1)


def test_a_suspect_replica_whose_log_grows_is_alive():
    """Missing heartbeats alone move nothing, however long they are missing."""
    talk = Talk().running()
    talk.suspects.add("r1")
    talk.tell(ev.ReplicaSuspect(replica="r1"))
    for index in range(10):
        talk.log.append(chunk(index))
        talk.read()
        assert talk.state is State.PAUSED
        talk.wait(PROGRESS_CHECK_S)
    talk.suspects.clear()
    assert kinds(talk.read()) == ["AskReplica"]


def test_a_verdict_falls_when_the_log_goes_on():
    """Given up, queued, and then it writes: the open is refused and the replica is asked after all."""
    talk = Talk().running()
    talk.suspects.add("r1")
    talk.tell(ev.ReplicaSuspect(replica="r1"))
    talk.now += PROGRESS_CHECK_S
    talk.read()
    talk.opening("r2")
    talk.suspects.clear()
    talk.log.append(chunk(0))
    talk.answer(ev.OpenRefused)
    assert kinds(talk.read()) == ["AskReplica"]


def test_anothers_suspicion_does_not_concern_this_reply():
    """Only the replica of the last open matters."""
    talk = Talk().running()
    assert talk.tell(ev.ReplicaSuspect(replica="r9")) == []
    assert talk.tell(ev.ReplicaRestarted(replica="r9")) == []
    assert talk.state is State.RUNNING


def test_a_restarted_replica_is_asked_and_has_lost_the_reply():
    """It was taken and is gone: the attempt counts, and the reply goes on with another."""
    talk = Talk().running()
    talk.tell(ev.ReplicaRestarted(replica="r1"))
    assert kinds(talk.read()) == ["AskReplica"]
    talk.answer(ev.Answered, running=False, attempt=0, router="")
    talk.read()
    talk.opening("r2")
    assert said(talk.commands, ev.AppendOpen).entry == opened(2, "r2")


def test_no_answer_is_no_verdict_until_it_has_lasted():
    """A replica that is heard of but does not answer is asked again until UNANSWERED_S without progress."""
    talk = Talk(delivered(2), opened(router=OTHER), chunk(0))
    began = talk.now
    talk.read()
    while talk.state is State.ASKING:
        talk.now += 0.5
        talk.answer(ev.AskUnanswered)
        assert talk.state is State.PAUSED
        talk.wait(PROGRESS_CHECK_S)
        talk.read()
    assert talk.state is State.WAITING
    assert talk.now - began >= UNANSWERED_S


def test_progress_starts_the_patience_anew():
    """While the log grows, unanswered questions are only that."""
    talk = Talk(delivered(2), opened(router=OTHER), chunk(0))
    talk.read()
    for index in range(1, 12):
        talk.now += 0.5
        talk.answer(ev.AskUnanswered)
        talk.wait(PROGRESS_CHECK_S)
        talk.log.append(chunk(index))
        assert kinds(talk.read()) == ["AskReplica"]


def test_a_failed_attempt_counts_and_a_handed_back_one_does_not():
    """The replica's report decides what the next open says."""
    for outcome, returned in (("failed", 0), ("aborted", 0), ("handed_back", 1)):
        talk = Talk().running()
        talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome=outcome))
        talk.read()
        talk.opening("r2")
        assert said(talk.commands, ev.AppendOpen).entry == opened(2, "r2", returned=returned)


def test_reports_of_other_attempts_are_old_news():
    """An attempt that was replaced long ago says that it is over."""
    talk = Talk(delivered(2), opened(router=OTHER), opened(2, "r2"))
    talk.read()
    talk.answer(ev.DispatchTaken, router=ME)
    assert talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=1, outcome="failed")) == []
    assert talk.state is State.RUNNING


def test_after_three_attempts_the_reply_fails():
    """Counted by opens; deliveries may be as many as they like."""
    talk = Talk(delivered(17), *[opened(at, f"r{at}") for at in range(1, ATTEMPTS_MAX + 1)])
    talk.read()
    talk.answer(ev.DispatchTaken, router=ME)
    talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=ATTEMPTS_MAX, outcome="failed"))
    command = said(talk.read(), ev.AppendEnd)
    assert command.reason is EndReason.FAILED
    assert command.detail
    assert command.after_seq == talk.lease.view.last_seq, "a log that has grown meanwhile is another case"


def test_a_log_that_grew_under_a_failing_end_is_looked_at_anew():
    """The read that gave the reason was behind: the last attempt had written, so it is asked, and not the end."""
    talk = Talk(delivered(2), *[opened(at, f"r{at}") for at in range(1, ATTEMPTS_MAX + 1)])
    talk.read()
    talk.answer(ev.DispatchTaken, router=ME)
    talk.tell(ev.AttemptEnded(reply_id=REPLY, attempt=ATTEMPTS_MAX, outcome="failed"))
    said(talk.read(), ev.AppendEnd)
    talk.log.append(chunk(0, attempt=ATTEMPTS_MAX))
    talk.answer(ev.EndFailed)
    talk.wait(1.0)
    assert "AppendEnd" not in kinds(talk.read())


def test_many_deliveries_are_not_attempts():
    """The 40th delivery of a reply with one open goes on."""
    talk = Talk(delivered(40), opened(router=OTHER), chunk(0))
    talk.read()
    talk.answer(ev.Answered, running=False, attempt=0, router="")
    assert kinds(talk.read()) == ["Place"]
