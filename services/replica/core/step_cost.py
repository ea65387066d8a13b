"""What each sequence of a step costs: the step's time, split by what took it.

    base         reading the weights         the same for everyone in the step: they are read once for all
    per token    computing                   by tokens computed, so that a prompt pays for its prefill
    attended     reading keys and values     by tokens attended to, each once for each token computed

The step model says how much of a step each of these is; the rates are scaled to what the step really took, so that the
costs of its sequences sum to it. Pure.
"""

from typing import NamedTuple

from services.replica.core.plan import StepPlan
from shared.messages import StepModel

BY_TOKENS = StepModel(base_s=0.0, per_token_s=1.0)  # where nothing is known of the steps


class CostRates(NamedTuple):
    """Seconds of one step: for being in it, for each token computed, for each token that one attends to."""

    each_s: float
    per_token_s: float
    per_attended_s: float


def cost_rates(plan: StepPlan, model: StepModel, seconds: float) -> CostRates:
    """The rates of a step that took `seconds`; the costs of all its chunks sum to that."""
    count = max(1, len(plan.chunks))
    predicted = model.base_s + model.per_token_s * plan.tokens + model.per_attended_s * plan.attended
    if predicted <= 0:
        return CostRates(seconds / count, 0.0, 0.0)
    scale = seconds / predicted
    return CostRates(model.base_s / count * scale, model.per_token_s * scale, model.per_attended_s * scale)
