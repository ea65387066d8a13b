"""What a seed's world is made of: how many of everything, which kind of weather, which faults. Swarm testing: each seed
switches some of it off altogether, so that rare combinations are not drowned by frequent ones.
"""

import random
from dataclasses import dataclass
from typing import Any

from sim.world import Weather


@dataclass(frozen=True)
class Swarm:
    """Counts of faults are of the bad part of the world."""

    weather: Weather
    routers: int = 2
    replicas: int = 2
    relays: int = 2
    conversations: int = 2
    replies: int = 4
    length: int = 12  # tokens of a reply at most
    step_s: float = 0.05
    running_max: int = 4
    blocks: int = 64
    append_timeout_s: float = 0.5
    deadline_s: float = 600.0
    turns: int = 1  # messages of one conversation object, one superseding the other
    crashes: int = 0
    pauses: int = 0
    hangs: int = 0
    outages: int = 0  # of the bus: its streams are on disk
    elections: int = 0  # everything held is delivered again
    drains: int = 0
    stops: int = 0
    stale: float = 0.0  # share of reads from a copy that lags
    failures: float = 0.0  # share of writes to the database and to ENDED that fail

    @classmethod
    def draw(cls, rng: random.Random) -> "Swarm":
        def sometimes(share: float, *values: Any) -> Any:
            return rng.choice(values[1:]) if rng.random() < share else values[0]

        weather = Weather(
            bad_until_s=rng.uniform(1.0, 8.0),
            loss=sometimes(0.5, 0.0, 0.02, 0.1, 0.25),
            duplicate=sometimes(0.4, 0.0, 0.1, 0.3),
            slow=sometimes(0.5, 0.0, 0.05, 0.2),
            slow_s=rng.choice((0.1, 0.5, 3.0)),
        )
        return cls(
            weather=weather,
            routers=rng.randint(1, 3),
            replicas=rng.randint(1, 4),
            relays=rng.randint(1, 2),
            conversations=rng.randint(1, 2),
            replies=rng.randint(1, 6),
            length=rng.choice((4, 12, 30)),
            step_s=rng.choice((0.02, 0.05, 0.3)),
            running_max=rng.choice((1, 2, 4)),
            blocks=rng.choice((8, 64)),
            append_timeout_s=rng.choice((0.1, 0.5, 2.0)),
            deadline_s=sometimes(0.1, 600.0, 5.0, 12.0),
            turns=sometimes(0.3, 1, 2, 3),
            crashes=sometimes(0.6, 0, 1, 2, 5),
            pauses=sometimes(0.5, 0, 1, 2, 4),
            hangs=sometimes(0.2, 0, 1),
            outages=sometimes(0.2, 0, 1),
            elections=sometimes(0.4, 0, 1, 3),
            drains=sometimes(0.3, 0, 1, 2),
            stops=sometimes(0.4, 0, 1, 3),
            stale=sometimes(0.2, 0.0, 0.1, 0.4),
            failures=sometimes(0.2, 0.0, 0.1, 0.3),
        )
