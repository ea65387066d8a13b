"""A sequence: a request inside the engine. It has tokens, and it catches up with them."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

from services.replica.core.detokenize import ReplyText, Vocabulary
from services.replica.core.plan import SampleParams, SeqChunk
from shared.blocks import chain_root, next_hash
from shared.limits import BLOCK_TOKENS
from shared.messages import Sampling
from shared.outcomes import EndReason
from shared.tiers import Tier, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of the engine. `written` are the reply's tokens that stand in its log already: a continuation."""

    sequence_id: str
    tier: Tier
    prompt: Ids[int]
    budget: int  # most output tokens, the written ones included
    sampling: Sampling
    seed: int
    written: Ids[int] = ()
    domain: bytes = b""  # salt of the block hash chain


class Sequence:
    """Its tokens, how far they are computed, its blocks, and the state of its text.

        ids             ├─ prompt ─────────┼─ written ─┼─ sampled here ─┤  num_tokens
        num_computed    ├──────────────────────────────────────┤            keys and values stand for these
        num_published   ├─ full blocks whose hash is known to the pool ┤   in blocks

    Decode is `num_tokens - num_computed == 1`; prefill, preemption and continuation are the same with more to do.
    """

    __slots__ = (
        "_hashes",
        "_ids_max",
        "_penalised",
        "_stop_ids",
        "_text",
        "_texts",
        "_vocabulary",
        "admission",
        "admitted_step",
        "blocks",
        "budget",
        "cached_tokens",
        "demand",
        "engine_s",
        "finish",
        "first_token_s",
        "id",
        "ids",
        "num_computed",
        "num_published",
        "order",
        "planned_s",
        "prompt_tokens",
        "sampling",
        "seed",
        "submitted_s",
    )

    def __init__(self, demand: Demand, vocabulary: Vocabulary, *, arrival: int, now: float) -> None:
        self.demand = demand
        self.id = demand.sequence_id
        self.prompt_tokens, self.budget = len(demand.prompt), demand.budget
        self.sampling, self.seed = demand.sampling, demand.seed
        self._ids_max = self.prompt_tokens + demand.budget
        self.order = (rank(demand.tier), arrival)  # served first to last; preempted last to first
        self.submitted_s = now
        self.planned_s: float | None = None  # first admitted
        self.first_token_s: float | None = None
        self.ids = [*demand.prompt, *demand.written]
        self.num_computed = 0
        self.num_published = 0
        self.blocks: tuple[int, ...] = ()
        self.admission = 0  # numbers its stay in the batch; 0 while it waits
        self.admitted_step = 0  # the step of that
        self.cached_tokens: int | None = None  # of the first admission; told with the first token
        self.engine_s = 0.0
        self.finish: EndReason | None = None
        self._vocabulary, self._texts = vocabulary, vocabulary.texts
        self._stop_ids: frozenset[int] = frozenset() if demand.sampling.ignore_eos else vocabulary.stop_ids
        self._penalised = penalised(demand.sampling)
        self._text = ReplyText(demand.sampling.stop)
        self._hashes: list[bytes] = []
        self._replay()

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_written(self) -> int:
        """Output tokens, here and before."""
        return len(self.ids) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to catch up with; 1 while decoding."""
        return len(self.ids) - self.num_computed

    @property
    def queued_s(self) -> float:
        """Submitted -> first admitted."""
        return (self.submitted_s if self.planned_s is None else self.planned_s) - self.submitted_s

    def _replay(self) -> None:
        """Bring text and end conditions to where the tokens in the log left them; their text was shown already."""
        prompt = self.prompt_tokens
        for written, token in enumerate(self.demand.written, start=1):
            self._release(token, written)
            if self.finish is not None:
                del self.ids[prompt + written :]
                return
        if self.num_written >= self.budget:
            self.finish = EndReason.MAX_TOKENS

    def append(self, token: int) -> str:
        """A sampled token; returns the text it releases. `finish` is set when it is the last one."""
        ids = self.ids
        ids.append(token)
        text = self._texts[token]
        if text is not None and len(ids) < self._ids_max and token not in self._stop_ids and self._text.clear:
            return text  # nearly always; the rest says the same of any token, at length
        return self._release(token, len(ids) - self.prompt_tokens)

    def _release(self, token: int, written: int) -> str:
        text, stopped = self._text.push(self._vocabulary.token_bytes[token])
        if token in self._stop_ids:
            self.finish = EndReason.STOP_TOKEN
        elif stopped:
            self.finish = EndReason.STOP_SEQUENCE
        elif written >= self.budget:
            self.finish = EndReason.MAX_TOKENS
        else:
            return text
        return text if stopped else text + self._text.flush()

    def block_hash(self, index: int) -> bytes:
        """The chained hash of full block `index`."""
        while len(self._hashes) <= index:
            last = self._hashes[-1] if self._hashes else chain_root(self.demand.domain)
            at = len(self._hashes) * BLOCK_TOKENS
            self._hashes.append(next_hash(last, self.ids[at : at + BLOCK_TOKENS]))
        return self._hashes[index]

    def chunk(self, count: int) -> SeqChunk:
        """The next `count` tokens to compute, as a value."""
        start, ids = self.num_computed, self.ids
        end = start + count
        sample = self._sample_params() if end == len(ids) else None
        return SeqChunk(self.id, self.admission, start, tuple(ids[start:end]), self.blocks, sample)

    def decode_chunk(self) -> SeqChunk:
        """`chunk(1)` of a sequence that decodes: what nearly every call asks for."""
        if self._penalised:
            return self.chunk(1)
        ids = self.ids
        last = len(ids) - 1
        sample = SampleParams(self.sampling, self.seed, last + 1 - self.prompt_tokens)
        return SeqChunk(self.id, self.admission, last, (ids[last],), self.blocks, sample)

    def _sample_params(self) -> SampleParams:
        prompt = self.prompt_tokens
        if not self._penalised:
            return SampleParams(self.sampling, self.seed, len(self.ids) - prompt)
        written = self.ids[prompt:]
        return SampleParams(self.sampling, self.seed, len(written), tuple(self.ids[:prompt]), tuple(written))


def penalised(sampling: Sampling) -> bool:
    """Earlier tokens change the odds, so that the sampler must see them."""
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
