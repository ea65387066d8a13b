"""Drawing tokens from logits. A row's token depends on its own logits, parameters, seed and position, never on others.

logits -> logit_bias, penalties -> temperature 0: the best
                                -> / temperature -> top-k -> top-p -> min-p -> inverse CDF at unit(seed, position)
"""

from collections import Counter
from collections.abc import Sequence

import torch

from services.replica.core.plan import SampleParams
from services.replica.core.randomness import unit
from services.replica.core.sequence import penalised

# Rows with top-k or top-p look at this many best tokens first; they sort the whole vocabulary only when that is not
# enough.
CANDIDATES = 1024


@torch.inference_mode()
def sample(logits: torch.Tensor, params: Sequence[SampleParams]) -> list[int]:
    """[rows, vocab] (changed in place) and one set of parameters per row -> a token id per row."""
    for row, param in enumerate(params):
        _adjust(logits[row], param)
    tokens = logits.argmax(dim=-1)
    whole = [row for row, param in enumerate(params) if _random(param) and not _cut(param)]
    if whole:
        tokens[whole] = _draw_whole(logits[whole], [params[row] for row in whole])
    for row, param in enumerate(params):
        if _random(param) and _cut(param):
            tokens[row] = _draw_cut(logits[row], param)
    return [int(token) for token in tokens.tolist()]


def _random(param: SampleParams) -> bool:
    return param.sampling.temperature > 0


def _cut(param: SampleParams) -> bool:
    """The tail of the distribution is cut by rank or by mass, so that an order is needed."""
    return param.sampling.top_k > 0 or param.sampling.top_p < 1


# --- before the draw -------------------------------------------------------------------------------------


def _adjust(row: torch.Tensor, param: SampleParams) -> None:
    """Penalties for tokens seen, then the client's own bias, in place."""
    sampling = param.sampling
    if penalised(sampling):
        _penalise(row, param)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        row[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=row.dtype)


def _penalise(row: torch.Tensor, param: SampleParams) -> None:
    """Repetition counts prompt and output, frequency and presence the output only."""
    sampling = param.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*param.prompt_ids, *param.output_ids}), dtype=torch.long)
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    counts = Counter(param.output_ids)
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        times = torch.tensor(list(counts.values()), dtype=row.dtype)
        row[torch.tensor(list(counts))] -= sampling.frequency_penalty * times + sampling.presence_penalty


# --- the draw --------------------------------------------------------------------------------------------


def _draw_whole(logits: torch.Tensor, params: Sequence[SampleParams]) -> torch.Tensor:
    """Rows whose whole vocabulary is in play, min-p apart; in the order of the ids, so nothing is sorted."""
    temperatures = torch.tensor([param.sampling.temperature for param in params], dtype=logits.dtype)
    weights = _weights(logits / temperatures[:, None])
    least = torch.tensor([param.sampling.min_p for param in params], dtype=weights.dtype)
    weights.masked_fill_(weights < least[:, None], 0.0)
    return _invert(weights, params)


def _draw_cut(logits: torch.Tensor, param: SampleParams) -> int:
    """One row whose tail is cut."""
    sampling = param.sampling
    scaled = logits / sampling.temperature
    weights = _weights(scaled)  # relative to the best token's
    wanted = min(sampling.top_k or len(scaled), len(scaled))
    count = min(max(CANDIDATES, sampling.top_k if sampling.top_k > CANDIDATES else 0), len(scaled))
    best, ids = weights.topk(count)
    total = best[:wanted].sum() if wanted <= count else weights.sum()
    if wanted > count and best.sum() < sampling.top_p * total:
        best, ids = weights.sort(descending=True, stable=True)
    best, ids = best[:wanted], ids[:wanted]
    before = best.cumsum(0) - best
    kept = (before < sampling.top_p * total) & (best >= sampling.min_p)
    kept[0] = True
    place = _invert(torch.where(kept, best, 0.0)[None, :], [param])
    return int(ids[place])


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """Probabilities relative to the best token's, in float64: sums of 100,000 of them stay exact enough."""
    return (scaled - scaled.max(dim=-1, keepdim=True).values).double().exp_()


def _invert(weights: torch.Tensor, params: Sequence[SampleParams]) -> torch.Tensor:
    """The first place where the cumulated weight passes unit(seed, position) of the whole; never one of weight 0."""
    cumulated = weights.cumsum(dim=-1)
    units = torch.tensor([unit(param.seed, param.position) for param in params], dtype=cumulated.dtype)
    targets = units * cumulated[:, -1]
    return torch.searchsorted(cumulated, targets[:, None], right=True).squeeze(1)
