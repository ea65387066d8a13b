"""A runner without a model: scripted tokens at a set pace, for the serving plane's tests and figures.

Output token number p of a reply with seed s is a pure function of (s, p), so any attempt on any replica writes the same
reply. What it gives must never be read as a model's speed: its version says `stub`.
"""

from collections.abc import Callable

from services.replica.core.plan import Odds, SampleParams, StepPlan, StepResult
from services.replica.core.randomness import draw
from services.replica.runner import RunnerInfo
from shared.clock import now_s, sleep
from shared.tokenizer import STUB_WORD_FIRST, STUB_WORDS

STUB_VERSION = "stub-1"


def scripted_token(seed: int, position: int) -> int:
    """The word at output position `position` of a reply with `seed`."""
    return STUB_WORD_FIRST + draw(seed, position) % STUB_WORDS


def _odds(token: int, param: SampleParams) -> Odds | None:
    """What is scripted is certain."""
    if param.sampling.logprobs is None:
        return None
    return Odds(0.0, ((token, 0.0),) if param.sampling.logprobs else ())


class StubRunner:
    """Every step lasts at least 1 / `tps` seconds, measured from the step before while there is no gap; 0: no pace."""

    def __init__(
        self,
        *,
        tps: float,
        blocks_total: int,
        context_max: int,
        clock: Callable[[], float] = now_s,
        wait: Callable[[float], None] = sleep,
    ) -> None:
        self.info = RunnerInfo(STUB_VERSION, blocks_total, context_max, STUB_WORD_FIRST + STUB_WORDS)
        self._step_s = 1.0 / tps if tps > 0 else 0.0
        self._clock, self._wait = clock, wait
        self._due = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        if self._step_s:
            self._pace()
        params = [chunk.sample for chunk in plan.sampled_chunks if chunk.sample is not None]
        tokens = [scripted_token(param.seed, param.position) for param in params]
        if all(param.sampling.logprobs is None for param in params):
            return StepResult(tokens)
        return StepResult(tokens, odds=[_odds(token, param) for token, param in zip(tokens, params, strict=True)])

    def _pace(self) -> None:
        """A step that comes late shortens the next wait by at most itself: pauses are never caught up with a burst."""
        now = self._clock()
        self._due = max(self._due, now - self._step_s) + self._step_s
        if self._due > now:
            self._wait(self._due - now)

    def close(self) -> None:
        pass
