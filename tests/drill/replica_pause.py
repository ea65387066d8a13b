"""SIGSTOP a replica, let another go on with its replies, SIGCONT: whatever the sleeper still appends is refused.

r1 ════════╎ stopped ..................╎═ wakes, appends, is refused, drops its sequences
r2            ════════ goes on ══════════════════════════
"""

import os
import random
import signal
import time

from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty, total
from tests.drill.report import Report
from tests.integration.system import System

PAUSE_S_P50, PAUSE_S_P99 = 1.5, 3.0  # three heartbeats must be missing: the connection of a sleeper stands


def replica_pause(system: System, *, streams: int = 32, times: int = 50, asleep_s: float = 10.0) -> Report:
    """Every other time the engine sleeps too, as on a machine that stands still; else only the shell does."""
    report, random_ = Report("replica_sigstop"), random.Random(5)
    all_ready(system)
    refused_before = total(system, "replica", "chorus_replica_appends_refused_total")
    pauses: list[float] = []
    with Load(system, streams=streams, tokens=(60, 120), seed=9) as load:
        for time_ in range(times):
            load.until(lambda: load.writing >= 0.8 * streams, "the replies are being written")
            victim = random_.choice(["replica-1", "replica-2"])
            pid = system.pid(victim)
            signalled = os.killpg if time_ % 2 else os.kill
            watched, moment = load.open, time.monotonic()
            signalled(pid, signal.SIGSTOP)
            load.pass_time(asleep_s)
            signalled(pid, signal.SIGCONT)
            load.pass_time(1.0)
            gaps = [gap for story in watched if (gap := story.pause_at(moment)) is not None]
            pauses += [gap for gap in gaps if gap > 0.6]  # the others were written elsewhere
    report.stories(load.stories)
    report.figures["pauses_of_replicas"] = times
    refused = total(system, "replica", "chorus_replica_appends_refused_total") - refused_before
    report.figures["appends_refused"] = refused
    report.must(refused > 0, "no append was refused: nothing was drilled")
    report.pauses(pauses, PAUSE_S_P50, PAUSE_S_P99)
    lanes_empty(system)
    blocks_are_back(system)
    return report
