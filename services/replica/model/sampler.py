"""Drawing tokens from logits. A row's token depends on its own logits, parameters, seed and position, never on others.

logits -> logit_bias, penalties -> temperature 0: the best
                                -> / temperature -> top-k -> top-p -> min-p -> inverse CDF at unit(seed, position)

In numpy, so that every runner draws alike and one without torch stays so.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.replica.core.plan import SampleParams
from services.replica.core.randomness import unit
from services.replica.core.sequence import penalised

# Rows with top-k or top-p look at this many best tokens first; they sort the whole vocabulary only when that is not
# enough.
CANDIDATES = 1024

Numbers = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]


def sample(logits: Numbers, params: Sequence[SampleParams]) -> list[int]:
    """[rows, vocab] (changed in place) and one set of parameters per row -> a token id per row."""
    logits = np.asarray(logits)
    for row, param in zip(logits, params, strict=True):
        _adjust(row, param)
    return [_draw(row, param) for row, param in zip(logits, params, strict=True)]


# --- before the draw -------------------------------------------------------------------------------------


def _adjust(row: Numbers, param: SampleParams) -> None:
    """Penalties for tokens seen, then the client's own bias, in place."""
    sampling = param.sampling
    if penalised(sampling):
        _penalise(row, param)
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += np.array(list(sampling.logit_bias.values()), row.dtype)


def _penalise(row: Numbers, param: SampleParams) -> None:
    """Repetition counts prompt and output, frequency and presence the output only."""
    sampling = param.sampling
    if sampling.repetition_penalty != 1:
        seen = sorted({*param.prompt_ids, *param.output_ids})
        scores = row[seen]
        row[seen] = np.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    counts = Counter(param.output_ids)
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        times = np.array(list(counts.values()), row.dtype)
        row[list(counts)] -= sampling.frequency_penalty * times + sampling.presence_penalty


# --- the draw --------------------------------------------------------------------------------------------


def _draw(row: Numbers, param: SampleParams) -> int:
    sampling = param.sampling
    if sampling.temperature <= 0:
        return int(row.argmax())
    # Relative to the best token's, in float64: sums of 100,000 of them stay exact enough.
    scaled = row / sampling.temperature
    weights = np.exp((scaled - scaled.max()).astype(np.float64))
    if sampling.top_k > 0 or sampling.top_p < 1:
        return _draw_cut(weights, param)
    # The whole vocabulary is in play, min-p apart; in the order of the ids, so nothing is sorted.
    weights[weights < sampling.min_p] = 0.0
    return _invert(weights, param)


def _draw_cut(weights: Doubles, param: SampleParams) -> int:
    """The tail of the distribution is cut by rank or by mass, so that an order is needed."""
    sampling = param.sampling
    wanted = min(sampling.top_k or len(weights), len(weights))
    count = min(max(CANDIDATES, sampling.top_k), len(weights))
    ids = _best(weights, count)
    total = weights[ids[:wanted]].sum() if wanted <= count else weights.sum()
    if wanted > count and weights[ids].sum() < sampling.top_p * total:
        ids = _best(weights, len(weights))
    ids = ids[:wanted]
    best = weights[ids]
    before = best.cumsum() - best
    kept = (before < sampling.top_p * total) & (best >= sampling.min_p)
    kept[0] = True
    return int(ids[_invert(np.where(kept, best, 0.0), param)])


def _best(weights: Doubles, count: int) -> NDArray[np.intp]:
    """The ids of the `count` largest weights, largest first; of equals the lower id first."""
    ids = np.arange(len(weights))
    if count < len(weights):
        least = np.partition(weights, len(weights) - count)[len(weights) - count]
        ids = np.flatnonzero(weights >= least)
    return ids[np.argsort(-weights[ids], kind="stable")][:count]


def _invert(weights: Doubles, param: SampleParams) -> int:
    """The first place where the cumulated weight passes unit(seed, position) of the whole; never one of weight 0."""
    cumulated = weights.cumsum()
    return int(np.searchsorted(cumulated, unit(param.seed, param.position) * cumulated[-1], side="right"))
