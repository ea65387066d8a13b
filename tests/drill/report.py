"""What a drill found: what must hold, what it measured, and what the targets are."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.drill.follower import Story


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass
class Report:
    """`must` is asserted in every form of a drill; `target` is a time, which only the full form holds against it."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # what must hold and did not
    missed: list[str] = field(default_factory=list)  # targets

    @property
    def passed(self) -> bool:
        return not self.broken and not self.missed

    def must(self, holds: object, what: str) -> None:
        if not holds:
            self.broken.append(what)

    def target(self, name: str, value: float, most: float) -> None:
        self.figures[name] = round(value, 3)
        if not value <= most:
            self.missed.append(f"{name} is {value:.3f}, not <= {most:g}")

    def pauses(self, pauses: Sequence[float], p50: float, p99: float) -> None:
        self.figures["pauses"] = len(pauses)
        self.target("pause_s_p50", quantile(pauses, 0.5), p50)
        self.target("pause_s_p99", quantile(pauses, 0.99), p99)
        self.figures["pause_s_max"] = round(max(pauses, default=0.0), 3)

    def stories(self, stories: Sequence[Story], *, errors: bool = False) -> None:
        """Every reply came to its whole end with the right tokens, each once; `errors`: clients may have seen some."""
        self.tokens_right(stories)
        unfinished = [story for story in stories if not story.complete]
        self.must(not unfinished, f"{len(unfinished)} replies did not end whole: {_some(unfinished)}")
        if not errors:
            self.no_errors(stories)

    def tokens_right(self, stories: Sequence[Story]) -> None:
        """Nothing lost, repeated or reordered, and one end each."""
        self.figures["replies"] = self.figures.get("replies", 0) + len(stories)
        self.figures["tokens"] = self.figures.get("tokens", 0) + sum(len(story.ids) for story in stories)
        self.figures["reconnects"] = sum(max(0, story.connections - 1) + story.cuts for story in stories)
        self.figures["ends"] = dict(Counter(story.reason for story in stories))
        wrong = [story for story in stories if story.wrong]
        self.figures["replies_wrong"] = len(wrong)
        self.must(not wrong, f"{len(wrong)} replies with wrong tokens: {_some(wrong)}")
        self.must(all(story.closings == 1 for story in stories if story.final), "more than one end on a screen")

    def no_errors(self, stories: Sequence[Story]) -> None:
        errors = [error for story in stories for error in story.errors]
        self.figures["errors"] = len(errors)
        self.figures["turned_away"] = sum(story.turned_away for story in stories)
        self.must(not errors, f"{len(errors)} errors to clients: {Counter(errors).most_common(3)}")

    def __str__(self) -> str:
        head = f"{self.name}: {'passed' if self.passed else 'NOT PASSED'}"
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([head, f"    {figures}", *(f"    - {line}" for line in self.broken + self.missed)])


def _some(stories: Sequence[Story]) -> str:
    return "; ".join(
        f"{story.reply_id} {story.reason} {len(story.ids)}/{story.budget} {story.wrong[:2]} {story.errors[:1]}"
        for story in stories[:3]
    )


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def write(reports: Sequence[Report], hardware: dict[str, Any], out: Path) -> None:
    """Per drill: name, passed, figures; drills that did not run this time keep what they had."""
    known: dict[str, Any] = json.loads(out.read_text())["drills"] if out.exists() else {}
    for report in reports:
        known[report.name] = {
            "passed": report.passed,
            "figures": report.figures,
            "broken": report.broken,
            "missed": report.missed,
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"hardware": hardware, "drills": known}, indent=2) + "\n")
