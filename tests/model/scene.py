"""One reply, from its acceptance to rest: two routers, two replicas, two screens, somebody who stops it."""

import itertools
from collections.abc import Callable

from msgspec import structs

from shared.ids import ENTROPY_BYTES, reply_id
from shared.messages import Accepted, EndedReply, GenerateRequest, RequestEcho, Sampling, pack_ids
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import LogView
from tests.model.actors import Canceller, Replica, Router, presence_loop
from tests.model.bus import Ended, Lane, LaneMessage, Log
from tests.model.checks import Checks
from tests.model.readers import Reader
from tests.model.rules import Rules
from tests.model.world import Process, World


class Scene:
    def __init__(self, world: World, rules: Rules) -> None:
        self.world, self.rules = world, rules
        self.checks = Checks(world)
        self.checks.scene = self
        self.reply_id = reply_id("local", 0, 0, bytes(ENTROPY_BYTES))
        self.log = Log(world, self.checks, captured=rules.captured_subject)
        self.ended = Ended(world, self.checks)
        self.lane = Lane(world, self.checks, self.ended)
        self.request = self._request()
        self._acks: dict[str, LaneMessage] = {}
        self.replicas: list[Replica] = []
        self.replicas = [Replica(self, "r1"), Replica(self, "r2")]
        self.routers = [Router(self, "A"), Router(self, "B")]
        self.lane.routers = self.routers
        self.readers: list[Reader] = []
        self.cancellers = [Canceller(world, "stop 1"), Canceller(world, "stop 2")]
        self._replicas = {replica.name: replica for replica in self.replicas}
        self._routers = {router.name: router for router in self.routers}
        self._begin()

    def _request(self) -> GenerateRequest:
        swarm = self.world.swarm
        accepted = Accepted(
            reply_id=self.reply_id,
            org="o",
            user="u",
            created_s=0.0,
            model="m",
            tier=Tier.FREE,
            budget=swarm.length,
            seed=1,
            input_tokens=3,
            deadline_s=swarm.deadline_s,
            echo=RequestEcho(background=False),
        )
        return GenerateRequest(
            accepted=accepted, accepted_seq=0, prompt=pack_ids([1, 2, 3]), block_hashes=b"", sampling=Sampling()
        )

    # --- what happens

    def _begin(self) -> None:
        world, rng, swarm = self.world, self.world.random, self.world.swarm
        conversation = Process(world, "conversation")
        seq = self.log.append(0, self.request.accepted, conversation)
        assert seq is not None
        self.request = structs.replace(self.request, accepted_seq=seq)
        for number in (1, 2):
            self.readers.append(Reader(self, f"screen {number}", rng.choice((2, 256))))
        self.log.readers = self.readers
        self.lane.publish("message 1")
        if swarm.twin:
            world.at(rng.random(), self.lane.publish, "message 2")
        if swarm.present:
            presence_loop(world, self.routers)
        self._plan_faults()

    def _plan_faults(self) -> None:
        world, rng, swarm = self.world, self.world.random, self.world.swarm
        everyone: list[Process] = [*self.replicas, *self.replicas, *self.routers]

        def plan(count: int, make: Callable[[float], Callable[[], None]]) -> None:
            for _ in range(count):
                at = rng.random() * swarm.faults_end_s
                world.at(at, make(swarm.faults_end_s - at))

        def crash(left: float) -> Callable[[], None]:
            who, down = rng.choice(everyone), min(left, rng.choice((0.05, 0.5, 2.0, 5.0)) * rng.random())
            return lambda: who.crash(down)

        def pause(left: float) -> Callable[[], None]:
            who, away = rng.choice([*everyone, *self.cancellers]), min(left, rng.choice((0.3, 2.0, 5.0)) * rng.random())
            return lambda: who.pause(away)

        def hang(left: float) -> Callable[[], None]:
            who, away = rng.choice(self.replicas), left * rng.random()
            return lambda: who.hang(away)

        def deaf(left: float) -> Callable[[], None]:
            who, whom, away = rng.choice(self.routers), rng.choice(self.replicas), left * rng.random()
            return lambda: who.hears_no_more(whom, away)

        def election(_: float) -> Callable[[], None]:
            return self.lane.election

        def drain(left: float) -> Callable[[], None]:
            drains: list[Callable[[float], None]] = [self.replicas[0].drain, self.replicas[1].drain]
            drains += [self.routers[0].drain, self.routers[1].drain]
            who, away = rng.choice(drains), left * rng.random()
            return lambda: who(away)

        def reader_restart(left: float) -> Callable[[], None]:
            who, away = rng.choice(self.readers), left * rng.random()
            return lambda: who.crash(away)

        if swarm.outage:
            for replica in self.replicas:
                world.at(rng.random(), replica.crash, swarm.faults_end_s - 2.0)
        plan(swarm.crashes, crash)
        plan(swarm.pauses, pause)
        plan(swarm.hangs, hang)
        plan(swarm.deaf, deaf)
        plan(swarm.elections, election)
        plan(swarm.drains, drain)
        plan(swarm.reader_restarts, reader_restart)
        stops = zip(self.cancellers, (EndReason.USER_STOP, EndReason.SUPERSEDED), strict=True)
        for canceller, reason in itertools.islice(stops, swarm.cancels):
            world.at(rng.random() ** 2 * swarm.faults_end_s, canceller.cancel, self, reason, owner=canceller)

    def at_rest(self) -> bool:
        return (
            self.checks.end is not None
            and self.lane.empty
            and not any(replica.sequence for replica in self.replicas)
            and not any(len(router.table) for router in self.routers)
            and all(len(reader.shown) == len(self.log.entries) for reader in self.readers)
        )

    # --- who is who

    def replica(self, name: str) -> Replica:
        return self._replicas[name]

    def router(self, name: str) -> Router:
        return self._routers[name]

    def tell(self, router_id: str, what: str, *args: object) -> None:
        """A core message to the router of that id, if it still is that process."""
        for router in self.routers:
            if router.id == router_id:
                self.world.send(router, getattr(router, what), *args)

    def announce(self) -> None:
        """`end` stands: the control subject makes it fast."""
        for replica in self.replicas:
            self.world.send(replica, replica.cancelled)
        for router in self.routers:
            self.world.send(router, router.cancelled)

    # --- the lane

    def ack_subject(self, message: LaneMessage, number: int) -> str:
        subject = f"{message.name}.{number}"
        self._acks[subject] = message
        return subject

    def extend(self, ack_subject: str) -> None:
        self.to_lane(ack_subject, LaneMessage.extend)

    def to_lane(self, ack_subject: str, act: Callable[[LaneMessage], None]) -> None:
        """Unfenced: whichever delivery the subject is of."""
        if not self.world.chance(self.world.swarm.loss):
            self.world.at(self.world.latency(), act, self._acks[ack_subject])

    def ended_reply(self, view: LogView) -> EndedReply:
        assert view.accepted is not None
        assert view.ended is not None
        return EndedReply(
            accepted=view.accepted,
            reason=view.ended.reason,
            text=view.text,
            ids=pack_ids(view.ids),
            usage=view.usage,
            attempts=view.attempts,
            ended_s=view.ended.ended_s,
        )
