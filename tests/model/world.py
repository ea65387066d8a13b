"""One small world: virtual time, a network that misbehaves, and the faults of one seed.

Every delay, loss and fault is drawn from one `random.Random(seed)`, so a seed is an interleaving, and the same seed is
the same interleaving again. The world has a bad part, [0, faults_end_s), and then behaves: what is still wrong after
CALM_S of good weather is a violation too.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.model.trace import brief

CALM_S = 60.0
T = TypeVar("T")


class RuleBrokenError(Exception):
    """A rule of the token log or of the leases does not hold. `check` names it."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check


@dataclass(frozen=True)
class Swarm:
    """What kind of weather a seed has: each seed switches some faults on and leaves others off."""

    faults_end_s: float
    loss: float
    duplicate: float
    slow: float  # share of messages that take up to slow_s
    slow_s: float
    stale: float  # share of reads that come from a copy that lags
    append_timeout_s: float
    step_s: float
    prefill_s: float
    length: int  # tokens of the reply
    deadline_s: float
    present: bool  # a client says that it is attached
    twin: bool  # the lane message was published twice
    refusals: float  # share of dispatches refused as full
    failures: float  # share of archive writes and engine steps that fail
    crashes: int
    pauses: int
    hangs: int
    deaf: int  # a router hears no heartbeats of a replica for a while
    elections: int
    drains: int
    cancels: int
    reader_restarts: int
    remembers: bool  # replicas do not begin an attempt again that was over there
    outage: bool  # no replica for longer than a client may stay away

    @classmethod
    def draw(cls, rng: random.Random) -> "Swarm":
        def sometimes(share: float, *values: Any) -> Any:
            return rng.choice(values[1:]) if rng.random() < share else values[0]

        outage = rng.random() < 0.02
        return cls(
            faults_end_s=rng.uniform(38.0, 42.0) if outage else rng.uniform(1.0, 9.0),
            loss=sometimes(0.6, 0.0, 0.02, 0.1, 0.3),
            duplicate=sometimes(0.4, 0.0, 0.1, 0.3),
            slow=sometimes(0.6, 0.0, 0.05, 0.2),
            slow_s=rng.choice((0.1, 0.5, 3.0)),
            stale=sometimes(0.25, 0.0, 0.1, 0.5),
            append_timeout_s=rng.choice((0.1, 0.5, 2.0)),
            step_s=rng.choice((0.01, 0.05, 0.3)),
            prefill_s=rng.choice((0.02, 0.3, 1.5)),
            length=rng.randint(1, 14),
            deadline_s=sometimes(0.1, 600.0, 2.0, 5.0, 9.0),
            present=not sometimes(0.5 if outage else 0.03, False, True),
            twin=rng.random() < 0.05,
            refusals=sometimes(0.3, 0.0, 0.2, 0.7),
            failures=sometimes(0.3, 0.0, 0.1, 0.4),
            crashes=sometimes(0.6, 0, 1, 2, 4),
            pauses=sometimes(0.6, 0, 1, 2, 3),
            hangs=sometimes(0.2, 0, 1),
            deaf=sometimes(0.3, 0, 1, 2),
            elections=sometimes(0.5, 0, 1, 3),
            drains=sometimes(0.3, 0, 1, 2),
            cancels=sometimes(0.4, 0, 1, 2),
            reader_restarts=sometimes(0.3, 0, 1, 2),
            remembers=rng.random() < 0.5,
            outage=outage,
        )


class Process:
    """Something that can crash (and lose what it knows) or pause (and go on late, as if nothing had been)."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.boot = 1
        self.up = True
        self.paused_until = 0.0
        self.quiet_since: float | None = None  # since when nothing is heard of it

    def crash(self, down_s: float) -> None:
        if self.up:
            self.up, self.boot = False, self.boot + 1
            self.world.say("{} crashes for {} s", self.name, down_s)
            self.crashed()
            self._go_quiet()
            self.world.at(down_s, self._start)

    def pause(self, pause_s: float) -> None:
        if self.up and self.paused_until <= self.world.now:
            self.world.say("{} pauses for {} s", self.name, pause_s)
            self.paused_until = self.world.now + pause_s
            self._go_quiet()
            self.world.at(pause_s, self._heard_again, owner=self)

    def _start(self) -> None:
        self.up, self.paused_until = True, 0.0
        self.world.say("{} starts again", self.name)
        self.quiet_since = None
        self.started()

    def _go_quiet(self) -> None:
        if self.quiet_since is None:
            self.quiet_since = self.world.now
            self.went_quiet()

    def _heard_again(self) -> None:
        self.quiet_since = None

    def crashed(self) -> None:
        """What it held is gone."""

    def started(self) -> None:
        """A new process under the same name."""

    def went_quiet(self) -> None:
        """A crash or a pause began."""


class World:
    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.swarm = Swarm.draw(self.random)
        self.now = 0.0
        self.events = 0
        self._trace = trace
        self._count = 0
        self._heap: list[tuple[float, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []

    # --- time

    def say(self, what: str, *things: Any) -> None:
        """A line of the trace; nothing is formatted when nobody reads it."""
        if self._trace:
            print(f"{self.now:9.4f}  {what.format(*map(brief, things))}")  # noqa: T201

    @property
    def calm(self) -> bool:
        return self.now >= self.swarm.faults_end_s

    def at(self, delay_s: float, action: Callable[..., None], *args: Any, owner: Process | None = None) -> None:
        """Do it later. With an owner: only while that process lives, and not while it is paused."""
        self._count += 1
        boot = owner.boot if owner else 0
        heapq.heappush(self._heap, (self.now + delay_s, self._count, owner, boot, action, args))

    def run(self, until: Callable[[], bool]) -> bool:
        """Until `until()` or the end of the calm; says whether it was reached."""
        end = self.swarm.faults_end_s + CALM_S
        while self._heap:
            at, _, owner, boot, action, args = heapq.heappop(self._heap)
            if at > end:
                break
            self.now = at
            if owner is not None:
                if owner.boot != boot or not owner.up:
                    continue
                if owner.paused_until > at:
                    self._count += 1
                    heapq.heappush(self._heap, (owner.paused_until, self._count, owner, boot, action, args))
                    continue
            self.events += 1
            action(*args)
            if until():
                return True
        return until()

    # --- the network

    def chance(self, share: float) -> bool:
        """A fault of this likelihood; none in good weather."""
        return share > 0.0 and not self.calm and self.random.random() < share

    def latency(self) -> float:
        if self.chance(self.swarm.slow):
            return self.random.uniform(0.01, self.swarm.slow_s)
        return self.random.uniform(0.0002, 0.004)

    def send(self, owner: Process, action: Callable[..., None], *args: Any) -> None:
        """A core message to `owner`: it may be lost, doubled or late."""
        if self.chance(self.swarm.loss):
            return
        self.at(self.latency(), action, *args, owner=owner)
        if self.chance(self.swarm.duplicate):
            self.at(self.latency(), action, *args, owner=owner)

    def call(
        self,
        asker: Process,
        server: Process | None,
        serve: Callable[[], T],
        answer: Callable[[T | None], None],
        timeout_s: float,
    ) -> None:
        """Request and reply. `answer` gets None when nothing came in time; what was asked may happen even later."""
        waiting, boot = [True], asker.boot  # an answer finds the process that asked, not one of the same name

        def answered(result: T | None) -> None:
            if waiting[0] and asker.boot == boot:
                waiting[0] = False
                answer(result)

        def served() -> None:
            result = serve()
            if not self.chance(self.swarm.loss):
                self.at(self.latency(), answered, result, owner=asker)

        if server is not None and not server.up:
            self.at(self.latency(), answered, None, owner=asker)  # no responders: said at once
        elif not self.chance(self.swarm.loss):
            self.at(self.latency(), served, owner=server)
        self.at(timeout_s, answered, None, owner=asker)
