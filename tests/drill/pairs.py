"""SIGKILL two processes of different kinds at the same moment, every pair once: no token is lost, and no reply."""

import itertools
import random

from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty
from tests.drill.report import Report, quantile
from tests.integration.system import System, eventually

SERVICES = ("gateway-1", "relay-1", "conversation-1", "router-1", "replica-1", "safety-1", "usage-1")
SERVERS = ("nats", "valkey")


def _killed(system: System, names: tuple[str, ...]) -> None:
    for name in names:
        eventually(lambda name=name: system.pid(name), f"{name} is there", 60)
    old = {name: system.kill(name) for name in names}
    for name, pid in old.items():
        eventually(lambda name=name, pid=pid: system.pid(name) not in (0, pid), f"{name} is started again", 60)
    all_ready(system, 90)


def pairs(system: System, *, streams: int = 24, most: int = 100) -> Report:
    """Clients may hear 503 while the bus or conversation is away; whatever was accepted ends whole."""
    report, random_ = Report("pairs_sigkill"), random.Random(53)
    all_ready(system)
    every = list(itertools.combinations((*SERVICES, *SERVERS), 2))
    random_.shuffle(every)
    with Load(system, streams=streams, tokens=(40, 100), seed=43, pause_s=0.2) as load:
        for names in every[:most]:
            load.until(lambda: load.writing >= 0.6 * streams, "the replies are being written", 60)
            load.pass_time(random_.random())
            _killed(system, names)
    report.stories(load.stories, errors=True)
    errors = [error for story in load.stories for error in story.errors]
    report.must(all(error.startswith("503") for error in errors), f"errors other than 503: {errors[:3]}")
    pauses = [story.longest_pause() for story in load.stories]
    report.figures |= {
        "pairs": len(every[:most]),
        "errors": len(errors),
        "pause_s_p99": round(quantile(pauses, 0.99), 2),
    }
    lanes_empty(system, 30)
    blocks_are_back(system, 30)
    return report
