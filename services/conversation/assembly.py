"""A request's context as token ids: template and people's words joined as ids, inside a budget.

instructions │ turn 1 │ turn 2 │ ... │ message          fixed order, so that a longer context begins as a
             └─────── history ─────┘                    shorter one did and finds its prefix in the cache

template   <|im_start|>user↵             <|im_end|>↵<|im_start|>assistant↵                <|im_end|>↵ ...
pieces                      how are you                                    fine<|im_end|>
                            encoded without control tokens                 ids as the model wrote them

The template's pieces are the only ones in which control tokens mean anything. Past the budget the oldest turns go, but
what was said as system or developer stays. Pure: encoding and rendering are done by others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PINNED_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True)
class Piece:
    """What one role said, as ids. `written`: by the model itself, so it may end with its own stop token."""

    role: str
    ids: Sequence[int]
    written: bool = False


@dataclass(frozen=True)
class Skeleton:
    """A rendered template without its contents: `literals[0] slot literals[1] slot ... literals[-1]`, as ids.

    `slots[i]` is the place of the piece that stands between `literals[i]` and `literals[i + 1]`. A template may leave
    a piece out or repeat it.
    """

    literals: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Context:
    ids: list[int]
    turns_dropped: int = 0


class ContextTooLongError(Exception):
    """Even without any history the context is past the limit."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(f"{count} tokens, at most {limit}")
        self.count, self.limit = count, limit


@dataclass(frozen=True)
class Budget:
    """How a model's context is shared between prompt and output.

    History is taken in up to `history_max` prompt tokens; a message that needs more alone may have up to `prompt_max`.
    """

    history_max: int
    prompt_max: int
    _context: int
    _output_max: int

    def output(self, prompt: int) -> int:
        """Most output tokens after a prompt of `prompt` tokens (at most `prompt_max`); at least 1."""
        return min(self._output_max, self._context - prompt)


def budget(context_tokens: int, output_tokens_max: int, asked: int | None) -> Budget:
    """`asked` output tokens are kept free whole. When nothing was asked for, history leaves a quarter of the context
    free, and a long message a 32nd.
    """
    if asked is not None:
        output_max = min(asked, output_tokens_max)
        most = context_tokens - output_max
        return Budget(most, most, context_tokens, output_max)
    kept = [min(output_tokens_max, max(1, context_tokens // share)) for share in (4, 32)]
    return Budget(context_tokens - kept[0], context_tokens - kept[1], context_tokens, output_tokens_max)


def assemble(
    instructions: Sequence[Piece],
    history: Sequence[Sequence[Piece]],
    message: Sequence[Piece],
    *,
    room: Budget,
    skeleton: Callable[[tuple[str, ...]], Skeleton],
    stop_ids: frozenset[int],
) -> Context:
    """The context with as much of `history` (turns, oldest first) as there is room for.

    Raises ContextTooLongError when instructions, pinned items and message alone do not fit.
    """

    def joined(dropped: int) -> list[int]:
        pinned = [piece for turn in history[:dropped] for piece in turn if piece.role in PINNED_ROLES]
        kept = [piece for turn in history[dropped:] for piece in turn]
        pieces = [*instructions, *pinned, *kept, *message]
        return join(pieces, skeleton(tuple(piece.role for piece in pieces)), stop_ids)

    ids, low, high = joined(0), 1, len(history)
    if len(ids) <= room.history_max:
        return Context(ids)
    # Dropping more never makes it longer, so the fewest turns to drop are found by halving.
    while low < high:
        middle = (low + high) // 2
        if len(joined(middle)) <= room.history_max:
            high = middle
        else:
            low = middle + 1
    ids = joined(high)
    if len(ids) > room.prompt_max:
        raise ContextTooLongError(len(ids), room.prompt_max)
    return Context(ids, turns_dropped=high)


def join(pieces: Sequence[Piece], skeleton: Skeleton, stop_ids: frozenset[int]) -> list[int]:
    """Literals and pieces as one list of ids."""
    ids = list(skeleton.literals[0])
    for place, literal in zip(skeleton.slots, skeleton.literals[1:], strict=True):
        piece = pieces[place]
        ids += _without_stop(piece, literal, stop_ids)
        ids += literal
    return ids


def _without_stop(piece: Piece, following: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """A written piece without its last token when that is the stop token which the template writes next itself."""
    ids = piece.ids
    if piece.written and ids and ids[-1] in stop_ids and following and following[0] == ids[-1]:
        return ids[:-1]
    return ids
