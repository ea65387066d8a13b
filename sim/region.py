"""A region in the world: its bus, its processes, what happens to them, and how they reach each other."""

import random
from collections.abc import Callable
from typing import Any

from shared.messages import Presence, decoder
from shared.outcomes import EndReason
from shared.subjects import Names
from sim.actors.client import Client, Message
from sim.actors.conversation import Conversation, Database
from sim.actors.relay import Relay
from sim.actors.replica import Replica
from sim.actors.router import Router
from sim.bus import Bus, Queued
from sim.checks import Checks
from sim.rules import REAL, Rules
from sim.swarm import Swarm
from sim.world import Process, World

_presence = decoder(Presence)


class Region:
    """Everything of one seed. Faults and load are planned by `plan`; scenarios do without and act themselves."""

    def __init__(self, seed: int, swarm: Swarm | None = None, *, rules: Rules = REAL, trace: bool = False) -> None:
        rng = random.Random(seed)  # noqa: S311 - the whole point: the same again
        self.swarm = Swarm.draw(rng) if swarm is None else swarm
        self.world = World(rng, self.swarm.weather, calm_s=120.0, trace=trace)
        self.rules, self.names = rules, Names("local")
        self.checks = Checks(self.world)
        self.checks.region = self
        self.routers: list[Router] = []
        self.replicas: list[Replica] = []
        self.relays: list[Relay] = []
        self.conversations: list[Conversation] = []
        self.clients: list[Client] = []
        self._acks: dict[str, Queued] = {}
        self.bus = Bus(self)
        self.database = Database(self)
        self.replicas = [Replica(self, f"r{n}") for n in range(1, self.swarm.replicas + 1)]
        self.routers = [Router(self, f"router-{n}") for n in range(1, self.swarm.routers + 1)]
        self.relays = [Relay(self, f"relay-{n}") for n in range(1, self.swarm.relays + 1)]
        self.conversations = [Conversation(self, f"conversation-{n}") for n in range(1, self.swarm.conversations + 1)]
        self._named: dict[str, Any] = {each.name: each for each in (*self.replicas, *self.routers)}

    # --- load and faults

    def say(self, *, tokens: int, after_s: float = 0.0, conversation: str = "") -> Client:
        """A user sends a message, `after_s` from now."""
        number = len(self.clients) + 1
        seed = self.world.random.getrandbits(31)
        message = Message(key=f"key {number}", seed=seed, budget=tokens, conversation=conversation)
        client = Client(self, f"user {number}", message)
        self.clients.append(client)
        self.world.at(after_s, client.send)
        return client

    def plan(self) -> None:
        """The load and the faults of this seed."""
        rng, swarm = self.world.random, self.swarm
        bad_s = swarm.weather.bad_until_s
        for _ in range(swarm.replies):
            self.say(tokens=rng.randint(1, swarm.length), after_s=rng.random() * bad_s)
        if swarm.turns > 1:
            for _ in range(swarm.turns):
                self.say(tokens=rng.randint(1, swarm.length), after_s=rng.random() * bad_s, conversation="talk")
        services: list[Any] = [*self.replicas, *self.replicas, *self.routers, *self.relays, *self.conversations]
        self._some(swarm.crashes, lambda left: (rng.choice(services).crash, min(left, _away(rng))))
        self._some(swarm.pauses, lambda left: (rng.choice(services).pause, min(left, _away(rng))))
        self._some(swarm.hangs, lambda left: (rng.choice(self.replicas).hang, left * rng.random()))
        self._some(swarm.outages, lambda left: (self.bus.crash, min(left, 3.0 * rng.random())))
        self._some(swarm.elections, lambda _: (self.bus.lane.election,))
        drains: list[Any] = [*self.replicas, *self.routers]
        self._some(swarm.drains, lambda left: (rng.choice(drains).drain, left * rng.random()))
        self._some(swarm.stops, lambda _: (rng.choice(self.clients).stop,))

    def _some(self, count: int, what: Callable[[float], tuple[Any, ...]]) -> None:
        """So many of a kind of fault, each at its time in the bad part; `what` gets the seconds left of it."""
        bad_s = self.world.weather.bad_until_s
        for _ in range(count):
            at = self.world.random.random() * bad_s
            self.world.at(at, *what(bad_s - at))

    # --- running

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        self.world.run_for(seconds)

    def run_to_rest(self) -> None:
        """Safety all the way, then liveness: in good weather everything comes to its end."""
        if not self.world.run(self.resting, look_every_s=0.25):
            self.checks.at_rest()
        self.checks.at_rest()

    def resting(self) -> bool:
        return (
            bool(self.clients)
            and all(client.over for client in self.clients)
            and not self.bus.lane.messages
            and not self.bus.ended.messages
            and all(row.ended is not None for row in self.database.rows.values())
            and all(facts.end is not None for facts in self.checks.facts.values())
            and all(replica.quiet for replica in self.replicas)
            and not any(len(router.table) for router in self.routers)
        )

    # --- who is who

    def replica(self, name: str) -> Replica:
        found = self._named[name]
        assert isinstance(found, Replica)
        return found

    def router(self, name: str) -> Router:
        found = self._named[name]
        assert isinstance(found, Router)
        return found

    def undisturbed(self, process: Process, for_s: float) -> bool:
        """Nothing has befallen it, the bus or the network around it for so long."""
        weather = self.world.weather
        fair = weather.loss == 0.0 and weather.slow == 0.0
        since = max(process.disturbed_s, self.bus.disturbed_s, 0.0 if fair else weather.bad_until_s)
        return process.awake and self.bus.up and self.world.now - since > for_s

    # --- messages

    def publish(self, to: Any, action: Callable[..., None], *args: Any) -> None:
        """A core message, through the bus: while it is away, nothing arrives."""
        if self.bus.up:
            self.world.send(to, action, *args)

    def post(self, subject: str, data: bytes) -> None:
        """By subject, as relays speak."""
        kind, _, rest = subject.partition(".")
        if kind in ("answer", "frames"):
            name, _, stream = rest.rpartition(".")
            client = next(each for each in self.clients if each.name == name)
            self.publish(client, client.answered if kind == "answer" else client.framed, int(stream), data)
        elif subject.startswith(self.names.presence("x")[:-1]):
            reply_id = _presence.decode(data).reply_id
            hearers: list[Router | Replica] = [*self.routers, *self.replicas]
            for each in hearers:
                self.publish(each, each.present, reply_id)

    def announce(self, reply_id: str, reason: EndReason) -> None:
        """`end` stands: the control subject makes it fast."""
        for replica in self.replicas:
            self.publish(replica, replica.cancelled, reply_id, reason)
        for router in self.routers:
            self.publish(router, router.cancelled, reply_id)

    def ack_subject(self, message: Queued, number: int) -> str:
        subject = f"{message.queue.name}.{message.name}.{number}"
        self._acks[subject] = message
        return subject

    def extend(self, ack_subject: str) -> None:
        self.to_queue(ack_subject, Queued.extend)

    def to_queue(self, ack_subject: str, act: Callable[[Queued], None], delay_s: float = 0.0) -> None:
        """Unfenced: whichever delivery the subject is of."""
        if self.bus.up and not self.world.chance(self.swarm.weather.loss):
            self.world.at(self.world.latency() + delay_s, act, self._acks[ack_subject])


def _away(rng: random.Random) -> float:
    return rng.choice((0.05, 0.5, 2.0, 5.0)) * rng.random()
