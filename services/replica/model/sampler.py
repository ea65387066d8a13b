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

from services.replica.core.plan import Odds, SampleParams
from services.replica.core.randomness import unit
from services.replica.core.sequence import penalised

# Rows with top-p look at this many best tokens first, and at eight times as many as long as their mass is not enough.
CANDIDATES = 1024
_HEAP = 16
LEAST_TEMPERATURE = 1e-30  # that float32 can divide by, and by its inverse multiply
LEAST_LOGPROB = -9999.0  # of what is impossible, as OpenAI tells it

Numbers = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]


def sample(logits: Numbers, params: Sequence[SampleParams]) -> list[int]:
    """[rows, vocab] (changed in place) and one set of parameters per row -> a token id per row.

    Whatever numbers come, a token comes out: where the odds are none (infinite, not a number) the best one.
    """
    logits = np.asarray(logits)
    with np.errstate(all="ignore"):
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
    best = row.max()
    if sampling.temperature <= 0 or not np.isfinite(best):
        return int(row.argmax())
    if sampling.top_k > 0 or sampling.top_p < 1:
        return _draw_cut(row, best, param)
    # The whole vocabulary is in play, min-p apart; in the order of the ids, so nothing is sorted.
    weights = _weights(row, best, sampling.temperature)
    weights[weights < sampling.min_p] = 0.0
    return _invert(weights, param)


def _weights(row: Numbers, best: np.floating[Any], temperature: float) -> Doubles:
    """Odds relative to the best token's before all else, so that no temperature is too small for it.

    In float64: sums of 100,000 of them stay exact enough.
    """
    return np.exp((row.astype(np.float64) - best) / temperature)


def _draw_cut(row: Numbers, best: np.floating[Any], param: SampleParams) -> int:
    """The tail of the distribution is cut by rank or by mass, so that an order is needed, but only of what is left."""
    sampling = param.sampling
    ids = _best(row, min(sampling.top_k or CANDIDATES, len(row)))
    weights = _weights(row[ids], best, sampling.temperature)
    if sampling.top_k > 0:
        total = weights.sum()
    else:
        # Of all, in the row's own precision: exact odds are needed of the few that are drawn from, not of the rest.
        odds = row - best
        odds /= max(sampling.temperature, LEAST_TEMPERATURE)
        total = np.exp(odds, out=odds).sum(dtype=np.float64)
        # What min-p cuts, top-p need not find.
        while len(ids) < len(row) and weights[-1] >= sampling.min_p and weights.sum() < sampling.top_p * total:
            ids = _best(row, min(8 * len(ids), len(row)))
            weights = _weights(row[ids], best, sampling.temperature)
    before = weights.cumsum() - weights
    kept = (before < sampling.top_p * total) & (weights >= sampling.min_p)
    kept[0] = True
    return int(ids[_invert(np.where(kept, weights, 0.0), param)])


def _best(numbers: Numbers, count: int) -> NDArray[np.intp]:
    """The ids of the `count` largest numbers, largest first; of equals the lower id first."""
    ids = np.flatnonzero(numbers >= _bound(numbers, count)) if count < len(numbers) else np.arange(len(numbers))
    left = numbers[ids]
    if count < len(left):
        few = left >= np.partition(left, len(left) - count)[len(left) - count]
        ids, left = ids[few], left[few]
    return ids[_order(left)[:count]]


def _order(numbers: Numbers) -> NDArray[np.intp]:
    """Places of the numbers, largest first; of equals the first first. None of them is NaN."""
    if numbers.dtype != np.float32:
        return np.argsort(-numbers, kind="stable")
    # Number and place as one whole number: those are sorted several times as quickly as places by their numbers are.
    bits = (numbers + np.float32(0)).view(np.uint32)  # -0 is 0
    falling = np.where(bits >> 31, bits, bits ^ 0x7FFFFFFF).astype(np.uint64)
    keys = falling << np.uint64(32) | np.arange(len(bits), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)


def _bound(numbers: Numbers, count: int) -> float:
    """A number that at least `count` of them reach, and not many more.

    Of all heaps of sixteen, `count` have such a largest one; to look at those alone is ten times as quick as at all.
    """
    heaps = len(numbers) // _HEAP
    if heaps <= count:
        return float(numbers.min())
    largest = numbers[: heaps * _HEAP].reshape(_HEAP, heaps).max(axis=0)
    return float(np.partition(largest, heaps - count)[heaps - count])


def _invert(weights: Doubles, param: SampleParams) -> int:
    """The first place where the cumulated weight passes unit(seed, position) of the whole; never one of weight 0."""
    cumulated = weights.cumsum()
    return int(np.searchsorted(cumulated, unit(param.seed, param.position) * cumulated[-1], side="right"))


# --- how likely it was -----------------------------------------------------------------------------------


def odds_wanted(params: Sequence[SampleParams]) -> bool:
    """Whether anybody asked for log probabilities."""
    return any(param.sampling.logprobs is not None for param in params)


def tell_odds(logits: Numbers, tokens: Sequence[int], params: Sequence[SampleParams]) -> list[Odds | None]:
    """The odds of each row's token, from the row [vocab] as the model gave it, where asked for; [] when nobody did."""
    if not odds_wanted(params):
        return []
    with np.errstate(all="ignore"):
        return [
            None if (count := param.sampling.logprobs) is None else _odds(row, token, count)
            for row, token, param in zip(np.asarray(logits), tokens, params, strict=True)
        ]


def _odds(row: Numbers, token: int, count: int) -> Odds:
    """In float64, from this row alone: the same in any batch."""
    best = row.max()
    if not np.isfinite(best):
        return Odds(LEAST_LOGPROB)
    scores = row.astype(np.float64) - best
    scores = np.maximum(scores - np.log(np.exp(scores).sum()), LEAST_LOGPROB)
    likeliest = _best(scores, min(count, len(scores))) if count else ()
    return Odds(float(scores[token]), tuple((int(other), float(scores[other])) for other in likeliest))
