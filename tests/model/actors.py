"""Who takes part: each wraps the real pure code and does for it what its service's shell does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from services.router import lease_events as lease
from services.router.lease_table import LeaseTable
from shared.limits import (
    ASK_TIMEOUT_S,
    DISPATCH_TIMEOUT_S,
    HEARTBEAT_S,
    HEARTBEATS_MISSED_MAX,
    LEASE_EXTEND_S,
    LOG_END_S,
    PRESENCE_S,
    STUCK_STEP_FACTOR,
)
from shared.messages import (
    Ask,
    Dispatch,
    Dispatched,
    DispatchRefused,
    End,
    EndedReply,
    Holding,
    SequencedEntry,
    unpack_ids,
)
from shared.outcomes import EndReason
from shared.token_log import Append, LogView, LogWriter, WriterState
from tests.model.bus import LaneMessage
from tests.model.checks import hears_since, next_mix, next_token
from tests.model.world import Process, World

if TYPE_CHECKING:
    from tests.model.scene import Scene

SILENT_S = HEARTBEAT_S * HEARTBEATS_MISSED_MAX
READ_TIMEOUT_S = 0.5


# --- a replica -----------------------------------------------------------------------------------------


@dataclass
class Running:
    """A sequence in a replica."""

    dispatch: Dispatch
    writer: LogWriter
    ids: list[int]
    mix: int
    ack_subject: str
    delivered: int
    router: str
    landed: set[int] = field(default_factory=set)  # sequences of entries that are ours, whether or not we know
    extended_at: int = -1  # tokens in the log at the last extension


class Replica(Process):
    def __init__(self, scene: "Scene", name: str) -> None:
        super().__init__(scene.world, name)
        self.scene = scene
        self.sequence: Running | None = None
        self.draining = False
        self.hung_since: float | None = None
        self._over: set[int] = set()

    @property
    def blocks_used(self) -> int:
        return 1 if self.sequence else 0

    def at_work(self, attempt: int) -> bool:
        sequence = self.sequence
        return (
            self.up
            and self.paused_until <= self.world.now
            and self.hung_since is None
            and sequence is not None
            and sequence.dispatch.attempt == attempt
            and sequence.writer.state is WriterState.WRITING
        )

    # --- faults

    def crashed(self) -> None:
        self.sequence = None

    def started(self) -> None:
        self.draining, self.hung_since, self._over = False, None, set()
        for router in self.scene.routers:
            self.world.send(router, router.heard_restart, self)

    def went_quiet(self) -> None:
        for router in self.scene.routers:
            self.world.at(SILENT_S + 0.01, router.look_at, self, owner=router)

    def hang(self, hang_s: float) -> None:
        """The step loop stands still; the process answers."""
        if self.up and self.hung_since is None:
            self.world.say("{} hangs for {} s", self.name, hang_s)
            self.hung_since = self.world.now
            self.world.at(hang_s, self._unhang, owner=self)
            for router in self.scene.routers:
                self.world.at(self.stuck_after_s + 0.3, router.look_at, self, owner=router)

    def _unhang(self) -> None:
        self.hung_since = None

    @property
    def stuck_after_s(self) -> float:
        return STUCK_STEP_FACTOR * self.world.swarm.step_s

    def drain(self, drain_s: float) -> None:
        """Takes nothing new; what runs is handed back or finished."""
        self.draining = True
        self.world.at(drain_s, self._accept_again, owner=self)
        if self.sequence and self.world.random.random() < 0.5:
            self._leave("handed_back")

    def _accept_again(self) -> None:
        self.draining = False

    # --- what routers say

    def dispatched(self, dispatch: Dispatch) -> Dispatched | DispatchRefused:
        running = self.sequence
        if running is not None and dispatch.attempt <= running.dispatch.attempt:
            self._report_to(running, dispatch.router, dispatch.ack_subject, dispatch.delivered)
            return Dispatched(replica=self.name, router=running.router)
        if self.world.swarm.remembers and dispatch.attempt in self._over:
            return DispatchRefused(replica=self.name, reason="over")
        if self.draining or self.world.chance(self.world.swarm.refusals):
            self.scene.checks.given_back.add(dispatch.attempt)
            return DispatchRefused(replica=self.name, reason="draining" if self.draining else "full")
        self.scene.checks.runs(self, dispatch)
        written, mix = unpack_ids(dispatch.written), 0
        for token in written:
            mix = next_mix(mix, token)
        writer = self.scene.rules.writer(attempt=dispatch.attempt, open_seq=dispatch.open_seq, first_index=len(written))
        self.sequence = running = Running(
            dispatch=dispatch,
            writer=writer,
            ids=written,
            mix=mix,
            ack_subject=dispatch.ack_subject,
            delivered=dispatch.delivered,
            router=dispatch.router,
        )
        self.world.say("{} runs attempt {} after {} tokens", self.name, dispatch.attempt, len(written))
        self.world.at(self.world.random.random() * self.world.swarm.prefill_s, self._step, running, owner=self)
        self.world.at(LEASE_EXTEND_S / 2, self._extend, running, owner=self)
        return Dispatched(replica=self.name, router=dispatch.router)

    def asked(self, ask: Ask) -> Holding:
        running = self.sequence
        if running is None:
            return Holding(replica=self.name, reply_id=ask.reply_id, running=False)
        self._report_to(running, ask.router, ask.ack_subject, ask.delivered)
        attempt = running.dispatch.attempt
        return Holding(replica=self.name, reply_id=ask.reply_id, running=True, attempt=attempt, router=running.router)

    def _report_to(self, running: Running, router: str, ack_subject: str, delivered: int) -> None:
        """The newest delivery counts; the router of the one before is told."""
        if delivered < running.delivered:
            return
        if running.router != router:
            self.scene.tell(running.router, "attempt_ended", running.dispatch.attempt, "adopted")
        running.ack_subject, running.delivered, running.router = ack_subject, delivered, router

    def cancelled(self) -> None:
        if self.sequence:
            self._leave("aborted")

    # --- the step loop

    def _step(self, running: Running) -> None:
        if self.sequence is not running:
            return
        again = self.world.swarm.step_s * (0.5 + self.world.random.random())
        if self.hung_since is None:
            if self.world.chance(self.world.swarm.failures * 0.2):
                self._leave("failed")
                return
            if len(running.ids) < self.world.swarm.length:
                self._sample(running)
            if len(running.ids) >= self.world.swarm.length:
                by = f"{self.name}/{self.boot} attempt {running.dispatch.attempt}"
                running.writer.finish(End(reason=EndReason.STOP_TOKEN, by=by))
                self._pump(running)
                return
        self.world.at(again, self._step, running, owner=self)

    def _sample(self, running: Running) -> None:
        token = next_token(running.mix, running.dispatch.attempt)
        running.ids.append(token)
        running.mix = next_mix(running.mix, token)
        text = "" if token % 5 == 0 else chr(97 + token % 26) * (1 + token % 3)
        running.writer.offer([token], [text])
        self._pump(running)

    # --- appending

    def _pump(self, running: Running) -> None:
        append = running.writer.next_append()
        if append is not None:
            self._send(running, append)

    def _send(self, running: Running, append: Append) -> None:
        """One append; its answer, or its absence, goes to the writer."""
        expected = None if self.scene.rules.unconditional_append else append.expected_seq

        def serve() -> tuple[int | None]:
            seq = self.scene.log.append(expected, append.entry, self)
            if seq is not None:
                running.landed.add(seq)
            return (seq,)

        timeout_s = self.world.swarm.append_timeout_s
        self.world.call(self, None, serve, partial(self._append_answered, running, append), timeout_s)
        self._pump(running)  # nothing, as long as one append is in flight at a time

    def _append_answered(self, running: Running, sent: Append, answer: tuple[int | None] | None) -> None:
        if self.sequence is not running or running.writer.in_flight is not sent:
            return
        if answer is None:
            self._send(running, running.writer.unknown())
        elif answer[0] is None:
            self._read_standing(running)
        else:
            running.writer.acked(answer[0])
            self._appended(running)

    def _read_standing(self, running: Running) -> None:
        def answered(items: list[SequencedEntry] | None) -> None:
            if self.sequence is not running:
                return
            if items is None:
                self._read_standing(running)
                return
            running.writer.refused(items[-1] if items else None)
            if running.writer.state is WriterState.WRITING and running.writer.in_flight is not None:
                self._read_standing(running)
            else:
                self._appended(running)

        self.world.call(self, None, self.scene.log.read, answered, READ_TIMEOUT_S)

    def _appended(self, running: Running) -> None:
        state = running.writer.state
        if state is WriterState.REPLACED:
            last = self.scene.log.entries[-1]
            self.scene.checks.writer_dropped(self, last if last.seq in running.landed else None)
            self._leave("replaced")
        elif state is WriterState.ENDED:
            self._leave("ended")
        else:
            self._pump(running)

    def _leave(self, outcome: str) -> None:
        """The sequence goes, its blocks with it; the router that holds the lease is told."""
        running = self.sequence
        assert running is not None
        self.sequence = None
        self.world.say("{} leaves attempt {}: {}", self.name, running.dispatch.attempt, outcome)
        if outcome == "handed_back":
            self.scene.checks.given_back.add(running.dispatch.attempt)
        self.scene.checks.over.add(running.dispatch.attempt)
        self._over.add(running.dispatch.attempt)
        self.scene.tell(running.router, "attempt_ended", running.dispatch.attempt, outcome)

    def _extend(self, running: Running) -> None:
        """Only while the appended log grows, or a step is inside its predicted time with nothing left to append."""
        if self.sequence is not running:
            return
        grew = running.writer.appended > running.extended_at
        if grew or (running.writer.pending == 0 and self.hung_since is None):
            running.extended_at = running.writer.appended
            self.scene.extend(running.ack_subject)
        self.world.at(LEASE_EXTEND_S, self._extend, running, owner=self)


# --- ending a log ------------------------------------------------------------------------------------------


class Ender:
    """Reads and appends until an `end` stands: what a canceller does, and a router that ends a reply."""

    def __init__(self, scene: "Scene", owner: Process, end: End, done: Callable[[bool], None]) -> None:
        self.scene, self.world, self.owner, self.end, self.done = scene, scene.world, owner, end, done
        self.give_up_s = self.world.now + LOG_END_S

    def go(self) -> None:
        if self.world.now >= self.give_up_s:
            self.done(False)
            return
        self.world.call(self.owner, None, self.scene.log.read, self._read, READ_TIMEOUT_S)

    def _read(self, items: list[SequencedEntry] | None) -> None:
        if items is None:
            self.go()
            return
        move = self.scene.rules.end_move(LogView().apply_all(items), self.end)
        if move is None:
            self.done(True)
            return
        expected, entry = move

        def serve() -> tuple[int | None]:
            return (self.scene.log.append(expected, entry, self.owner),)

        self.world.call(self.owner, None, serve, self._appended, self.world.swarm.append_timeout_s)

    def _appended(self, answer: tuple[int | None] | None) -> None:
        if (answer is not None and answer[0] is not None) or not self.scene.rules.enders_insist:
            self.done(True)
        else:
            self.go()


class Canceller(Process):
    """A user's stop: ends the log, then makes it fast."""

    def cancel(self, scene: "Scene", reason: EndReason) -> None:
        scene.checks.stopped_by.add(reason)
        self.world.say("{} stops the reply", self.name)

        def done(stands: bool) -> None:
            if stands:
                scene.checks.stop_returned()
                scene.announce()

        Ender(scene, self, End(reason=reason, by=self.name), done).go()


# --- a router ----------------------------------------------------------------------------------------------


class Router(Process):
    """The router's shell: performs what the leases command and answers them."""

    def __init__(self, scene: "Scene", name: str) -> None:
        super().__init__(scene.world, name)
        self.scene = scene
        self.draining = False
        self.deaf: dict[str, float] = {}  # replica -> since when its heartbeats do not come here
        self.quiet_before: dict[str, float] = {}  # replica -> until when something was amiss
        self.started()

    @property
    def id(self) -> str:
        return f"{self.name}-{self.boot}"

    @property
    def pulls(self) -> bool:
        return self.up and not self.draining

    def started(self) -> None:
        self.draining = False
        self.table: LeaseTable = self.scene.rules.table(self.id, suspect=self.suspect, now=self.world.now)
        self._queued = 0  # the number of the placement asked for last; 0: none
        self._placements = 0
        self._wake = float("inf")
        for replica in self.scene.replicas:
            self.quiet_before[replica.name] = self.world.now

    def went_quiet(self) -> None:
        if self.up:  # a pause: on waking up it has heard nobody for a while
            for replica in self.scene.replicas:
                self.hears_no_more(replica, self.paused_until - self.world.now + 0.2 * self.world.random.random())

    # --- heartbeats

    def hears_no_more(self, replica: Replica, deaf_s: float) -> None:
        self.deaf.setdefault(replica.name, self.world.now)
        self.world.at(deaf_s, self._hears_again, replica)
        self.world.at(SILENT_S + 0.01, self.look_at, replica, owner=self)

    def _hears_again(self, replica: Replica) -> None:
        if self.deaf.pop(replica.name, None) is not None:
            self.quiet_before[replica.name] = self.world.now

    def hears(self, replica: Replica, for_s: float) -> bool:
        quiet = hears_since(self, replica) is not None or replica.hung_since is not None
        return not quiet and self.world.now - self.quiet_before.get(replica.name, 0.0) > for_s

    def suspect(self, name: str, now: float) -> bool:
        replica = self.scene.replica(name)
        since = hears_since(self, replica)
        if since is not None:
            self.quiet_before[name] = now
            return now - since > SILENT_S
        stuck = replica.hung_since is not None and now - replica.hung_since > replica.stuck_after_s + 0.25
        if stuck:
            self.quiet_before[name] = now
        return stuck

    def look_at(self, replica: Replica) -> None:
        if self.suspect(replica.name, self.world.now):
            self.feed(lease.ReplicaSuspect(replica=replica.name))

    def heard_restart(self, replica: Replica) -> None:
        self.quiet_before[replica.name] = self.world.now
        self.feed(lease.ReplicaRestarted(replica=replica.name))

    # --- what comes in

    def feed(self, event: Any) -> None:
        self.world.say("  {} <- {}", self.id, event)
        commands = self.table.on(event, self.world.now)
        for command in commands:
            self.world.say("  {} -> {}", self.id, command)
            self.scene.checks.commanded(self, command)
            _PERFORM[type(command)](self, command)
        wake = self.table.next_wake
        if wake < self._wake:
            self._wake = wake
            self.world.at(max(0.0, wake - self.world.now), self._tick, wake, owner=self)

    def _tick(self, wake: float) -> None:
        if wake == self._wake:
            self._wake = float("inf")
            self.feed(lease.Tick())

    def delivered(self, message: LaneMessage, number: int) -> None:
        if self.draining:
            return
        left = self.world.swarm.deadline_s - self.world.now
        self.feed(
            lease.Delivered(
                reply_id=self.scene.reply_id,
                request=self.scene.request,
                ack_subject=self.scene.ack_subject(message, number),
                delivered=number,
                deadline_left_s=left,
            )
        )

    def attempt_ended(self, attempt: int, outcome: str) -> None:
        self.feed(lease.AttemptEnded(reply_id=self.scene.reply_id, attempt=attempt, outcome=outcome))

    def cancelled(self) -> None:
        self.feed(lease.CancelHeard(reply_id=self.scene.reply_id))

    def presence(self) -> None:
        self.feed(lease.PresenceHeard(reply_id=self.scene.reply_id))

    def drain(self, away_s: float) -> None:
        """Gives back what waits, sees the rest through for a while, leaves, and comes back as a new process."""
        if self.up and not self.draining:
            self.world.say("{} drains", self.name)
            self.draining = True
            self.feed(lease.Drain())
            self.world.at(1.0, self.crash, away_s, owner=self)

    # --- commands

    def _answer(self, event: type[lease.Answer], ticket: int, **fields: Any) -> None:
        self.feed(event(reply_id=self.scene.reply_id, ticket=ticket, **fields))

    def _read_log(self, command: lease.ReadLog) -> None:
        def answered(items: list[SequencedEntry] | None) -> None:
            if items is None:
                self._answer(lease.ReadFailed, command.ticket)
            else:
                self._answer(lease.LogRead, command.ticket, view=LogView().apply_all(items))

        self.world.call(self, None, self.scene.log.read, answered, READ_TIMEOUT_S)

    def _place(self, command: lease.Place) -> None:
        self._placements += 1
        self._queued = self._placements
        self._try_to_place(self._queued, command.avoid)

    def _unplace(self, _: lease.Unplace) -> None:
        self._queued = 0

    def _try_to_place(self, placement: int, avoid: str) -> None:
        if placement != self._queued:
            return
        rng = self.world.random
        candidates = [
            replica
            for replica in self.scene.replicas
            if not self.suspect(replica.name, self.world.now) and (not replica.draining or rng.random() < 0.1)
        ]
        preferred = [replica for replica in candidates if replica.name != avoid] or candidates
        if not preferred or rng.random() < 0.1:
            self.world.at(rng.uniform(0.02, 0.3), self._try_to_place, placement, avoid, owner=self)
            return
        self._queued = 0
        replica = rng.choice(preferred)
        self.feed(lease.Placed(reply_id=self.scene.reply_id, replica=replica.name, model_version="1"))

    def _append_open(self, command: lease.AppendOpen) -> None:
        expected = None if self.scene.rules.unconditional_open else command.expected_seq

        def serve() -> tuple[int | None]:
            return (self.scene.log.append(expected, command.entry, self),)

        def answered(answer: tuple[int | None] | None) -> None:
            if answer is None:
                self._answer(lease.OpenUnknown, command.ticket)
            elif answer[0] is None:
                self._answer(lease.OpenRefused, command.ticket)
            else:
                self._answer(lease.OpenAppended, command.ticket, seq=answer[0])

        self.world.call(self, None, serve, answered, self.world.swarm.append_timeout_s)

    def _send_dispatch(self, command: lease.SendDispatch) -> None:
        replica, dispatch = self.scene.replica(command.replica), self.scene.rules.dispatch(self.scene, command.dispatch)

        def answered(answer: Dispatched | DispatchRefused | None) -> None:
            if answer is None:
                self._answer(lease.DispatchUnknown, command.ticket)
            elif isinstance(answer, Dispatched):
                self._answer(lease.DispatchTaken, command.ticket, router=answer.router)
            else:
                self._answer(lease.DispatchDeclined, command.ticket, reason=answer.reason)

        self.world.call(self, replica, partial(replica.dispatched, dispatch), answered, DISPATCH_TIMEOUT_S)

    def _ask_replica(self, command: lease.AskReplica) -> None:
        replica = self.scene.replica(command.replica)

        def answered(answer: Holding | None) -> None:
            if answer is None:
                self._answer(lease.AskUnanswered, command.ticket)
            else:
                held = {"running": answer.running, "attempt": answer.attempt, "router": answer.router}
                self._answer(lease.Answered, command.ticket, **held)

        self.world.call(self, replica, partial(replica.asked, command.ask), answered, ASK_TIMEOUT_S)

    def _append_end(self, command: lease.AppendEnd) -> None:
        def done(stands: bool) -> None:
            self._answer(lease.EndStands if stands else lease.EndFailed, command.ticket)

        end = End(reason=command.reason, by=self.id, detail=command.detail)
        if command.after_seq is None:
            Ender(self.scene, self, end, done).go()
            return

        def serve() -> tuple[int | None]:
            return (self.scene.log.append(command.after_seq, end, self),)

        def answered(answer: tuple[int | None] | None) -> None:
            done(answer is not None and answer[0] is not None)

        self.world.call(self, None, serve, answered, self.world.swarm.append_timeout_s)

    def _announce_end(self, _: lease.AnnounceEnd) -> None:
        self.scene.announce()

    def _archive(self, command: lease.Archive) -> None:
        def make() -> EndedReply:
            return self.scene.ended_reply(command.view)

        def answered(stored: bool | None) -> None:
            self._answer(lease.Archived if stored else lease.ArchiveFailed, command.ticket)

        self.world.call(self, None, partial(self.scene.ended.store, make), answered, READ_TIMEOUT_S)

    def _extend(self, command: lease.Extend) -> None:
        self.scene.extend(command.ack_subject)

    def _ack(self, command: lease.Ack) -> None:
        self.scene.to_lane(command.ack_subject, LaneMessage.ack)

    def _nak(self, command: lease.Nak) -> None:
        self.scene.to_lane(command.ack_subject, LaneMessage.redeliver)


_PERFORM: dict[type, Callable[[Router, Any], None]] = {
    lease.ReadLog: Router._read_log,
    lease.Place: Router._place,
    lease.Unplace: Router._unplace,
    lease.AppendOpen: Router._append_open,
    lease.SendDispatch: Router._send_dispatch,
    lease.AskReplica: Router._ask_replica,
    lease.AppendEnd: Router._append_end,
    lease.AnnounceEnd: Router._announce_end,
    lease.Archive: Router._archive,
    lease.Extend: Router._extend,
    lease.Ack: Router._ack,
    lease.Nak: Router._nak,
}


def presence_loop(world: World, routers: list[Router]) -> None:
    """A client is attached, and says so."""
    for router in routers:
        world.send(router, router.presence)
    world.at(PRESENCE_S, presence_loop, world, routers)
