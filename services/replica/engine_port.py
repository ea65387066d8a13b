"""The port to the engine as the bus shell uses it. Adapter: `engine_process.EngineHandle`; tests step one in place."""

from collections.abc import Callable
from typing import Protocol

from services.replica.engine_messages import (
    EngineConfig,
    EngineReady,
    EngineStarting,
    EngineStats,
    StepReport,
    SubmitSequence,
)


class EnginePort(Protocol):
    """One engine. EngineError: it is gone, and so is whatever it held."""

    async def start(
        self, config: EngineConfig, *, on_progress: Callable[[EngineStarting], None] | None = None
    ) -> EngineReady: ...

    async def stop(self) -> None: ...

    def submit(self, sequence: SubmitSequence) -> bool:
        """Hand a sequence over; False when there is no place for it, or no engine."""
        ...

    def cancel(self, sequence_id: str) -> None:
        """It leaves at the next step; a FreedSequence says when."""
        ...

    async def reports(self, timeout_s: float) -> list[StepReport]:
        """All reports that came, oldest first; waits for one at most `timeout_s`."""
        ...

    @property
    def ready(self) -> EngineReady:
        """What `start` returned; EngineError before."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def stats(self) -> EngineStats:
        """As of the newest report."""
        ...

    def step_age_s(self) -> float:
        """How long the running step has been running; 0.0 when none is."""
        ...

    def step_predicted_s(self) -> float: ...

    @property
    def stuck(self) -> bool:
        """The running step takes far longer than predicted."""
        ...
