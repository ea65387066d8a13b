"""python -m tests.drill                 every drill in its full form; figures go to bench/results/drill.json
python -m tests.drill stop bus_sigkill  only these
python -m tests.drill --short           the shortened forms, as the tests run them
"""

# ruff: noqa: T201  a command prints

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import hardware
from tests.drill.catalogue import DRILLS, Drill, Plant
from tests.drill.report import Report, write
from tests.integration.system import ROOT

RESULTS = ROOT / "bench" / "results" / "drill.json"


def by_plant(drills: Iterable[Drill]) -> Mapping[Plant, list[Drill]]:
    """One system for all that are held on its kind, in their order."""
    found: dict[Plant, list[Drill]] = {}
    for drill in drills:
        found.setdefault(drill.plant, []).append(drill)
    return found


def held(drill: Drill, planted: Any, *, short: bool) -> Report:
    began = time.monotonic()
    try:
        report = drill.hold(planted, short=short)
    except AssertionError as error:
        report = Report(drill.name, broken=[str(error)])
    report.figures["wall_s"] = round(time.monotonic() - began, 1)
    print(report, flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *DRILLS], help="which (default: all)")
    parser.add_argument("--short", action="store_true", help="the shortened forms; nothing is written")
    parser.add_argument("--data", type=Path, help="where the system lies (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    chosen = [drill for name, drill in DRILLS.items() if name in (args.names or DRILLS)]  # in their order
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        data = args.data or Path(folder)
        for plant, wanted in by_plant(chosen).items():
            with plant(data / plant.__name__) as planted:
                reports += [held(drill, planted, short=args.short) for drill in wanted]
    if not args.short:
        write(reports, hardware.describe(("nats-py", "aiohttp", "uvloop", "msgspec")), args.out)
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
