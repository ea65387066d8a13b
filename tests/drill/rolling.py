"""SIGTERM to every service, one after the other, under load: clients see pauses and reconnects, and nothing else."""

import signal
import time

from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty, total
from tests.drill.report import Report, quantile
from tests.integration.system import System

ORDER = ("usage", "safety", "conversation", "router", "relay", "replica", "gateway")
_UP_AGAIN_S = 60.0


def rolling_restart(system: System, *, streams: int = 64, kinds: tuple[str, ...] = ORDER) -> Report:
    report = Report("rolling_restart")
    all_ready(system)
    names = [
        service["name"] for kind in kinds for service in system.ready["services"] if service["name"].startswith(kind)
    ]
    took: dict[str, float] = {}
    with Load(system, streams=streams, tokens=(40, 120), seed=3) as load:
        load.until(lambda: load.writing >= 0.8 * streams, "the replies are being written")
        for name in names:
            began = time.monotonic()
            pid = system.kill(name, signal.SIGTERM)
            system.restarted(name, pid, _UP_AGAIN_S)
            took[name] = round(time.monotonic() - began, 1)
            load.pass_time(0.5)
    report.stories(load.stories)
    report.must(not any(story.reason == "cancelled" for story in load.stories), "replies ended as cancelled")
    report.figures["restarted"] = len(names)
    report.figures["restart_s"] = took
    report.figures["pause_s_p99"] = round(quantile([story.longest_pause() for story in load.stories], 0.99), 3)
    report.figures["failovers"] = total(system, "router", "chorus_router_failovers_total")
    lanes_empty(system)
    blocks_are_back(system)
    return report
