"""python -m tests.drill                 every drill in its full form; figures go to bench/results/drill.json
python -m tests.drill stop bus_sigkill  only these
python -m tests.drill --short           the shortened forms, as the tests run them
"""

# ruff: noqa: T201  a command prints

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench import hardware
from tests.drill.catalogue import DRILLS, Drill
from tests.drill.plant import model_plant, stub_plant
from tests.drill.report import Report, write
from tests.integration.system import ROOT, System

RESULTS = ROOT / "bench" / "results" / "drill.json"


def held(drill: Drill, system: System, *, short: bool) -> Report:
    began = time.monotonic()
    try:
        report = drill.hold(system, short=short)
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
        for plant, name in ((stub_plant, "stub"), (model_plant, "model")):
            wanted = [drill for drill in chosen if drill.real_model == (name == "model")]
            if not wanted:
                continue
            with plant(data / name) as system:
                reports += [held(drill, system, short=args.short) for drill in wanted]
    if not args.short:
        write(reports, hardware.describe(("nats-py", "aiohttp", "uvloop", "msgspec")), args.out)
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
