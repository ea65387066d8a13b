"""A step's plan and its result, as values: what the scheduler hands to a runner and gets back.

These are made anew for every sequence in every step, so they are structs that cost a tenth of a dataclass.

One sequence's part of a step is a chunk: the tokens it still has to catch up with, as far as the step's budget goes.

    prompt + output   ├────────────── num_tokens ───────────────┤
    already computed  ├── start ──┤
    this chunk                    ├── ids ──┤                       samples only when it reaches num_tokens
    block table       ├─ b0 ─┼─ b1 ─┼─ b2 ─┤                        covers [0, start + len(ids))
"""

from collections.abc import Sequence
from functools import cached_property

import msgspec

from services.replica.core.step_budget import attended
from shared.limits import BLOCK_TOKENS
from shared.messages import Sampling, TokenLogprob
from shared.outcomes import EndReason


class SampleParams(msgspec.Struct, frozen=True, gc=False):
    """How the chunk's last row is sampled: draw number `position` (output tokens so far) of the reply's `seed`."""

    sampling: Sampling
    seed: int
    position: int
    prompt_ids: tuple[int, ...] = ()  # given only when penalties ask for them
    output_ids: tuple[int, ...] = ()


class SeqChunk(msgspec.Struct, frozen=True, gc=False):
    """One sequence's tokens in a step. `admission` numbers its stay in the batch: a late result shows by it."""

    sequence_id: str
    admission: int
    start: int  # position of the first token
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: SampleParams | None  # None: more of it must be computed before a token can be drawn

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class StepPlan(msgspec.Struct, frozen=True, dict=True):
    """One forward pass. `freed`: cancelled sequences whose blocks are free from here on."""

    number: int
    chunks: tuple[SeqChunk, ...]
    freed: tuple["Freed", ...] = ()
    preempted: tuple[str, ...] = ()

    @cached_property
    def tokens(self) -> int:
        """Rows to compute."""
        return sum(len(chunk.ids) for chunk in self.chunks)

    @cached_property
    def attended(self) -> int:
        """Pairs of a row and a token it attends to."""
        return sum(attended(chunk.start, len(chunk.ids)) for chunk in self.chunks)

    @cached_property
    def sampled_chunks(self) -> tuple[SeqChunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.sample is not None)


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """`sampled[i]` belongs to the plan's i-th sampled chunk, and so does `odds[i]` where odds were asked for."""

    sampled: Sequence[int]
    seconds: float = 0.0
    odds: Sequence["Odds | None"] = ()


class Odds(msgspec.Struct, frozen=True, gc=False):
    """Natural logarithms of a drawn token's probability and of the likeliest ones', as the model gave them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log probability), likeliest first


class Freed(msgspec.Struct, frozen=True, gc=False):
    """A cancelled sequence (or an unknown one: then nothing was held). Every cancel is answered by one of these."""

    sequence_id: str
    engine_s: float = 0.0


class Output(msgspec.Struct, frozen=True, gc=False):
    """What a sequence has to say after a step. With `finish` its blocks are free and nothing more will come."""

    sequence_id: str
    ids: tuple[int, ...]
    texts: tuple[str, ...]  # per token, the text it releases
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; with the first token
    queued_s: float | None = None  # submitted -> first planned; with the first token
    finish: EndReason | None = None
    engine_s: float = 0.0  # with `finish`: its share of the steps' time
    logprobs: tuple[TokenLogprob, ...] = ()  # per token, when asked for


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens`."""
    return -(-tokens // BLOCK_TOKENS)
