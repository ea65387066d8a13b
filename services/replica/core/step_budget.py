"""How many prompt tokens a step may hold: as many as keep it as short as those who wait for a next token are owed.

    nobody decodes                  ALONE_STEP_S_MAX    a cancelled prompt is gone within it; tokens bound it to
                                    ALONE_STEP_S        where a prompt does not yet attend to much
    a prompt for every few decodes  MIXED_STEP_S        beside the decodes: all are served soonest when all decode soon
    far more decodes than prompts   twice the decodes'  as it was when the prompt came, or PROTECTED_STEP_S, if that is
                                    own step            longer: the many are not slowed down for the few

A token costs more the more it attends to, so that chunks of a long prompt become shorter towards its end. Where a step
costs much before it holds a single token (weights read in float32), the second and third line are some times that base
instead, up to ALONE_STEP_S_MAX: a few long steps and not many that are mostly base. Pure.
"""

from math import sqrt

from shared.messages import StepModel

ALONE_STEP_S = 0.25
ALONE_STEP_S_MAX = 0.5
MIXED_STEP_S = 0.1
PROTECTED_STEP_S = 0.02  # fifty tokens a second: more than anybody reads
_PROTECTED_FACTOR = 1.9  # times the decodes' own step: less than twice, as predictions err
_LEAST_SHARE = 0.25  # of the decodes' own step as it is now: a prompt comes to its end however they grow meanwhile
_MANY = 4  # decodes for each prompt
# Times the base, that prompts may take, within ALONE_STEP_S_MAX: beside decodes, and when nobody decodes.
_WORK, _WORK_ALONE = 8, 15
_ANY = 1 << 30  # tokens, where they cost nothing
CHUNK_ROWS = 4  # kernels compute so many rows together: chunks are a multiple, and one of so many is in any step


class StepBudget:
    """What is left of one step for prompts: tokens, and seconds where a step model tells what tokens cost."""

    def __init__(self, tokens: int, seconds: float | None, model: StepModel) -> None:
        self._tokens, self._seconds, self._model = tokens, seconds, model

    @property
    def open(self) -> bool:
        """There is room for one more chunk."""
        return self._tokens > 0 and (self._seconds is None or self._seconds > 0)

    def take(self, start: int, wanted: int) -> int:
        """Tokens of a chunk from position `start` on; at least one while `open`."""
        count = min(wanted, self._tokens)
        if self._seconds is not None:
            fitting = _within(self._model, start, self._seconds)
            count = min(count, max(1, fitting // CHUNK_ROWS) * CHUNK_ROWS)
            self._seconds -= chunk_s(self._model, start, count)
        self._tokens -= count
        return count


def attended(start: int, count: int) -> int:
    """Pairs of a token and one it attends to, itself included, in a chunk of `count` from position `start` on."""
    return count * start + count * (count + 1) // 2


def chunk_s(model: StepModel, start: int, count: int) -> float:
    """What a chunk adds to a step."""
    return model.per_token_s * count + model.per_attended_s * attended(start, count)


def room_s(model: StepModel, *, decodes_s: float, decodes: int, prompts: int, grown_s: float = 0.0) -> float:
    """Seconds of a step that prompts may take; `decodes_s` is what it takes without them.

    `grown_s` of that is what the decodes wrote since the prompts came. It is taken from the prompts: else steps would
    grow by twice as much, the prompt's end would move away, and the decodes would grow meanwhile.
    """
    if decodes == 0:
        return alone_room_s(model)
    if decodes <= _MANY * prompts:
        return mixed_room_s(model)
    whole_s = max(PROTECTED_STEP_S, _PROTECTED_FACTOR * (decodes_s - grown_s))
    return max(whole_s - decodes_s, _LEAST_SHARE * decodes_s)


def alone_room_s(model: StepModel) -> float:
    """Seconds for prompts in a step without decodes.

    A step that is long whatever is in it may be twice as long: else its prompts would wait for ever to keep it short.
    """
    return max(ALONE_STEP_S_MAX - model.base_s, model.base_s)


def mixed_room_s(model: StepModel) -> float:
    """Seconds for prompts in a step where about as many wait for their first token as for their next one."""
    return max(MIXED_STEP_S - model.base_s, min(_WORK * model.base_s, alone_room_s(model)))


def tokens_s(model: StepModel) -> tuple[float, float]:
    """Seconds of a step whose tokens attend to little: without decodes, and beside them."""
    alone_s = model.base_s + min(max(ALONE_STEP_S - model.base_s, _WORK_ALONE * model.base_s), alone_room_s(model))
    return alone_s, model.base_s + mixed_room_s(model)


def _within(model: StepModel, start: int, seconds: float) -> int:
    """The most tokens from position `start` on that take `seconds`; many, where they cost nothing."""
    each, more = model.per_token_s + model.per_attended_s * (start + 0.5), model.per_attended_s / 2
    if each <= 0:
        return _ANY
    if more <= 0:
        return int(min(_ANY, seconds / each))
    return int(min(_ANY, 2 * seconds / (each + sqrt(each * each + 4 * more * seconds))))
