"""Cut a service off from the bus while all others go on, then let it back: replies end right, and only pauses are seen.

replica-1   ════════╎ nobody hears it, it hears nobody ╎ back: its late appends are refused, it takes new work
replica-2      ════════════ goes on with replica-1's replies ═══════════════════════════════════════════
"""

from tests.drill.cuttable_bus import Cut
from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty, total
from tests.drill.plant import CuttablePlant
from tests.drill.report import Report, quantile

NAMES = ("replica-1", "router-1", "relay-1", "gateway-1", "conversation-1", "safety-1", "usage-1")
PAUSE_S_MAX = {"replica": 3.0, "router": 6.0}  # a lease that nobody extends comes back after ACK_WAIT_S


def cut_off(
    plant: CuttablePlant,
    *,
    streams: int = 32,
    names: tuple[str, ...] = NAMES,
    kinds: tuple[Cut, ...] = tuple(Cut),
    times: int = 3,
    away_s: float = 10.0,
) -> Report:
    """Longer than a lease, so that what was cut off is replaced and comes back to find it so."""
    report = Report("cut_off")
    system = plant.system
    all_ready(system)
    refused_before = total(system, "replica", "chorus_replica_appends_refused_total")
    pauses: dict[str, list[float]] = {}
    with Load(system, streams=streams, tokens=(40, 100), seed=43) as load:
        for name in names * times:
            for kind in kinds:
                load.until(lambda: load.writing >= 0.7 * streams, "the replies are being written", 60)
                watched = load.open
                with plant.cut_off(name, kind) as connections:
                    report.must(connections, f"{name} had no connection to cut")
                    load.pass_time(away_s)
                all_ready(system)
                load.pass_time(1.0)
                pauses.setdefault(f"{name} {kind}", []).extend(story.longest_pause() for story in watched)
    report.stories(load.stories, errors=True)
    errors = [error for story in load.stories for error in story.errors]
    others = [error for error in errors if not error.startswith("503")]
    report.must(not others, f"errors other than 503: {others[:3]}")
    report.figures["errors"] = len(errors)
    report.figures["cuts"] = len(names) * len(kinds) * times
    report.figures["appends_refused"] = (
        total(system, "replica", "chorus_replica_appends_refused_total") - refused_before
    )
    report.figures["pause_s_max"] = {each: round(max(seen, default=0.0), 2) for each, seen in pauses.items()}
    report.figures["pause_s_p50"] = {each: round(quantile(seen, 0.5), 2) for each, seen in pauses.items()}
    lanes_empty(system, 20)
    blocks_are_back(system, 20)
    return report
