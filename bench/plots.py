"""What the benches measured, drawn: `make bench-engine` and `make bench-plane` leave a picture beside their figures.

python -m bench.plots [engine|plane ...]      draws the results that lie in bench/results again
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS = "#0b6e4f", ("#8d99ae", "#c08552", "#5c677d", "#b5838d", "#a3b18a")
LINES = {"chorus-whole": "D", "chorus-precise": "o--", "chorus-torch": "o:"}  # one point, and two kinds of ours
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "svg.hashsalt": "chorus",  # the same figures make the same file
}
Figures = dict[str, dict[str, float]]


def colours(names: list[str]) -> dict[str, str]:
    """Ours stand out; the others are told apart."""
    others = iter(OTHERS * len(names))
    return {name: OURS if name.startswith("chorus") else next(others) for name in names}


def bars(axes: Axes, values: dict[str, float], shades: dict[str, str], title: str, unit: str) -> None:
    """One bar for each system that has the figure, with its number."""
    names = list(values)
    drawn = axes.barh(names, list(values.values()), color=[shades[name] for name in names])
    axes.bar_label(drawn, labels=[f"{value:,.0f}" for value in values.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit)


def engine(result: dict[str, Any]) -> Figure:
    """Batches as lines over their size; what has one number as bars."""
    figures: Figures = result["figures"]
    shades = colours(list(figures))
    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, 3)
    batches = panels[0][0]
    for name, found in figures.items():
        sizes = sorted(int(key.removeprefix("batch")) for key in found if key.startswith("batch"))
        values = [found[f"batch{size}"] for size in sizes]
        line = LINES.get(name, "o-")
        batches.plot(sizes, values, line, color=shades[name], label=name, linewidth=2.5 if name == "chorus" else 1.5)
    batches.set_xscale("log", base=2, nonpositive="clip")
    batches.xaxis.set_major_formatter("{x:.0f}")
    batches.set_title("Requests at once, 128 in, 128 out", loc="left")
    batches.set_xlabel("requests")
    batches.set_ylabel("output tokens/s")
    batches.legend(frameon=False, fontsize=8)
    for axes, key, title, unit, scale in (
        (panels[0][1], "single", "One stream", "tokens/s", 1),
        (panels[0][2], "prefill", "Prefill of 1,024 tokens", "prompt tokens/s", 1),
        (panels[1][0], "repeat_ttft", "The same prompt again", "ms to its first token", 1_000),
        (panels[1][1], "turn_ttft", "Worst of turns 2 to 6 of a conversation", "ms to its first token", 1_000),
        (panels[1][2], "itl_beside", "16 decodes while a prompt of 1,024 arrives", "ms between tokens, p95", 1_000),
    ):
        bars(axes, {name: found[key] * scale for name, found in figures.items() if key in found}, shades, title, unit)
    return figure


def plane(result: dict[str, Any]) -> Figure:
    """What passes through at the most, and how late a token is at 30 % of it."""
    systems = {name: found for name, found in result["systems"].items() if found is not None and name != "full"}
    shades = colours(list(systems))
    figure = Figure(figsize=(13, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, key, title, unit, scale in (
        (panels[0], "tokens_per_s", "32 streams x 128 tokens", "tokens/s", 1),
        (panels[1], "ttft_s_p50", "The same, first token", "ms, p50", 1_000),
    ):
        bars(axes, {name: found[key] * scale for name, found in systems.items()}, shades, title, unit)
    paced, late = result["paced"], panels[2]
    values = {
        "last token of an event, p50": paced["plane_ms_p50"],
        "p95": paced["plane_ms_p95"],
        "every token, p50": paced["with_coalescing_ms_p50"],
        "p95 ": paced["with_coalescing_ms_p95"],
    }
    title = f"{paced['streams']} streams at 40 tokens/s"
    bars(late, values, dict.fromkeys(values, OURS), title, "ms, sampled to client")
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {"engine": engine, "plane": plane}


def draw(kind: str, result: dict[str, Any], path: Path) -> None:
    """Draw a bench's result to an SVG file."""
    with rc_context(STYLE):
        PICTURES[kind](result).savefig(path, metadata={"Date": None})


def main() -> None:
    for kind in sys.argv[1:] or PICTURES:
        draw(kind, json.loads((RESULTS / f"{kind}.json").read_text()), RESULTS / f"{kind}.svg")


if __name__ == "__main__":
    main()
