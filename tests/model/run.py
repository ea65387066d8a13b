"""Runs seeds: one, or many over all cores."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import ChorusError
from tests.model.rules import TAKEN_AWAY, Rules
from tests.model.scene import Scene
from tests.model.world import RuleBrokenError, World

REAL = Rules()
_BATCH = 250


@dataclass(frozen=True)
class Outcome:
    """What one seed came to. `check` is None when everything held."""

    seed: int
    rule: str | None
    check: str | None = None
    detail: str = ""
    events: int = 0
    reason: str = ""  # of the end
    opens: int = 0

    @property
    def command(self) -> str:
        """Shows the same interleaving again, event by event."""
        without = f' --without "{self.rule}"' if self.rule else ""
        return f"python -m tests.model --seed {self.seed}{without}"

    def __str__(self) -> str:
        return f"{self.detail}\n    {self.command}"


def run_seed(seed: int, rule: str | None = None, *, trace: bool = False) -> Outcome:
    """One interleaving, with one rule taken away or none."""
    world = World(seed, trace=trace)
    try:
        scene = Scene(world, TAKEN_AWAY[rule] if rule else REAL)
        if not world.run(scene.at_rest):
            scene.checks.at_rest()
    except RuleBrokenError as violation:
        return Outcome(seed, rule, violation.check, str(violation), world.events)
    except ChorusError as error:
        check = "nothing happens that the code forbids"
        return Outcome(seed, rule, check, f"{check}: {error!r}", world.events)
    end = scene.checks.end
    return Outcome(
        seed, rule, events=world.events, reason=end.reason.value if end else "", opens=len(scene.checks.opens)
    )


@dataclass
class Summary:
    """Many seeds of the real code."""

    seeds: int = 0
    events: int = 0
    wall_s: float = 0.0
    violations: list[Outcome] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    opens: Counter[int] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        if outcome.check is not None:
            self.violations.append(outcome)
        else:
            self.reasons[outcome.reason] += 1
            self.opens[outcome.opens] += 1


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


def first_to_catch(rule: str, most: int, first: int = 0) -> Outcome | None:
    """The first seed that notices that the rule is gone; None when none of `most` does."""
    outcomes = (run_seed(seed, rule) for seed in range(first, first + most))
    return next((outcome for outcome in outcomes if outcome.check is not None), None)
