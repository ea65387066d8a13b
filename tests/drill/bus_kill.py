"""SIGKILL the bus server under load; its streams are on disk, so what was accepted is there when it is back."""

import random
import time

from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty
from tests.drill.report import Report, quantile
from tests.integration.system import System, eventually

COMPLETE_SHARE = 0.99
TOLD_S = 5.0


def bus_kill(system: System, *, streams: int = 32, kills: int = 20) -> Report:
    """A refusal while the bus is away is honest: the client tries again. A reply that was accepted is not lost."""
    report, random_ = Report("nats_sigkill"), random.Random(21)
    all_ready(system)
    away: list[float] = []
    with Load(system, streams=streams, tokens=(40, 100), seed=17) as load:
        for _ in range(kills):
            load.until(lambda: load.writing >= 0.7 * streams, "the replies are being written", 60)
            load.pass_time(random_.random() * 2.0)
            began, old = time.monotonic(), system.kill("nats")
            eventually(lambda old=old: system.pid("nats") not in (0, old), "the bus is started again", 30)
            all_ready(system)
            away.append(time.monotonic() - began)
    report.tokens_right(load.stories)
    accepted = [story for story in load.stories if story.reply_id]
    report.must(all(story.final for story in load.stories), "a client was left without an end")
    whole = [story for story in accepted if story.complete]
    share = len(whole) / max(len(accepted), 1)
    report.figures |= {
        "kills": kills,
        "complete_share": round(share, 4),
        "errors": sum(len(story.errors) for story in load.stories),
        "away_s_p50": round(quantile(away, 0.5), 2),
        "pause_s_p50": round(quantile([story.longest_pause() for story in load.stories], 0.5), 2),
        "pause_s_p99": round(quantile([story.longest_pause() for story in load.stories], 0.99), 2),
    }
    report.must(share >= COMPLETE_SHARE, f"only {share:.1%} of the accepted replies ended whole")
    report.must(
        all(error.startswith("503") for story in load.stories for error in story.errors),
        f"other errors than 503: {[e for s in load.stories for e in s.errors if not e.startswith('503')][:3]}",
    )
    lanes_empty(system, 30)
    blocks_are_back(system, 30)
    return report
