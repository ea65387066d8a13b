"""The router: wires leases, the waiting room and the view of the fleet to the bus.

    lane consumers ──Delivered──> LeaseTable ──Place──> WaitingRoom ──Match──> open ──> dispatch ──> replica
                                     ^  │ ticketed commands                                             │
                                     │  └──> Hands ──> token log, replicas, ENDED                       │
                                     └── answers, AttemptOver, cancels, presence, verdicts <────────────┘

Every event is handled at once and to the end: the lease's commands, then the placements that became possible. Acts on
the bus run beside it as tasks, at most one per lease, and come back as events.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from services.router.fleet_view import FleetView, NeedBlocks
from services.router.hands import Asked, Hands
from services.router.lease_events import (
    Ack,
    AnnounceEnd,
    Answer,
    AppendOpen,
    AttemptEnded,
    CancelHeard,
    Command,
    Delivered,
    DispatchDeclined,
    DispatchTaken,
    Drain,
    Extend,
    Nak,
    OpenAppended,
    OpenRefused,
    Place,
    Placed,
    PresenceHeard,
    ReplicaRestarted,
    ReplicaSuspect,
    SendDispatch,
    Tick,
    Unplace,
    Unplaceable,
)
from services.router.lease_table import LeaseTable
from services.router.leases import State
from services.router.metrics import RouterMetrics
from services.router.notes import Notes
from services.router.settings import RouterSettings
from services.router.shares import Shares
from services.router.waiting_room import Unfit, WaitingRoom
from shared import clock
from shared.bus import Bus, BusMessage, Delivery, Subscription
from shared.catalog import Catalog
from shared.errors import BusClosedError, BusError, IllegalEventError, NoRespondersError
from shared.limits import (
    ASK_TIMEOUT_S,
    QUEUE_VIEW_S,
    REQUEST_TIMEOUT_S,
    ROUTER_PULL_BATCH,
    ROUTER_PULL_S,
    ROUTER_TICK_S,
)
from shared.log_store import LogStore
from shared.messages import (
    Ask,
    AttemptOver,
    BlocksChanged,
    Cancel,
    GenerateRequest,
    Message,
    ReplicaHealth,
    SafetyWatch,
    decoder,
    encode,
)
from shared.soundness import request_fault
from shared.subjects import Names
from shared.telemetry import Journal, Log, Metrics
from shared.tiers import LANE_ORDER, Tier
from shared.topology import lane_consumers, topology

_request, _over = decoder(GenerateRequest), decoder(AttemptOver)
_health, _blocks = decoder(ReplicaHealth), decoder(BlocksChanged)
_RETRY_S = 0.25  # after the bus refused a pull or a snapshot
_MOVING = frozenset(set(State) - {State.WAITING, State.RUNNING, State.PAUSED, State.GONE})
T = TypeVar("T")


class _Lane(NamedTuple):
    """A lane consumer this router pulls from."""

    stream: str
    consumer: str
    tier: Tier


class RouterService:
    """See `shared.service.Service` for the doors."""

    def __init__(self, settings: RouterSettings, catalog: Catalog, bus: Bus, metrics: Metrics, log: Log) -> None:
        self.router = settings.name
        self._settings, self._bus, self._log = settings, bus, log
        self._names = Names(settings.region)
        self._models = [card.id for card in catalog.models]
        self._fleet = FleetView()
        self._table = LeaseTable(
            self.router, suspect=self._fleet.suspect, now=clock.now_s(), idle_end_s=settings.idle_end_s
        )
        self._room = WaitingRoom(self._fleet)
        self._hands = Hands(bus, LogStore(bus, self._names), self._names, self.router)
        self._lanes = [
            _Lane(spec.stream, spec.name, tier)
            for tier in LANE_ORDER
            for model in self._models
            for spec in lane_consumers(self._names, tier, model)
        ]
        self._shares = Shares([lane.consumer for lane in self._lanes], settings.held_max)
        self._room_made = asyncio.Event()
        self._journal = Journal(bus, self._names, "router", metrics)
        self._notes = Notes(self.router, self._journal, RouterMetrics(metrics), log)
        self._count = self._notes.count
        self._group: asyncio.TaskGroup | None = None
        self._pulls: list[asyncio.Task[None]] = []
        self._subscriptions: dict[str, Subscription] = {}
        self._draining = False
        self._calm = asyncio.Event()  # draining, and nothing is in motion any more
        self._asked_blocks: set[str] = set()  # replicas whose snapshot is on its way

    # --- the doors ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._subscriptions:
            return
        names = self._names
        await self._bus.apply(*topology(names, self._models, shards=self._settings.log_shards))
        self._subscriptions = {
            "over": await self._bus.subscribe(names.attempt_over(self.router)),
            "health": await self._bus.subscribe(names.health("*")),
            "blocks": await self._bus.subscribe(names.blocks("*")),
            "cancel": await self._bus.subscribe(names.cancel("*")),
            "presence": await self._bus.subscribe(names.presence("*")),
        }

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._pulls = [
                    group.create_task(self._pull(lane), name=f"router.{lane.consumer}") for lane in self._lanes
                ]
                for name, loop in self._loops().items():
                    group.create_task(loop, name=f"router.{name}")
        finally:
            self._group = None

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "overs": self._hear_overs(),
            "health": self._hear_health(),
            "blocks": self._hear_blocks(),
            "cancels": self._hear_cancels(),
            "presence": self._hear_presence(),
            "tick": self._tick(),
            "views": self._say_views(),
            "journal": self._journal.run(),
        }

    async def drain(self, deadline_s: float) -> None:
        """Give back what waits and see through what is in motion; what runs is kept alive by its replica, and comes
        to another router when it is over.
        """
        for pull in self._pulls:
            pull.cancel()
        self._draining = True
        self._handle(Drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._calm.wait()

    def ready(self) -> str | None:
        if not self._subscriptions:
            return "not yet subscribed"
        return None if self._bus.connected else "the bus is away"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._group is None:
            work.close()  # we are leaving
        else:
            self._group.create_task(work)

    # --- the lanes ---------------------------------------------------------------------------------------

    async def _pull(self, lane: _Lane) -> None:
        """Keep this consumer's share filled, and no more."""
        puller = self._bus.puller(lane.stream, lane.consumer)
        try:
            while True:
                room = self._shares.room(lane.consumer)
                if room == 0:
                    self._room_made.clear()
                    await self._room_made.wait()
                    continue
                try:
                    deliveries = await puller.pull(min(room, ROUTER_PULL_BATCH), ROUTER_PULL_S)
                except BusClosedError:
                    raise
                except BusError as error:
                    self._log.warning("pull_failed", consumer=lane.consumer, error=str(error))
                    await asyncio.sleep(_RETRY_S)
                    continue
                for delivery in deliveries:
                    self._on_delivery(lane, delivery)
        finally:
            with contextlib.suppress(BusError):
                await puller.close()

    def _on_delivery(self, lane: _Lane, delivery: Delivery) -> None:
        self._count.deliveries.labels(lane.tier, str(delivery.delivered > 1).lower()).inc()
        try:
            request = _request.decode(delivery.data)
            fault = request_fault(request, self._settings.region)
        except msgspec.DecodeError as error:
            request, fault = None, str(error)
        if request is None or fault is not None:
            # No router will ever work on it; whoever accepted the reply ends it at its deadline.
            self._count.undecodable.labels("request").inc()
            self._log.error("request_undecodable", subject=delivery.subject, seq=delivery.seq, error=fault)
            self._spawn(self._ack(delivery.ack_subject))
            return
        self._shares.hold(request.reply_id, lane.consumer)
        age_s = clock.wall_s() - delivery.stored_s
        self._handle(
            Delivered(
                reply_id=request.reply_id,
                request=request,
                ack_subject=delivery.ack_subject,
                delivered=delivery.delivered,
                deadline_left_s=request.accepted.deadline_s - age_s,
            )
        )

    # --- what else comes in ------------------------------------------------------------------------------------

    def _decoded(self, what: str, kind: msgspec.msgpack.Decoder[T], message: BusMessage) -> T | None:
        try:
            return kind.decode(message.data)
        except msgspec.DecodeError as error:
            self._count.undecodable.labels(what).inc()
            self._log.warning("message_undecodable", subject=message.subject, error=str(error))
            return None

    async def _hear_overs(self) -> None:
        async for message in self._subscriptions["over"]:
            over = self._decoded("over", _over, message)
            if over is None:
                continue
            if over.outcome != "adopted":
                self._fleet.release(over.replica, over.reply_id)
            self._notes.attempt_over(over)
            self._handle(AttemptEnded(reply_id=over.reply_id, attempt=over.attempt, outcome=over.outcome))

    async def _hear_health(self) -> None:
        async for message in self._subscriptions["health"]:
            health = self._decoded("health", _health, message)
            if health is None:
                continue
            for news in self._fleet.on_health(health, clock.now_s()):
                if isinstance(news, NeedBlocks):
                    self._need_blocks(news.replica)
                else:
                    self._notes.restarted(news.replica, health.boot_id)
                    self._handle(ReplicaRestarted(replica=news.replica))
            self._room.stir(health.model)
            self._place()

    async def _hear_blocks(self) -> None:
        async for message in self._subscriptions["blocks"]:
            changed = self._decoded("blocks", _blocks, message)
            if changed is not None:
                for need in self._fleet.on_blocks(changed):
                    self._need_blocks(need.replica)

    def _need_blocks(self, replica: str) -> None:
        if replica not in self._asked_blocks:
            self._asked_blocks.add(replica)
            self._spawn(self._ask_blocks(replica))

    async def _ask_blocks(self, replica: str) -> None:
        """A snapshot, asked for as long as the replica speaks."""
        try:
            while not self._fleet.suspect(replica, clock.now_s()):
                try:
                    answer = await self._bus.request(
                        self._names.blocks_snapshot(replica), b"", timeout_s=REQUEST_TIMEOUT_S
                    )
                    self._fleet.on_blocks_snapshot(_blocks.decode(answer.data))
                except BusClosedError:
                    raise
                except (BusError, msgspec.DecodeError) as error:
                    self._log.warning("blocks_unknown", replica=replica, error=str(error))
                    await asyncio.sleep(_RETRY_S)
                else:
                    return
        finally:
            self._asked_blocks.discard(replica)

    async def _hear_cancels(self) -> None:
        async for message in self._subscriptions["cancel"]:
            self._handle_if_held(CancelHeard(reply_id=message.subject.rpartition(".")[2]))

    async def _hear_presence(self) -> None:
        async for message in self._subscriptions["presence"]:
            self._handle_if_held(PresenceHeard(reply_id=message.subject.rpartition(".")[2]))

    def _handle_if_held(self, event: CancelHeard | PresenceHeard) -> None:
        if self._table.get(event.reply_id) is not None:
            self._handle(event)

    async def _tick(self) -> None:
        """Timers of leases, and verdicts on replicas."""
        while True:
            await asyncio.sleep(ROUTER_TICK_S)
            now = clock.now_s()
            if not self._bus.connected:
                self._fleet.deaf(now)
            for replica in self._fleet.late(now):
                self._spawn(self._probe(replica))
            for replica in self._fleet.new_suspects(now):
                self._notes.suspected(replica, self._fleet, now)
                self._handle(ReplicaSuspect(replica=replica))
            if self._table.next_wake <= now:
                self._handle(Tick())

    async def _probe(self, replica: str) -> None:
        """Its heartbeat is late: is anybody there? Only the server's word that nobody listens counts."""
        view = self._fleet.get(replica)
        if view is None:
            return
        ask = Ask(reply_id="", router=self.router, ack_subject="")
        try:
            await self._bus.request(self._names.ask(replica), encode(ask), timeout_s=ASK_TIMEOUT_S)
        except NoRespondersError:
            self._fleet.nobody_there(replica, view.health.boot_id)
        except BusError:
            pass  # its heartbeats will tell

    # --- events and commands -----------------------------------------------------------------------------------

    def _handle(self, event: Any) -> None:
        """One event, to the end: its commands, then whatever can be placed now."""
        self._step(event)
        self._place()

    def _step(self, event: Any) -> None:
        try:
            commands = self._table.on(event, clock.now_s())
        except IllegalEventError as error:
            self._count.illegal.inc()
            self._log.error("illegal_event", error=str(error))
            return
        for command in commands:
            self._perform(command)
        reply_id = getattr(event, "reply_id", None)
        for concerned in {command.reply_id for command in commands} | ({reply_id} if reply_id else set()):
            self._settle_share(concerned)
        if self._draining and not self._table.count(*_MOVING):
            self._calm.set()

    def _settle_share(self, reply_id: str) -> None:
        """What runs, and what has left, makes room for another message of its consumer."""
        lease = self._table.get(reply_id)
        if (lease is None or lease.state is State.RUNNING) and self._shares.free(reply_id):
            self._room_made.set()

    def _perform(self, command: Command) -> None:
        match command:
            case Place():
                self._enter(command)
            case Unplace():
                self._room.leave(command.reply_id)
            case Extend():
                self._spawn(self._extend(command.ack_subject))
            case Ack():
                self._spawn(self._ack(command.ack_subject))
            case Nak():
                self._notes.decided("given_back", command.reply_id, delay_s=command.delay_s)
                self._spawn(self._nak(command.ack_subject, command.delay_s))
            case AnnounceEnd():
                cancel = Cancel(reply_id=command.reply_id, reason=command.reason)
                self._spawn(self._say(self._names.cancel(command.reply_id), cancel))
            case _:
                assert isinstance(command, Asked)
                self._spawn(self._do(command))

    def _enter(self, command: Place) -> None:
        lease = self._table.get(command.reply_id)
        assert lease is not None, "only a held lease asks to be placed"
        self._room.enter(
            lease.request,
            written=len(lease.view.ids),
            resumed=lease.view.opened is not None,
            avoid=command.avoid,
            now=clock.now_s(),
        )

    def _place(self) -> None:
        """Whoever is next and finds room."""
        for result in self._room.matches(clock.now_s()):
            reply_id = result.reply_id
            if isinstance(result, Unfit):
                lease = self._table.get(reply_id)
                self._notes.unfit(result, lease.request.accepted.model if lease else "")
                self._step(Unplaceable(reply_id=reply_id, detail=result.detail))
            else:
                self._notes.matched(result)
                placed = result.placed
                self._step(Placed(reply_id=reply_id, replica=placed.replica, model_version=placed.model_version))

    # --- acts on the bus ---------------------------------------------------------------------------------------

    async def _do(self, command: Asked) -> None:
        lease = self._table.get(command.reply_id)
        try:
            answer = await self._hands.do(command, lease.view if lease is not None else None)
        except BusClosedError:
            raise
        except Exception:  # noqa: BLE001 - a fault over one reply must not end all others; its lease looks again
            self._count.command_failures.labels(type(command).__name__).inc()
            self._log.exception("command_failed", command=type(command).__name__, reply_id=command.reply_id)
            return
        self._keep_claims(command, answer)
        lease = self._table.get(command.reply_id)
        if lease is not None:
            self._notes.acted(command, answer, lease)
            self._handle(answer)
        if isinstance(answer, OpenAppended):
            await self._say(self._names.safety_watch, SafetyWatch(reply_id=command.reply_id))

    def _keep_claims(self, command: Asked, answer: Answer) -> None:
        """The room that a placement took: confirmed by its replica, or given back."""
        match command, answer:
            case AppendOpen(), OpenRefused():
                self._fleet.release(command.entry.replica, command.reply_id)
            case SendDispatch(), DispatchTaken():
                self._fleet.confirm(command.replica, command.reply_id, answer.number)
            case SendDispatch(), DispatchDeclined():
                self._fleet.release(command.replica, command.reply_id)
            case _:
                pass

    async def _say(self, subject: str, message: Message) -> None:
        with contextlib.suppress(BusError):
            await self._bus.publish(subject, encode(message))

    async def _extend(self, ack_subject: str) -> None:
        with contextlib.suppress(BusError):
            await self._bus.extend(ack_subject)

    async def _ack(self, ack_subject: str) -> None:
        """If it is lost the message comes again, and the log says that its reply has ended."""
        try:
            await self._bus.ack(ack_subject)
        except BusError:
            self._count.command_failures.labels("Ack").inc()

    async def _nak(self, ack_subject: str, delay_s: float) -> None:
        with contextlib.suppress(BusError):
            await self._bus.nak(ack_subject, delay_s)

    async def _say_views(self) -> None:
        """While requests wait, who stands where; and the gauges."""
        while True:
            await asyncio.sleep(QUEUE_VIEW_S)
            now = clock.now_s()
            for view in self._room.views(self.router, now):
                await self._say(self._names.queue(view.tier, view.model), view)
            for replica in self._fleet.forget(now):
                self._log.warning("replica_forgotten", replica=replica)
            self._notes.look(
                self._room, self._table, {model: len(self._fleet.alive(model, now)) for model in self._models}
            )
