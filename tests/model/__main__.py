"""python -m tests.model --seeds 100000        many interleavings of the real code, then each rule taken away
python -m tests.model --seed 7                 one interleaving, event by event
python -m tests.model --seed 7 --without RULE  the same with a rule taken away
"""

# ruff: noqa: T201  a command prints

import argparse
import os
import sys

from tests.model.rules import TAKEN_AWAY
from tests.model.run import Summary, first_to_catch, run_many, run_seed

CATCH_MAX = 2_000  # seeds tried per rule


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Model check of token logs and leases.")
    parser.add_argument("--seeds", type=int, default=100_000, help="how many interleavings")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="only this one, event by event")
    parser.add_argument("--without", choices=sorted(TAKEN_AWAY), help="with --seed: take this rule away")
    args = parser.parse_args()
    if args.seed is not None:
        outcome = run_seed(args.seed, args.without, trace=True)
        print(outcome.detail or "every check held")
        return 0 if outcome.check is None else 1
    summary = run_many(args.first, args.seeds, args.jobs)
    _print_summary(summary)
    missed = _print_rules(args.first)
    return 1 if summary.violations or missed else 0


def _print_summary(summary: Summary) -> None:
    print(f"{summary.seeds:,} interleavings, {len(summary.violations)} violations")
    print(f"{summary.events:,} events, {summary.wall_s:.0f} s, {summary.seeds / summary.wall_s:,.0f} interleavings/s")
    print("ends:     " + ", ".join(f"{reason} {count:,}" for reason, count in summary.reasons.most_common()))
    print("attempts: " + ", ".join(f"{opens}: {count:,}" for opens, count in sorted(summary.opens.items())))
    for outcome in summary.violations[:20]:
        print(f"VIOLATION {outcome}")


def _print_rules(first: int) -> int:
    """Rule taken away -> how many seeds until a check notices."""
    print(f"\n{'rule taken away':<48}{'seeds':>6}  noticed as")
    missed = 0
    for rule in TAKEN_AWAY:
        outcome = first_to_catch(rule, CATCH_MAX, first)
        if outcome is None:
            missed += 1
            print(f"{rule:<48}{'':>6}  NOT NOTICED in {CATCH_MAX:,}")
        else:
            print(f"{rule:<48}{outcome.seed - first + 1:>6}  {outcome.check}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
