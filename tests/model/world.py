"""The faults of one seed, for the world of one reply: see `sim.world` for time, processes and the network."""

import random
from dataclasses import dataclass
from typing import Any

from sim.world import Process, RuleBrokenError, Weather
from sim.world import World as _World

__all__ = ["Process", "RuleBrokenError", "Swarm", "World"]

CALM_S = 60.0


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


class World(_World):
    def __init__(self, seed: int, *, trace: bool = False) -> None:
        rng = random.Random(seed)
        self.swarm = swarm = Swarm.draw(rng)
        weather = Weather(
            bad_until_s=swarm.faults_end_s,
            loss=swarm.loss,
            duplicate=swarm.duplicate,
            slow=swarm.slow,
            slow_s=swarm.slow_s,
        )
        super().__init__(rng, weather, calm_s=CALM_S, trace=trace)
