"""Fuzz the engine's loop: sampling parameters, prompts, continuations and cancels that make little sense, from one seed.

    python -m tests.fuzz.engine [COUNT] [SEED]          COUNT 20,000; ends with an error when the loop dies or stalls

The real loop, scheduler, block pool and sampler; the logits come from a small table in which some rows are spoiled.
Then the same on the native kernels, which draw most of the tokens themselves, with a tiny model. Parameters go through
the gateway's door first, as in production: what it refuses goes no further.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.gateway.openai_api import parse_chat
from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import StepPlan, StepResult
from services.replica.core.scheduler import Scheduler, SchedulerLimits
from services.replica.core.step_fit import StepSample, StepTimes
from services.replica.engine import Engine, run_engine
from services.replica.engine_messages import CancelSequence, Command, StepReport, StopEngine, SubmitSequence
from services.replica.model.native.kernels import runnable
from services.replica.model.native_runner import NativeRunner
from services.replica.model.sampler import LEAST_LOGPROB, odds_wanted, sample, tell_odds
from services.replica.runner import Runner, RunnerInfo
from shared.catalog import Catalog, ModelCard
from shared.errors import RefusedError
from shared.messages import Sampling, pack_ids
from shared.tiers import LANE_ORDER
from tests.unit.replica.native_models import KINDS, VARIANTS, kernel_model, tiny_file

VOCAB, BLOCKS, CONTEXT = 300, 40, 256
AT_ONCE = 24  # sequences submitted and not yet answered
SILENT_MAX = 400  # reports in a row that answer nobody: the loop stalls
_STOPS = frozenset(range(290, 300))
_PIECES = (
    [bytes([97 + token % 26]) for token in range(256)] + [bytes([0x80 + token]) for token in range(34)] + [b""] * 10
)
VOCABULARY = Vocabulary(_PIECES, _STOPS)
_CATALOG = Catalog(models=(ModelCard(id="m", file="stub", context_tokens=CONTEXT, output_tokens_max=64),))
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 0.5, 1.5, 2, -2, 1e-300, 5e-324, 1e300, -0.0, 100, -100, 10, 3, 20, 21, 299, 300, 10**6, 2**31, 2**63),
    *(None, True, "1", [], {}, 0.999999999999, 1.0000001, 2.0000001, 0.9, 0.05),
)
_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("logprobs", "top_logprobs", "n", "ignore_eos", "max_tokens"),
)
_GOOD: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1, 2, 1e-300),
    "top_p": (1, 0.9, 1e-300, 0.5),
    "top_k": (0, 1, 5, 299, 300, 10**6),
    "min_p": (0, 0.1, 1),
    "presence_penalty": (0, 2, -2),
    "frequency_penalty": (0, 2, -2),
    "repetition_penalty": (1, 10, 1e-300, 0.5),
    "seed": (0, -1, 7, 2**63 - 1, -(2**63)),
    "logprobs": (True, True, False),
    "ignore_eos": (True, False),
}


class TableRunner:
    """Logits by last token and position from a table of odd rows; the real sampler draws."""

    def __init__(self, seed: int) -> None:
        self.info = RunnerInfo("table", BLOCKS, CONTEXT, VOCAB)
        rng = np.random.default_rng(seed)
        table = rng.normal(0, 4, (64, VOCAB)).astype(np.float32)
        table[0], table[1], table[2], table[3, 5] = 0.0, -np.inf, np.nan, np.nan
        table[4, 7], table[5, ::2], table[6], table[7, 1] = np.inf, -np.inf, 3e38, -3e38
        self._table = table

    def run(self, plan: StepPlan) -> StepResult:
        chunks = plan.sampled_chunks
        params = [chunk.sample for chunk in chunks if chunk.sample is not None]
        given = self._table[[(chunk.ids[-1] * 7 + chunk.end) % len(self._table) for chunk in chunks]]
        tokens = sample(given.copy() if odds_wanted(params) else given, params)
        return StepResult(tokens, odds=tell_odds(given, tokens, params))

    def close(self) -> None:
        pass


class Crowd:
    """Inbox and outbox of the loop: `count` sequences, each of which must be answered once."""

    def __init__(self, seed: int, count: int) -> None:
        self.told: Counter[str] = Counter()
        self._random, self._left = random.Random(seed), count
        self._open: dict[str, tuple[SubmitSequence, int]] = {}  # not yet answered, tokens so far
        self._silent = self._number = 0

    # --- the loop's ports ------------------------------------------------------------------------------------

    def take(self, *, wait: bool) -> list[Command]:
        chance, commands = self._random, list[Command]()
        assert not (wait and self._open), f"the loop is idle and {sorted(self._open)[:3]} are unanswered"
        while self._left and len(self._open) < AT_ONCE and (not commands or chance.random() < 0.6):
            self._left -= 1
            if (submit := self._submit()) is not None:
                commands.append(submit)
        if self._open and chance.random() < 0.1:
            name = chance.choice((*self._open, "nobody"))
            commands += [CancelSequence(sequence_id=name)] * chance.choice((1, 2))
        if not self._left and not self._open:
            commands.append(StopEngine())
        return commands

    def put(self, report: StepReport) -> None:
        answered = len(report.freed) + len(report.refused) + len(report.tokens)
        self._silent = 0 if answered else self._silent + 1
        assert self._silent < SILENT_MAX, f"{SILENT_MAX} steps and no word to {len(self._open)} sequences"
        for tokens in report.tokens:
            submit, written = self._open[tokens.sequence_id]
            assert len(tokens.ids) == len(tokens.texts)
            assert all(0 <= token < VOCAB for token in tokens.ids)
            asked = submit.sampling.logprobs
            assert len(tokens.logprobs) == (0 if asked is None else len(tokens.ids))
            assert all(len(odds.top) in (0, asked) for odds in tokens.logprobs)
            assert all(LEAST_LOGPROB <= odds.logprob <= 1e-9 for odds in tokens.logprobs)
            self._open[tokens.sequence_id] = submit, written + len(tokens.ids)
            assert written + len(tokens.ids) <= submit.budget, "more tokens than asked for"
            if tokens.finish is not None:
                self._answer(tokens.sequence_id, tokens.finish.value)
        for refused in report.refused:
            self._answer(refused.sequence_id, refused.reason.value)
        for freed in report.freed:  # again, or of one that had finished: said all the same
            if freed.sequence_id in self._open:
                self._answer(freed.sequence_id, "cancelled")

    def _answer(self, name: str, how: str) -> None:
        del self._open[name]
        self.told[how] += 1

    # --- what comes in ---------------------------------------------------------------------------------------

    def _submit(self) -> SubmitSequence | None:
        chance = self._random
        try:
            sampling = parse_chat(json.dumps(self._body()).encode(), _CATALOG).sampling
        except RefusedError:
            self.told["refused at the door"] += 1
            return None
        self._number += 1
        name = f"s{self._number}"
        submit = SubmitSequence(
            sequence_id=name,
            tier=chance.choice(LANE_ORDER),
            prompt=pack_ids(self._prompt()),
            written=pack_ids(chance.randrange(VOCAB) for _ in range(chance.choice((0, 0, 0, 1, 5, 20)))),
            budget=chance.choice((1, 1, 2, 3, 8, 17, 40, 2000)),
            sampling=self._filled(sampling),
        )
        self._open[name] = submit, 0
        return submit

    def _filled(self, sampling: Sampling) -> Sampling:
        """As conversation does: a seed where the client gave none."""
        fields = {name: getattr(sampling, name) for name in Sampling.__struct_fields__}
        return Sampling(**{**fields, "seed": self._random.getrandbits(63) if sampling.seed is None else sampling.seed})

    def _body(self) -> dict[str, Any]:
        chance = self._random
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        for name, values in _GOOD.items():
            if chance.random() < 0.4:
                body[name] = chance.choice(values)
        if body.get("logprobs") is True and chance.random() < 0.7:
            body["top_logprobs"] = chance.choice((0, 1, 5, 20))
        if chance.random() < 0.3:
            body["stop"] = chance.choice(("a", ["ab", "b"], ["zzzz"], "\u00e9", ["abcabd"], ["x" * 256]))
        if chance.random() < 0.3:
            body["logit_bias"] = {
                str(chance.choice((0, 5, 290, 299) if chance.random() < 0.98 else (300, 10**8))): chance.choice(
                    (-100, 100, 0.5, -0.0)
                )
                for _ in range(chance.choice((1, 3, 20)))
            }
        while chance.random() < 0.15:
            body[chance.choice(_NAMES)] = chance.choice(_NUMBERS)
        return body

    def _prompt(self) -> list[int]:
        chance = self._random
        length = chance.choice((0, 1, 1, 15, 16, 17, 31, 32, 33, 100, CONTEXT - 1, CONTEXT, 900))
        ids = [(at * 7) % 290 for at in range(length)]  # of one family, so that the cache is hit
        for _ in range(chance.choice((0, 0, 0, 1, 3)) if ids else 0):
            bad = chance.choice((300, -1, 2**31 - 1))
            ids[chance.randrange(len(ids))] = bad if chance.random() < 0.05 else chance.randrange(VOCAB)
        return ids


class _NoMarker:
    def begin(self, now: float, predicted_s: float) -> None: ...

    def end(self) -> None: ...


def fuzz(count: int, seed: int, runner: Runner | None = None) -> Counter[str]:
    """How the sequences were answered. AssertionError, or whatever the loop died of."""
    ticks = iter(range(1 << 62))
    limits = SchedulerLimits(
        running_max=8,
        waiting_max=12,
        step_tokens_max=48,
        mixed_tokens_max=24,
        reserve_blocks=2,
        context_max=CONTEXT,
    )
    scheduler = Scheduler(pool=BlockPool(BLOCKS), vocabulary=VOCABULARY, limits=limits)
    engine = Engine(
        scheduler=scheduler,
        runner=runner or TableRunner(seed),
        step_times=StepTimes([StepSample(1, 1, 0.001)]),
        marker=_NoMarker(),
        clock=lambda: next(ticks) * 1e-3,
    )
    crowd = Crowd(seed, count)
    run_engine(engine, crowd, crowd)
    scheduler.check()
    assert scheduler.pool.free == scheduler.pool.total, "blocks are missing"
    assert sum(crowd.told.values()) == count
    return crowd.told


def main() -> int:
    count, seed = (int(value) for value in (*sys.argv[1:], *("20000", "1")[len(sys.argv) - 1 :]))
    say(count, seed, "table", fuzz(count, seed))
    if runnable():
        with tempfile.TemporaryDirectory() as folder, kernel_runner(Path(folder)) as runner:
            say(count, seed, "kernels", fuzz(count, seed, runner))
    return 0


@contextmanager
def kernel_runner(folder: Path) -> Iterator[Runner]:
    with kernel_model(tiny_file(folder / "tiny.gguf", KINDS["Q4_1"]), VARIANTS[0], blocks=BLOCKS, threads=2) as model:
        yield NativeRunner(model, RunnerInfo("tiny", BLOCKS, CONTEXT, VOCAB))


def say(count: int, seed: int, logits: str, told: Counter[str]) -> None:
    answered = dict(told.most_common())
    print(json.dumps({"sequences": count, "seed": seed, "logits": logits, "answered": answered}))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
