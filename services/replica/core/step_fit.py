"""How long a step takes, fitted to measured steps: seconds = base + per_token * tokens + per_attended * attended.

Least squares over the samples. What would come out negative is left out, and the rest fitted again.
Pure: the seconds are measured elsewhere.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shared.messages import StepModel


class StepSample(NamedTuple):
    tokens: int
    attended: int  # pairs of a token computed and one it attends to
    seconds: float


_RIDGE = 1e-9  # relative; keeps a system of too few different samples solvable


class StepTimes:
    """The step model of a running engine: fitted at warm-up, refitted as steps are measured.

    Steps that only decode and steps with prompts in them are remembered apart, so that an hour of the one does not
    make it forget the other.
    """

    _REMEMBERED = 128  # of each kind
    _REFIT_EVERY = 64  # steps

    def __init__(self, samples: Sequence[StepSample]) -> None:
        self.model = fit(samples)
        self._prompts: deque[StepSample] = deque(samples, maxlen=self._REMEMBERED)
        self._decodes: deque[StepSample] = deque(maxlen=self._REMEMBERED)
        self._since_fit = 0

    def observe(self, sample: StepSample, *, only_decodes: bool) -> None:
        (self._decodes if only_decodes else self._prompts).append(sample)
        self._since_fit += 1
        if self._since_fit >= self._REFIT_EVERY:
            self._since_fit = 0
            self.model = fit([*self._prompts, *self._decodes])


def predict(model: StepModel, tokens: int, attended: int) -> float:
    """Seconds of a step that computes `tokens`, which attend to `attended` together."""
    return model.base_s + model.per_token_s * tokens + model.per_attended_s * attended


def tokens_within(model: StepModel, seconds: float) -> int:
    """Tokens that a step of about `seconds` computes; 0 when not even one fits."""
    if model.per_token_s <= 0:
        return 1 << 20
    return max(0, int((seconds - model.base_s) / model.per_token_s))


def fit(samples: Sequence[StepSample]) -> StepModel:
    """The model of these samples; ValueError when there are none."""
    if not samples:
        raise ValueError("no step was measured")
    rows = [(1.0, float(sample.tokens), float(sample.attended)) for sample in samples]
    # Relative error counts: a step of 5 ms must not vanish beside one of 500. A far too short one must not rule either.
    floor = max(1e-9, sorted(sample.seconds for sample in samples)[(len(samples) - 1) // 2] / 2)
    weights = [1.0 / max(sample.seconds, floor) ** 2 for sample in samples]
    kept = [0, *(column for column in (1, 2) if len({row[column] for row in rows}) > 1)]  # else nothing tells it apart
    while True:
        parts = _solve(rows, [sample.seconds for sample in samples], weights, kept)
        worst = min(kept, key=lambda index: parts[index])
        if parts[worst] >= 0 or len(kept) == 1:
            return StepModel(
                base_s=max(0.0, parts[0]), per_token_s=max(0.0, parts[1]), per_attended_s=max(0.0, parts[2])
            )
        kept.remove(worst)


def _solve(
    rows: Sequence[tuple[float, float, float]], seconds: Sequence[float], weights: Sequence[float], kept: Sequence[int]
) -> list[float]:
    """Weighted normal equations over the kept columns, by elimination; the others are 0."""
    size = len(kept)
    scale = [max(abs(row[column]) for row in rows) or 1.0 for column in kept]
    system = [[0.0] * (size + 1) for _ in kept]
    for row, second, weight in zip(rows, seconds, weights, strict=True):
        scaled = [row[column] / scale[place] for place, column in enumerate(kept)]
        for i in range(size):
            for j in range(size):
                system[i][j] += weight * scaled[i] * scaled[j]
            system[i][size] += weight * scaled[i] * second
    for i in range(size):
        system[i][i] *= 1.0 + _RIDGE
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(system[row][i]))
        system[i], system[pivot] = system[pivot], system[i]
        for below in range(i + 1, size):
            factor = system[below][i] / system[i][i]
            system[below] = [b - factor * a for a, b in zip(system[i], system[below], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(system[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (system[i][size] - known) / system[i][i]
    parts = [0.0, 0.0, 0.0]
    for place, column in enumerate(kept):
        parts[column] = solution[place] / scale[place]
    return parts
