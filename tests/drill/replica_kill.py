"""SIGKILL a replica while it writes: another goes on from the next token, and the client sees a pause and nothing else.

replicas   r1 ════════════╳                r1 (started again) ═══
           r2 ═══════════════╪══ goes on with r1's replies ══════
                          └─ pause ─┘
"""

import random
import time

from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty, opens, read_logs, total
from tests.drill.report import Report
from tests.integration.system import System

PAUSE_S_P50, PAUSE_S_P99 = 1.0, 2.5


def _shared(system: System, streams: int) -> bool:
    running = [system.metrics(name)["chorus_replica_running"] for name in ("replica-1", "replica-2")]
    return min(running) >= 0.3 * streams


def replica_kill(system: System, *, streams: int = 128, kills: int = 20, replies_min: int = 1000) -> Report:
    report, random_ = Report("replica_sigkill"), random.Random(4)
    all_ready(system)
    moments: list[tuple[str, float]] = []
    with Load(system, streams=streams, tokens=(40, 90), seed=7) as load:
        while len(moments) < kills or len(load.stories) < replies_min:
            load.until(lambda: load.writing >= 0.9 * streams, "the replies are being written")
            load.until(lambda: _shared(system, streams), "both replicas have their share of the replies", 60)
            victim = random_.choice(["replica-1", "replica-2"])
            load.pass_time(random_.random())
            moments.append((victim, time.monotonic()))
            pid = system.kill(victim)
            system.restarted(victim, pid)
    report.stories(load.stories)
    logs = read_logs(system.data, [story.reply_id for story in load.stories])
    pauses = []
    for story in load.stories:
        for before, after in zip(opens(logs[story.reply_id]), opens(logs[story.reply_id])[1:], strict=False):
            gaps = [story.pause_at(moment) for victim, moment in moments if victim == before.replica]
            pauses += [gap for gap in [max((gap for gap in gaps if gap is not None), default=None)] if gap is not None]
            report.must(after.first_index >= before.first_index, f"{story.reply_id} went back")
    report.figures["kills"] = len(moments)
    report.figures["failovers"] = sum(max(0, len(opens(log)) - 1) for log in logs.values())
    report.figures["appends_refused"] = total(system, "replica", "chorus_replica_appends_refused_total")
    report.must(report.figures["failovers"] > 0, "no reply was moved: nothing was drilled")
    report.pauses(pauses, PAUSE_S_P50, PAUSE_S_P99)
    lanes_empty(system)
    blocks_are_back(system)
    return report
