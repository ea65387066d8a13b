"""A router: the real leases, fleet view and waiting room; this performs what they command, over a bad network."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from services.router import lease_events as lease
from services.router.fleet_view import FleetView, NeedBlocks
from services.router.waiting_room import Unfit, WaitingRoom
from shared.limits import ASK_TIMEOUT_S, DISPATCH_TIMEOUT_S, ROUTER_TICK_S
from shared.messages import (
    AttemptOver,
    Dispatched,
    DispatchRefused,
    End,
    Holding,
    ReplicaHealth,
    SequencedEntry,
)
from shared.token_log import LogView, ended_reply
from sim.actors.ender import READ_TIMEOUT_S, Ender
from sim.bus import Queued
from sim.world import Process

if TYPE_CHECKING:
    from sim.actors.replica import Replica
    from sim.region import Region


class Router(Process):
    def __init__(self, region: "Region", name: str) -> None:
        super().__init__(region.world, name)
        self.region = region
        self.started()

    @property
    def id(self) -> str:
        return f"{self.name}-{self.boot}"

    @property
    def pulls(self) -> bool:
        return self.up and not self.draining

    def started(self) -> None:
        self.draining = False
        self.fleet = FleetView()
        self.room = WaitingRoom(self.fleet)
        self.table = self.region.rules.table(self.id, suspect=self.fleet.suspect, now=self.world.now)
        self.clear_since = self.world.now  # when it last heard nothing amiss begin
        self.world.at(ROUTER_TICK_S, self._tick, owner=self)

    def went_quiet(self) -> None:
        self.clear_since = self.world.now

    def drain(self, away_s: float) -> None:
        """Gives back what waits, sees the rest through for a while, leaves, and comes back as a new process."""
        if self.up and not self.draining:
            self.world.say("{} drains", self.name)
            self.draining = True
            self.feed(lease.Drain())
            self.world.at(1.0, self.crash, away_s, owner=self)

    # --- what comes in

    def delivered(self, message: Queued, number: int) -> None:
        if self.draining:
            return
        request = message.payload
        self.feed(
            lease.Delivered(
                reply_id=request.reply_id,
                request=request,
                ack_subject=self.region.ack_subject(message, number),
                delivered=number,
                deadline_left_s=request.accepted.deadline_s - (self.world.now - request.accepted.created_s),
            )
        )

    def heard_over(self, over: AttemptOver) -> None:
        if over.outcome != "adopted":
            self.fleet.release(over.replica, over.reply_id)
        self.feed(lease.AttemptEnded(reply_id=over.reply_id, attempt=over.attempt, outcome=over.outcome))

    def heard_health(self, health: ReplicaHealth) -> None:
        for news in self.fleet.on_health(health, self.world.now):
            if not isinstance(news, NeedBlocks):
                self.feed(lease.ReplicaRestarted(replica=news.replica))
        self.room.stir(health.model)
        self._place_all()

    def cancelled(self, reply_id: str) -> None:
        if self.table.get(reply_id) is not None:
            self.feed(lease.CancelHeard(reply_id=reply_id))

    def present(self, reply_id: str) -> None:
        if self.table.get(reply_id) is not None:
            self.feed(lease.PresenceHeard(reply_id=reply_id))

    def _tick(self) -> None:
        now = self.world.now
        if not self.region.bus.up:
            self.fleet.deaf(now)
            self.clear_since = now
        for name in self.fleet.late(now):
            self._probe(name)
        for name in self.fleet.new_suspects(now):
            self.feed(lease.ReplicaSuspect(replica=name))
        if self.table.next_wake <= now:
            self.feed(lease.Tick())
        self.world.at(ROUTER_TICK_S, self._tick, owner=self)

    def _probe(self, name: str) -> None:
        """Only the server's word that nobody listens counts."""
        view, replica = self.fleet.get(name), self.region.replica(name)
        if view is None or not self.region.bus.up:
            return
        boot_id = view.health.boot_id
        if not replica.up:
            self.world.at(self.world.latency(), self.fleet.nobody_there, name, boot_id, owner=self)

    # --- events and commands

    def feed(self, event: Any) -> None:
        self._step(event)
        self._place_all()

    def _step(self, event: Any) -> None:
        self.world.say("  {} <- {}", self.id, event)
        for command in self.table.on(event, self.world.now):
            self.world.say("  {} -> {}", self.id, command)
            self.region.checks.commanded(self, command)
            self._PERFORM[type(command)](self, command)

    def _place_all(self) -> None:
        for result in self.room.matches(self.world.now):
            if isinstance(result, Unfit):
                self._step(lease.Unplaceable(reply_id=result.reply_id, detail=result.detail))
            else:
                placed = result.placed
                version = placed.model_version
                self._step(lease.Placed(reply_id=result.reply_id, replica=placed.replica, model_version=version))

    def _answer(self, event: type[lease.Answer], command: Any, **fields: Any) -> None:
        self.feed(event(reply_id=command.reply_id, ticket=command.ticket, **fields))

    def _read_log(self, command: lease.ReadLog) -> None:
        def serve() -> list[SequencedEntry]:
            return self.region.bus.read(command.reply_id)

        def answered(items: list[SequencedEntry] | None) -> None:
            if items is None:
                self._answer(lease.ReadFailed, command)
            else:
                self._answer(lease.LogRead, command, view=LogView().apply_all(items))

        self.world.call(self, self.region.bus, serve, answered, READ_TIMEOUT_S)

    def _place(self, command: lease.Place) -> None:
        held = self.table.get(command.reply_id)
        assert held is not None, "only a held lease asks to be placed"
        self.room.enter(
            held.request,
            written=len(held.view.ids),
            resumed=held.view.opened is not None,
            avoid=command.avoid,
            now=self.world.now,
        )

    def _unplace(self, command: lease.Unplace) -> None:
        self.room.leave(command.reply_id)

    def _append_open(self, command: lease.AppendOpen) -> None:
        def serve() -> tuple[int | None]:
            return (self.region.bus.append(command.reply_id, command.expected_seq, command.entry, self),)

        def answered(answer: tuple[int | None] | None) -> None:
            if answer is None:
                self._answer(lease.OpenUnknown, command)
            elif answer[0] is None:
                self.fleet.release(command.entry.replica, command.reply_id)
                self._answer(lease.OpenRefused, command)
            else:
                self._answer(lease.OpenAppended, command, seq=answer[0])

        self.world.call(self, self.region.bus, serve, answered, self.region.swarm.append_timeout_s)

    def _send_dispatch(self, command: lease.SendDispatch) -> None:
        replica = self.region.replica(command.replica)

        def answered(answer: Dispatched | DispatchRefused | None) -> None:
            if answer is None:
                self._answer(lease.DispatchUnknown, command)
            elif isinstance(answer, Dispatched):
                self.fleet.confirm(command.replica, command.reply_id, answer.number)
                self._answer(lease.DispatchTaken, command, router=answer.router, number=answer.number)
            else:
                self.fleet.release(command.replica, command.reply_id)
                self._answer(lease.DispatchDeclined, command, reason=answer.reason, detail=answer.detail)

        self._call(replica, partial(replica.dispatched, command.dispatch), answered, DISPATCH_TIMEOUT_S)

    def _ask_replica(self, command: lease.AskReplica) -> None:
        replica = self.region.replica(command.replica)

        def answered(answer: Holding | None) -> None:
            if answer is None:
                self._answer(lease.AskUnanswered, command)
            else:
                held = {"running": answer.running, "attempt": answer.attempt, "router": answer.router}
                self._answer(lease.Answered, command, **held)

        self._call(replica, partial(replica.asked, command.ask), answered, ASK_TIMEOUT_S)

    def _call(
        self, replica: "Replica", serve: Callable[[], Any], answered: Callable[[Any], None], timeout_s: float
    ) -> None:
        """Through the bus, when it is there."""
        server: Process = replica if self.region.bus.up else self.region.bus
        self.world.call(self, server, serve, answered, timeout_s)

    def _append_end(self, command: lease.AppendEnd) -> None:
        end = End(reason=command.reason, by=self.id, detail=command.detail)

        def stands(it_does: bool) -> None:
            self._answer(lease.EndStands if it_does else lease.EndFailed, command)

        def done(view: LogView | None) -> None:
            stands(view is not None)

        def serve() -> tuple[int | None]:
            return (self.region.bus.append(command.reply_id, command.after_seq, end, self),)

        def answered(answer: tuple[int | None] | None) -> None:
            stands(answer is not None and answer[0] is not None)

        if command.after_seq is None:
            Ender(self.region, self, command.reply_id, end, done).go()
        else:
            self.world.call(self, self.region.bus, serve, answered, self.region.swarm.append_timeout_s)

    def _announce_end(self, command: lease.AnnounceEnd) -> None:
        self.region.announce(command.reply_id, command.reason)

    def _archive(self, command: lease.Archive) -> None:
        def answered(stored: bool | None) -> None:
            self._answer(lease.Archived if stored else lease.ArchiveFailed, command)

        serve = partial(self.region.bus.store_ended, ended_reply(command.view))
        self.world.call(self, self.region.bus, serve, answered, READ_TIMEOUT_S)

    def _extend(self, command: lease.Extend) -> None:
        self.region.extend(command.ack_subject)

    def _ack(self, command: lease.Ack) -> None:
        self.region.to_queue(command.ack_subject, Queued.ack)

    def _nak(self, command: lease.Nak) -> None:
        self.region.to_queue(command.ack_subject, Queued.redeliver, command.delay_s)

    _PERFORM: ClassVar[Mapping[type, Callable[..., None]]] = {
        lease.ReadLog: _read_log,
        lease.Place: _place,
        lease.Unplace: _unplace,
        lease.AppendOpen: _append_open,
        lease.SendDispatch: _send_dispatch,
        lease.AskReplica: _ask_replica,
        lease.AppendEnd: _append_end,
        lease.AnnounceEnd: _announce_end,
        lease.Archive: _archive,
        lease.Extend: _extend,
        lease.Ack: _ack,
        lease.Nak: _nak,
    }
