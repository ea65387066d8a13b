"""The scheduler: which sequences compute how many tokens in the next step.

    submit ──> lane (paid | free | background, each FIFO) ──admit──> running ──finish──> gone
                 ^                                                     │
                 └───────────── preempt: newest of the lowest lane ────┘

A step has a token budget. Running sequences that need one token (decode) come first, then, lane by lane, those with
more to catch up with (prompts in chunks), then arrivals. A sequence gets the blocks of all its known tokens when it is
admitted, and one more each time it grows past them; when none is free, the newest sequence of the lowest lane goes back
to its lane and is recomputed later. The oldest of the highest lane never goes, so something always advances.

Pure: one call of `plan` and one of `commit` per step, times are arguments.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.plan import Freed, Odds, Output, SeqChunk, StepPlan, StepResult, blocks_for
from services.replica.core.sequence import Demand, Sequence
from services.replica.core.step_budget import StepBudget, attended, room_s
from services.replica.core.step_cost import BY_TOKENS, cost_rates
from services.replica.core.step_fit import predict
from shared.limits import BLOCK_TOKENS
from shared.messages import StepModel, TokenLogprob
from shared.tiers import LANE_ORDER


class WhyNot(StrEnum):
    """Why a sequence was not taken in."""

    FULL = "full"  # come again, or go elsewhere
    NEVER_FITS = "never_fits"  # larger than this engine's memory or the model's context
    BAD_REQUEST = "bad_request"


@dataclass(frozen=True, slots=True)
class NotTaken:
    sequence_id: str
    reason: WhyNot
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Token budgets are per step. `reserve_blocks` stay free at an admission, so that who runs can grow."""

    running_max: int
    waiting_max: int
    step_tokens_max: int  # when nobody decodes
    mixed_tokens_max: int  # of prompts beside decodes: keeps the gaps between tokens short
    reserve_blocks: int
    context_max: int  # prompt and output together

    def __post_init__(self) -> None:
        if not 0 < self.running_max < self.step_tokens_max or not 0 < self.mixed_tokens_max <= self.step_tokens_max:
            raise ValueError(
                f"a step of {self.step_tokens_max} tokens must hold {self.running_max} decodes and a chunk"
            )

    def prompt_tokens(self, decodes: int) -> int:
        """Most tokens of prompts in a step, however quick it is."""
        if decodes == 0:
            return self.step_tokens_max
        return min(self.mixed_tokens_max, self.step_tokens_max - decodes)


@dataclass(frozen=True, slots=True)
class Load:
    blocks_free: int
    running: int
    waiting: int
    waiting_tokens: dict[str, int]  # per tier: tokens not yet computed, running prompts included


class Lane:
    """Who waits in one tier, first come first served. A preempted sequence is older than all others: in front."""

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._waiting

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._waiting.values()), None)

    def add(self, sequence: Sequence, *, in_front: bool = False) -> None:
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=not in_front)
        self.tokens += sequence.remaining

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.id]
        self.tokens -= sequence.remaining


class Scheduler:
    def __init__(self, *, pool: BlockPool, vocabulary: Vocabulary, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self._vocabulary = vocabulary
        self._sequences: dict[str, Sequence] = {}
        self._lanes = tuple(Lane() for _ in LANE_ORDER)
        self._running: list[Sequence] = []  # in `order`
        self._behind: list[Sequence] = []  # in the last plan with more than one token to compute
        self._leaving: dict[str, None] = {}  # cancelled, to go at the next plan
        self._arrivals = 0
        self._admissions = 0
        self._steps = 0

    # --- what the shell asks -----------------------------------------------------------------------------

    def submit(self, demand: Demand, now: float) -> NotTaken | Output | None:
        """Take a sequence in. None: it waits. An Output: what it had written already was its end, nothing will run."""
        refusal = self._refuse(demand)
        if refusal is not None:
            return refusal
        self._arrivals += 1
        sequence = Sequence(demand, self._vocabulary, arrival=self._arrivals, now=now)
        if sequence.finish is not None:
            return Output(sequence.id, (), (), finish=sequence.finish)
        if sum(map(len, self._lanes)) >= self.limits.waiting_max:
            return NotTaken(demand.sequence_id, WhyNot.FULL, f"{self.limits.waiting_max} sequences wait already")
        self._sequences[sequence.id] = sequence
        self._lane(sequence).add(sequence)
        return None

    def _refuse(self, demand: Demand) -> NotTaken | None:
        name, limits = demand.sequence_id, self.limits
        if name in self._sequences:
            return NotTaken(name, WhyNot.BAD_REQUEST, "this sequence is here already")
        size = len(self._vocabulary)
        if not demand.prompt or not all(
            min(ids) >= 0 and max(ids) < size for ids in (demand.prompt, demand.written) if ids
        ):
            return NotTaken(name, WhyNot.BAD_REQUEST, f"token ids must be 0..{size - 1}, and there must be a prompt")
        if not all(0 <= token < size for token in demand.sampling.logit_bias):
            return NotTaken(name, WhyNot.BAD_REQUEST, f"logit_bias may only name tokens 0..{size - 1}")
        most = len(demand.prompt) + demand.budget
        if most > limits.context_max:
            return NotTaken(name, WhyNot.NEVER_FITS, f"{most} tokens are more than the context of {limits.context_max}")
        # The last token is sampled and never computed: it needs no place.
        if blocks_for(most - 1) > self.pool.total:
            room = self.pool.total * BLOCK_TOKENS
            return NotTaken(name, WhyNot.NEVER_FITS, f"{most} tokens are more than the {room} this engine has room for")
        return None

    def cancel(self, sequence_id: str) -> None:
        """It leaves at the next plan, whatever it is doing; idempotent, and known or not it is answered by a Freed."""
        self._leaving[sequence_id] = None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._leaving)

    def load(self) -> Load:
        waiting_tokens = {tier.value: lane.tokens for tier, lane in zip(LANE_ORDER, self._lanes, strict=True)}
        for sequence in self._behind:
            if sequence.admission and sequence.remaining > 1:
                waiting_tokens[sequence.demand.tier.value] += sequence.remaining
        return Load(self.pool.free, len(self._running), sum(map(len, self._lanes)), waiting_tokens)

    def check(self) -> None:
        """Audit: blocks conserved, everyone in exactly one place, running in order."""
        self.pool.check(sequence.blocks for sequence in self._running)
        waiting = {name for lane in self._lanes for name in self._sequences if name in lane}
        running = {sequence.id for sequence in self._running}
        assert not waiting & running, "a sequence waits and runs"
        assert waiting | running == self._sequences.keys(), "a sequence is nowhere"
        assert self._running == sorted(self._running, key=_order), "running sequences are out of order"
        for lane in self._lanes:
            members = [sequence for name, sequence in self._sequences.items() if name in lane]
            assert lane.tokens == sum(sequence.remaining for sequence in members), "a lane counts its tokens wrong"

    # --- plan ------------------------------------------------------------------------------------------------

    def plan(self, now: float, model: StepModel | None = None) -> StepPlan:
        """The next step. Empty of chunks only when nobody is left. With a step `model` it is kept short, too."""
        self._steps += 1
        freed = self._drop_leaving()
        chunks: list[SeqChunk] = []
        preempted = self._plan_decodes(chunks)
        budget = self._budget(chunks, model)
        door_open = not preempted
        behind = tuple(self._behind)  # arrivals, that are added to it, have their chunk already
        for lane_rank, lane in enumerate(self._lanes):
            _plan_catch_up([one for one in behind if one.order[0] == lane_rank], chunks, budget)
            if door_open:
                door_open = self._plan_arrivals(lane, chunks, budget, now)
        return StepPlan(self._steps, tuple(chunks), freed, preempted)

    def _budget(self, decodes: list[SeqChunk], model: StepModel | None) -> StepBudget:
        tokens = self.limits.prompt_tokens(len(decodes))
        if model is None:
            return StepBudget(tokens, None, BY_TOKENS)
        places = self.limits.running_max - len(self._running)
        prompts = len(self._behind) + min(places, sum(map(len, self._lanes)))
        if not prompts:
            return StepBudget(tokens, 0.0, model)
        count, read = len(decodes), sum(chunk.start + 1 for chunk in decodes)
        age = self._steps - self._behind[0].admitted_step if self._behind else 0  # of the prompt that is served first
        decodes_s = predict(model, count, read)
        grown_s = model.per_attended_s * min(read, age * count)
        seconds = room_s(model, decodes_s=decodes_s, decodes=count, prompts=prompts, grown_s=grown_s)
        return StepBudget(tokens, seconds, model)

    def _drop_leaving(self) -> tuple[Freed, ...]:
        freed = []
        for name in self._leaving:
            sequence = self._sequences.pop(name, None)
            if sequence is None:
                freed.append(Freed(name))
                continue
            if sequence.admission:
                self._stop_running(sequence)
            else:
                self._lane(sequence).remove(sequence)
            freed.append(Freed(name, sequence.engine_s))
        self._leaving.clear()
        return tuple(freed)

    def _plan_decodes(self, chunks: list[SeqChunk]) -> tuple[str, ...]:
        """One token for everyone who needs one, and a note of who needs more; returns who had to make room.

        Served in order, while victims come from the other end: nobody who is planned already is ever preempted.
        """
        preempted: list[str] = []
        running = self._running
        self._behind = []
        place = 0
        while place < len(running):
            sequence = running[place]
            known = len(sequence.ids)
            if known - sequence.num_computed > 1:
                self._behind.append(sequence)
            elif known <= len(sequence.blocks) * BLOCK_TOKENS or self._grow(sequence, preempted):
                chunks.append(sequence.decode_chunk())
            else:
                break
            place += 1
        return tuple(preempted)

    def _grow(self, sequence: Sequence, preempted: list[str]) -> bool:
        """Blocks for its next token; False when it was itself the newest and had to go."""
        missing = blocks_for(sequence.num_tokens) - len(sequence.blocks)
        while missing > self.pool.free:
            victim = self._running[-1]
            self._stop_running(victim)
            victim.num_computed = victim.num_published = 0
            self._lane(victim).add(victim, in_front=True)
            preempted.append(victim.id)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.take(missing)
        return True

    def _plan_arrivals(self, lane: Lane, chunks: list[SeqChunk], budget: StepBudget, now: float) -> bool:
        """Admit from a lane while there is budget; whether later lanes may be admitted from.

        A head that does not fit closes the door for the lanes behind it: they would take what it waits for.
        """
        while budget.open and (head := lane.head) is not None:
            if len(self._running) >= self.limits.running_max or not self._admit(head, now):
                return False
            chunks.append(head.chunk(budget.take(head.num_computed, head.remaining)))
            self._behind.append(head)
        return True

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence its blocks: those the cache holds, and fresh ones for the rest of its tokens."""
        cached = self._cached_prefix(sequence)
        fresh = blocks_for(sequence.num_tokens) - len(cached)
        left = self.pool.free - fresh - sum(self.pool.is_free(block) for block in cached)
        if left < (self.limits.reserve_blocks if self._running else 0):
            return False
        self._lane(sequence).remove(sequence)
        self.pool.share(cached)
        sequence.blocks = (*cached, *self.pool.take(fresh))
        sequence.num_published = len(cached)
        sequence.num_computed = len(cached) * BLOCK_TOKENS
        self._admissions += 1
        sequence.admission, sequence.admitted_step = self._admissions, self._steps
        if sequence.planned_s is None:
            sequence.planned_s = now
            sequence.cached_tokens = min(sequence.num_computed, len(sequence.demand.prompt))
        insort(self._running, sequence, key=_order)
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least the last token to compute, in a block of its own."""
        found: list[int] = []
        for index in range((sequence.num_tokens - 1) // BLOCK_TOKENS):
            block = self.pool.find(sequence.block_hash(index))
            if block is None:
                break
            found.append(block)
        return found

    # --- commit ----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float, model: StepModel = BY_TOKENS) -> list[Output]:
        """Take a step's result in. What belongs to a sequence that left or was preempted meanwhile is ignored.

        `model` says how the step's seconds are split over its sequences.
        ValueError when there are more or fewer sampled tokens than sampled chunks.
        """
        if len(result.sampled) != len(plan.sampled_chunks):
            raise ValueError(f"{len(result.sampled)} tokens for {len(plan.sampled_chunks)} sampled chunks")
        each_s, per_token_s, per_attended_s = cost_rates(plan, model, result.seconds)
        known, leaving = self._sequences.get, self._leaving
        outputs = []
        for chunk, token, odds in _with_tokens(plan, result):
            sequence = known(chunk.sequence_id)
            if sequence is None or sequence.admission != chunk.admission or (leaving and sequence.id in leaving):
                continue
            count = len(chunk.ids)
            sequence.num_computed = computed = chunk.start + count
            pairs = computed if count == 1 else attended(chunk.start, count)
            sequence.engine_s += each_s + per_token_s * count + per_attended_s * pairs
            if computed // BLOCK_TOKENS > sequence.num_published:
                self._publish(sequence)
            if token is None:
                continue
            text = sequence.append(token)
            if sequence.finish is None and odds is None and sequence.first_token_s is not None:
                outputs.append(Output(chunk.sequence_id, (token,), (text,)))
            else:
                outputs.append(self._note_token(sequence, token, text, odds, now))
        return outputs

    def _publish(self, sequence: Sequence) -> None:
        """Full blocks that are now computed may be found by others, decoded ones too."""
        for index in range(sequence.num_published, sequence.num_computed // BLOCK_TOKENS):
            self.pool.publish(sequence.blocks[index], sequence.block_hash(index))
            sequence.num_published = index + 1

    def _note_token(self, sequence: Sequence, token: int, text: str, odds: Odds | None, now: float) -> Output:
        """What is said of a token that is the first, or the last, or whose odds are asked for."""
        logprobs = () if odds is None else (self._named(token, odds),)
        first = sequence.first_token_s is None
        if first:
            sequence.first_token_s = now
        if sequence.finish is not None:
            del self._sequences[sequence.id]
            self._stop_running(sequence)
        return Output(
            sequence.id,
            (token,),
            (text,),
            cached_tokens=sequence.cached_tokens if first else None,
            queued_s=sequence.queued_s if first else None,
            finish=sequence.finish,
            engine_s=sequence.engine_s if sequence.finish is not None else 0.0,
            logprobs=logprobs,
        )

    def _named(self, token: int, odds: Odds) -> TokenLogprob:
        """Odds with the tokens' bytes, as whoever reads them has no vocabulary."""
        names = self._vocabulary.token_bytes
        return TokenLogprob(names[token], odds.logprob, tuple((names[other], value) for other, value in odds.top))

    # --- leaves ----------------------------------------------------------------------------------------------

    def _lane(self, sequence: Sequence) -> Lane:
        return self._lanes[sequence.order[0]]

    def _stop_running(self, sequence: Sequence) -> None:
        """Out of the batch, its blocks given back; late results no longer match its admission."""
        del self._running[bisect_left(self._running, sequence.order, key=_order)]
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.admission = (), 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _with_tokens(plan: StepPlan, result: StepResult) -> Iterable[tuple[SeqChunk, int | None, Odds | None]]:
    """Each chunk with its token and that token's odds; None where there is none."""
    sampled, odds = iter(result.sampled), iter(result.odds or repeat(None))
    if len(plan.sampled_chunks) == len(plan.chunks):
        return zip(plan.chunks, sampled, odds, strict=False)
    return [
        (chunk, next(sampled), next(odds)) if chunk.sample is not None else (chunk, None, None) for chunk in plan.chunks
    ]


def _plan_catch_up(behind: Iterable[Sequence], chunks: list[SeqChunk], budget: StepBudget) -> None:
    """Chunks for running sequences that have more than one token to compute."""
    for sequence in behind:
        if not budget.open:
            break
        chunks.append(sequence.chunk(budget.take(sequence.num_computed, sequence.remaining)))
