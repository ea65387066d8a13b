"""Leases, as dialogues: what a router is told about one reply, and what it does."""

import copy
import itertools
from typing import Any

import pytest

from services.router import lease_events as ev
from services.router.leases import Lease, LeaseTable, State
from shared.errors import IllegalEventError
from shared.limits import (
    ACK_WAIT_S,
    ATTEMPTS_MAX,
    COMMAND_ANSWER_S,
    IDLE_END_S,
    LEASE_CHECK_S,
    LEASE_EXTEND_S,
    LEASE_RETRY_S,
    OPENS_MAX,
    PROGRESS_CHECK_S,
    QUESTIONS_MAX,
    UNANSWERED_S,
)
from shared.messages import (
    Accepted,
    Chunk,
    End,
    Entry,
    GenerateRequest,
    Open,
    RequestEcho,
    Sampling,
    SequencedEntry,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import LogView

REPLY = "resp_local0000000000000000000000000000"
ME, OTHER = "router-me", "router-other"


def request(*, background: bool = False) -> GenerateRequest:
    accepted = Accepted(
        reply_id=REPLY,
        org="o",
        user="u",
        created_s=0.0,
        model="m",
        tier=Tier.FREE,
        budget=100,
        seed=1,
        input_tokens=3,
        deadline_s=600.0,
        echo=RequestEcho(background=background),
    )
    return GenerateRequest(
        accepted=accepted, accepted_seq=1, prompt=pack_ids([1, 2, 3]), block_hashes=b"", sampling=Sampling(seed=1)
    )


def delivered(number: int = 1, *, deadline_left_s: float = 600.0, background: bool = False) -> ev.Delivered:
    return ev.Delivered(
        reply_id=REPLY,
        request=request(background=background),
        ack_subject=f"ack.{number}",
        delivered=number,
        deadline_left_s=deadline_left_s,
    )


def opened(attempt: int = 1, replica: str = "r1", *, router: str = ME, tokens: int = 0, returned: int = 0) -> Open:
    return Open(
        attempt=attempt, replica=replica, model_version="1", first_index=tokens, router=router, returned=returned
    )


def chunk(first_index: int, attempt: int = 1) -> Chunk:
    return Chunk(attempt=attempt, first_index=first_index, ids=pack_ids([first_index]), text="a", text_ends=(1,))


def end(reason: EndReason = EndReason.STOP_TOKEN) -> End:
    return End(reason=reason, by="replica")


class Talk:
    """One lease, a clock, and the log as the shell would read it: entries at sequences 1, 2, 3, ..."""

    def __init__(self, first: ev.Delivered | None = None, *entries: Entry) -> None:
        self.now = 1000.0
        self.suspects: set[str] = set()
        self.log: list[Entry] = [request().accepted, *entries]
        self.lease = Lease(
            first or delivered(),
            router=ME,
            suspect=lambda replica, _: replica in self.suspects,
            tickets=itertools.count(1),
            now=self.now,
        )
        self.commands: list[ev.Command] = []
        self.ticket = 0  # of the command last asked
        self._hear(self.lease.start(self.now))

    def _hear(self, commands: list[ev.Command]) -> list[ev.Command]:
        self.commands = commands
        for command in commands:
            self.ticket = getattr(command, "ticket", self.ticket)
        return commands

    @property
    def state(self) -> State:
        return self.lease.state

    def tell(self, event: Any) -> list[ev.Command]:
        return self._hear(self.lease.on(event, self.now))

    def answer(self, kind: type[ev.Answer], **fields: Any) -> list[ev.Command]:
        """Answers the last command that wants one."""
        return self.tell(kind(reply_id=REPLY, ticket=self.ticket, **fields))

    def read(self) -> list[ev.Command]:
        """The shell reads the log as it stands."""
        view = LogView().apply_all(SequencedEntry(seq=seq, entry=entry) for seq, entry in enumerate(self.log, 1))
        return self.answer(ev.LogRead, view=view)

    def wait(self, seconds: float) -> list[ev.Command]:
        """Time passes, tick by tick; the commands of all ticks."""
        end_at, commands = self.now + seconds, []
        while self.now < end_at:
            self.now = min(end_at, max(self.lease.wake_at, self.now + 0.001))
            commands += self.tell(ev.Tick())
        return self._hear(commands)

    # --- ways to where a test begins

    def waiting(self) -> "Talk":
        self.read()
        assert self.state is State.WAITING
        return self

    def opening(self, replica: str = "r1") -> "Talk":
        self.tell(ev.Placed(reply_id=REPLY, replica=replica, model_version="1"))
        assert self.state is State.OPENING
        return self

    def dispatching(self, replica: str = "r1") -> "Talk":
        self.opening(replica)
        self.log.append(said(self.commands, ev.AppendOpen).entry)
        self.answer(ev.OpenAppended, seq=len(self.log))
        assert self.state is State.DISPATCHING
        return self

    def running(self, replica: str = "r1") -> "Talk":
        if self.state is State.READING:
            self.waiting()
        self.dispatching(replica)
        self.answer(ev.DispatchTaken, router=ME)
        assert self.state is State.RUNNING
        return self


def said(commands: list[ev.Command], kind: type[Any]) -> Any:
    """The one command of this kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {commands}"
    return found[0]


def kinds(commands: list[ev.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


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


def test_many_deliveries_are_not_attempts():
    """The 40th delivery of a reply with one open goes on."""
    talk = Talk(delivered(40), opened(router=OTHER), chunk(0))
    talk.read()
    talk.answer(ev.Answered, running=False, attempt=0, router="")
    assert kinds(talk.read()) == ["Place"]


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
