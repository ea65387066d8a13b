"""python -m sim --seeds 10000                takeover worlds of the real code, then each planted bug
python -m sim --seed 7                       one world, event by event
python -m sim --seed 7 --plant "a hole skipped"
python -m sim --scenario replica_dies        an incident, as it reads
"""

# ruff: noqa: T201  a command prints

import argparse
import json
import os
import sys
from pathlib import Path

from sim.rules import PLANTED
from sim.run import Outcome, Summary, first_to_catch, run_many, run_seed
from sim.scenarios import SCENARIOS

CATCH_MAX = 200  # seeds within which a planted bug must be noticed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10_000, help="how many worlds (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="only this one, event by event")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="with --seed: with this bug planted")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="only this incident, event by event")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    if args.scenario is not None:
        SCENARIOS[args.scenario](trace=True)
        print("as it should be")
        return 0
    if args.seed is not None:
        outcome = run_seed(args.seed, args.plant, trace=True)
        print(outcome.detail or "every check held")
        return 0 if outcome.check is None else 1
    summary = run_many(args.first, args.seeds, args.jobs)
    _print_summary(summary)
    caught = _planted(args.first)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(_figures(summary, caught), indent=2) + "\n")
    return 1 if summary.violations or None in caught.values() else 0


def _print_summary(summary: Summary) -> None:
    print(f"{summary.seeds:,} worlds, {len(summary.violations)} violations")
    print(f"{summary.replies:,} replies, {summary.failovers:,} failovers, {summary.events:,} events")
    print(f"{summary.wall_s:.0f} s, {summary.seeds / summary.wall_s:,.1f} worlds/s")
    print("ends: " + ", ".join(f"{reason} {count:,}" for reason, count in summary.reasons.most_common()))
    for outcome in summary.violations[:20]:
        print(f"VIOLATION {outcome}")


def _planted(first: int) -> dict[str, Outcome | None]:
    """Bug planted -> the first world that shows it."""
    caught: dict[str, Outcome | None] = {}
    print(f"\n{'bug planted':<40}{'seeds':>6}  noticed as")
    for bug in PLANTED:
        outcome = caught[bug] = first_to_catch(bug, CATCH_MAX, first)
        if outcome is None:
            print(f"{bug:<40}{'':>6}  NOT NOTICED in {CATCH_MAX}")
        else:
            print(f"{bug:<40}{outcome.seed - first + 1:>6}  {outcome.check}")
    return caught


def _figures(summary: Summary, caught: dict[str, Outcome | None]) -> dict[str, object]:
    return {
        "worlds": summary.seeds,
        "violations": [str(outcome) for outcome in summary.violations],
        "replies": summary.replies,
        "failovers": summary.failovers,
        "events": summary.events,
        "wall_s": round(summary.wall_s, 1),
        "ends": dict(summary.reasons),
        "planted": {
            bug: None if one is None else {"seed": one.seed, "check": one.check} for bug, one in caught.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
