"""Virtual time, processes that crash and pause, and a network that misbehaves: all drawn from one seeded source.

A seed is an interleaving, and the same seed is the same interleaving again. The world has a bad part, [0, bad_until_s),
and then behaves: what is still wrong after `calm_s` of good weather is a violation too (safety first, then liveness).
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sim.trace import brief

T = TypeVar("T")


class RuleBrokenError(Exception):
    """What must hold does not. `check` names it."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check


@dataclass(frozen=True)
class Weather:
    """What the network does to messages, until `bad_until_s`. Shares are of all messages."""

    bad_until_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.1  # the slow ones take up to this


class Process:
    """Something that can crash, be paused, and come back. What it was told before it crashed is lost."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.up = True
        self.boot = 0
        self.paused_until = 0.0
        self.quiet_since: float | None = None  # nothing is heard of it
        self.disturbed_s = 0.0  # when a fault of its own last began or ended

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

    @property
    def awake(self) -> bool:
        return self.up and self.paused_until <= self.world.now

    def _start(self) -> None:
        self.up, self.paused_until = True, 0.0
        self.world.say("{} starts again", self.name)
        self.quiet_since = None
        self.disturbed_s = self.world.now
        self.started()

    def _go_quiet(self) -> None:
        self.disturbed_s = self.world.now
        if self.quiet_since is None:
            self.quiet_since = self.world.now
            self.went_quiet()

    def _heard_again(self) -> None:
        self.quiet_since = None
        self.disturbed_s = self.world.now

    def crashed(self) -> None:
        """What it held is gone."""

    def started(self) -> None:
        """A new process under the same name."""

    def went_quiet(self) -> None:
        """A crash or a pause began."""


class World:
    """Time and the network. `random` is drawn from by everybody, in the order of events."""

    def __init__(self, rng: random.Random, weather: Weather, *, calm_s: float = 60.0, trace: bool = False) -> None:
        self.random, self.weather = rng, weather
        self.now = 0.0
        self.events = 0
        self._calm_s, self._trace = calm_s, trace
        self._count = 0
        self._heap: list[tuple[float, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []

    # --- time

    def say(self, what: str, *things: Any) -> None:
        """A line of the trace; nothing is formatted when nobody reads it."""
        if self._trace:
            print(f"{self.now:9.4f}  {what.format(*map(brief, things))}")  # noqa: T201

    @property
    def calm(self) -> bool:
        return self.now >= self.weather.bad_until_s

    def at(self, delay_s: float, action: Callable[..., None], *args: Any, owner: Process | None = None) -> None:
        """Do it later. With an owner: only while that process lives, and not while it is paused."""
        self._count += 1
        boot = owner.boot if owner else 0
        heapq.heappush(self._heap, (self.now + delay_s, self._count, owner, boot, action, args))

    def run(self, until: Callable[[], bool], look_every_s: float = 0.0) -> bool:
        """Until `until()` or the end of the calm; says whether it was reached. Looked at after each event, or rarer."""
        return self._run(until, self.weather.bad_until_s + self._calm_s, look_every_s)

    def run_for(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.now + seconds
        self._run(lambda: False, end, seconds)
        self.now = end

    def _run(self, until: Callable[[], bool], end: float, look_every_s: float) -> bool:
        look_s = self.now + look_every_s
        while self._heap and self._heap[0][0] <= end:
            at, _, owner, boot, action, args = heapq.heappop(self._heap)
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
            if at >= look_s:
                look_s = at + look_every_s
                if until():
                    return True
        return until()

    # --- the network

    def chance(self, share: float) -> bool:
        """A fault of this likelihood; none in good weather."""
        return share > 0.0 and not self.calm and self.random.random() < share

    def latency(self) -> float:
        if self.chance(self.weather.slow):
            return self.random.uniform(0.01, self.weather.slow_s)
        return self.random.uniform(0.0002, 0.004)

    def send(self, owner: Process, action: Callable[..., None], *args: Any) -> None:
        """A core message to `owner`: it may be lost, doubled or late."""
        if self.chance(self.weather.loss):
            return
        self.at(self.latency(), action, *args, owner=owner)
        if self.chance(self.weather.duplicate):
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
            if not self.chance(self.weather.loss):
                self.at(self.latency(), answered, result, owner=asker)

        if server is not None and not server.up:
            self.at(self.latency(), answered, None, owner=asker)  # no responders: said at once
        elif not self.chance(self.weather.loss):
            self.at(self.latency(), served, owner=server)
        self.at(timeout_s, answered, None, owner=asker)
