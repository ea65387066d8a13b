"""The port to what computes a step. Adapters: `stub_runner` (scripted), `model.torch_runner` (torch).

A runner owns the memory behind the block numbers; the scheduler owns the numbers. A plan carries all it needs, so that
a runner keeps nothing about sequences: token ids and positions to compute, block tables, how to sample.
Pure: a port and its values.
"""

from dataclasses import dataclass
from typing import Protocol

from services.replica.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner can serve. `model_version` names the weights' content and precision; the log keeps it."""

    model_version: str
    blocks_total: int
    context_max: int
    vocab_size: int


class Runner(Protocol):
    @property
    def info(self) -> RunnerInfo: ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's chunks, write their keys and values to their blocks, draw a token for each sampled chunk.

        `seconds` of the result is left 0: the engine measures. May not be called with a plan without chunks.
        """
        ...

    def close(self) -> None:
        """Give the memory back; nothing may be run afterwards."""
        ...
