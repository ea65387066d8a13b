"""Runs seeds: one, or many over all cores. A violation carries the command line that shows it again."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import ChorusError
from sim.region import Region
from sim.rules import PLANTED, REAL
from sim.world import RuleBrokenError

_BATCH = 50


@dataclass(frozen=True)
class Outcome:
    """What one seed came to. `check` is None when everything held."""

    seed: int
    planted: str | None
    check: str | None = None
    detail: str = ""
    events: int = 0
    replies: int = 0
    failovers: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Shows the same interleaving again, event by event."""
        planted = f' --plant "{self.planted}"' if self.planted else ""
        return f"python -m sim --seed {self.seed}{planted}"

    def __str__(self) -> str:
        return f"{self.detail}\n    {self.command}"


def run_seed(seed: int, planted: str | None = None, *, trace: bool = False) -> Outcome:
    """One world, with a bug planted or none."""
    region = Region(seed, rules=PLANTED[planted] if planted else REAL, trace=trace)
    try:
        region.plan()
        region.run_to_rest()
    except RuleBrokenError as violation:
        return Outcome(seed, planted, violation.check, str(violation), region.world.events)
    except (ChorusError, AssertionError, ValueError, KeyError) as error:
        check = "nothing happens that the code forbids"
        return Outcome(seed, planted, check, f"{check}: {error!r}", region.world.events)
    facts = region.checks.facts.values()
    return Outcome(
        seed,
        planted,
        events=region.world.events,
        replies=len(facts),
        failovers=region.checks.failovers,
        reasons=tuple(each.end.reason.value for each in facts if each.end is not None),
    )


@dataclass
class Summary:
    """Many seeds."""

    seeds: int = 0
    events: int = 0
    replies: int = 0
    failovers: int = 0
    wall_s: float = 0.0
    violations: list[Outcome] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.replies += outcome.replies
        self.failovers += outcome.failovers
        self.reasons.update(outcome.reasons)
        if outcome.check is not None:
            self.violations.append(outcome)


def run_batch(seeds: Iterable[int]) -> list[Outcome]:
    return [run_seed(seed) for seed in seeds]


def run_many(first: int, count: int, jobs: int) -> Summary:
    """Seeds first .. first + count - 1 of the real code."""
    began = time.monotonic()
    batches = [range(at, min(at + _BATCH, first + count)) for at in range(first, first + count, _BATCH)]
    summary = Summary()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for outcomes in pool.imap_unordered(run_batch, batches):
            for outcome in outcomes:
                summary.add(outcome)
    summary.wall_s = time.monotonic() - began
    return summary


def first_to_catch(planted: str, most: int, first: int = 0) -> Outcome | None:
    """The first seed that notices a planted bug; None when none of `most` does."""
    outcomes = (run_seed(seed, planted) for seed in range(first, first + most))
    return next((outcome for outcome in outcomes if outcome.check is not None), None)
