"""The context of a message: its history from the rows (or from the log of a reply that ended just now), as pieces."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.conversation.assembly import (
    Budget,
    ContextTooLongError,
    Piece,
    assemble,
    budget,
)
from services.conversation.history_cache import HistoryCache, HistoryName
from services.conversation.prompts import PromptModel
from services.conversation.replies import State
from services.conversation.rows import EncodedItem, Turn
from services.conversation.store import Store
from services.conversation.template import TemplateError
from shared import clock
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.log_store import LogStore
from shared.messages import InputItem, SendMessage
from shared.outcomes import EndReason, Refusal, RefusalKind

SETTLE_S = 2.0  # the turn before may have been stopped a moment ago: its end is waited for this long
SETTLE_POLL_S = 0.05


@dataclass(frozen=True)
class MessageContext:
    """A prompt, and the message's own items as they will be stored."""

    parent_id: str | None
    ids: list[int]
    items: Sequence[EncodedItem]
    budget: int  # most output tokens
    turns_dropped: int
    running: bool = False  # a turn of its history is still being written: read again once that has ended
    line_version: int = 0  # of its conversation
    in_flight: Sequence[str] = ()  # there
    history: HistoryName | None = None  # the same history for another model


class Contexts:
    def __init__(self, store: Store, logs: LogStore, cache: HistoryCache) -> None:
        self._store, self._logs, self._cache = store, logs, cache

    async def of(
        self,
        message: SendMessage,
        model: PromptModel,
        parent_id: str | None,
        name: HistoryName | None = None,
        *,
        wait: bool = True,
    ) -> MessageContext:
        """`parent_id` is the last turn of its history, `name` the history's in the cache. `wait`: for the end of a turn
        that is still being written; else it counts as far as it is.

        Raises RefusedError: NOT_FOUND, PROMPT_TOO_LONG, BAD_REQUEST.
        """
        card, echo = model.card, message.echo
        _check_bias(message.sampling.logit_bias, model)
        room = budget(card.context_tokens, card.output_tokens_max, echo.max_output_tokens)
        items = await encode_items(message.items, model)
        instructions = [] if echo.instructions is None else [Piece("system", await model.encode(echo.instructions))]
        turns = await self._turns(message, parent_id, room.history_max, name, wait=wait)
        history = [await turn_pieces(turn, model) for turn in turns]
        try:
            context = assemble(
                instructions,
                history,
                [Piece(item.item.role, item.ids) for item in items],
                room=room,
                skeleton=model.skeleton,
                stop_ids=model.stop_ids,
            )
        except ContextTooLongError as error:
            raise RefusedError(_too_long(model, room, error)) from None
        except TemplateError as error:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.BAD_REQUEST,
                    message=f"{card.id} does not take these roles in this order: {error}",
                    param="input",
                )
            ) from None
        running = any(turn.state is not State.ENDED for turn in turns)
        most = room.output(len(context.ids))
        return MessageContext(parent_id, context.ids, items, most, context.turns_dropped, running)

    async def _turns(
        self, message: SendMessage, last_id: str | None, tokens_max: int, name: HistoryName | None, *, wait: bool
    ) -> list[Turn]:
        if last_id is None:
            return []
        known = None if name is None else await self._cache.get(name, tokens_max)
        if known is not None and known.last_id == last_id:
            return known.turns
        turns = None
        if known is not None:
            turns = await self._store.history_since(message.principal, last_id, known.last_id)
        if turns is not None and known is not None:
            turns = [*known.turns, *turns]
        else:
            turns = await self._store.history(message.principal, last_id, tokens_max)
        if turns is None:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.NOT_FOUND,
                    message=f"No reply {last_id} can be continued: it is unknown, deleted, or was not stored.",
                    param="previous_response_id",
                )
            )
        read = self._settled if wait else self._as_it_is
        every = [turn if turn.state is State.ENDED else await read(turn) for turn in turns]
        if name is not None and all(turn.state is State.ENDED for turn in every):
            await self._cache.remember(name, last_id, tokens_max, every)
        return every

    async def _so_far(self, turn: Turn) -> Turn:
        """A turn whose end has not been archived, from its log, ended or not; raises LogGoneError."""
        try:
            view = await self._logs.read(turn.reply_id)
        except TokenLogError:  # stored a moment ago: nothing is written yet
            return turn
        read = replace(turn, text=view.text, ids=list(view.ids))
        return read if view.ended is None else replace(read, state=State.ENDED, reason=view.ended.reason)

    async def _as_it_is(self, turn: Turn) -> Turn:
        """The same, and a turn whose log is gone as its row has it."""
        try:
            return await self._so_far(turn)
        except LogGoneError:
            return turn

    async def _settled(self, turn: Turn) -> Turn:
        """The same once it has ended: the text before `end` is the reply."""
        give_up_s = clock.now_s() + SETTLE_S
        while True:
            try:
                read = await self._so_far(turn)
            except LogGoneError:
                break
            if read.state is State.ENDED:
                return read
            if clock.now_s() >= give_up_s:
                break
            await asyncio.sleep(SETTLE_POLL_S)
        raise RefusedError(
            Refusal(
                kind=RefusalKind.BAD_REQUEST,
                message=f"Reply {turn.reply_id} is still being written. Stop it or wait for its end, then continue.",
                param="previous_response_id",
            )
        )


async def encode_items(items: Sequence[InputItem], model: PromptModel) -> list[EncodedItem]:
    """Items with an id and their ids, in order."""
    return [
        EncodedItem(
            item if item.id else InputItem(role=item.role, text=item.text, id=clock.new_item_id(), kind=item.kind),
            await model.encode(item.text),
        )
        for item in items
    ]


async def turn_pieces(turn: Turn, model: PromptModel) -> list[Piece]:
    """A turn as the model saw and wrote it; encoded again where another tokenizer or a stop string cut in."""
    same = turn.tokenizer == model.tokenizer_name
    pieces = [
        Piece(encoded.item.role, encoded.ids if same else await model.encode(encoded.item.text))
        for encoded in turn.items
    ]
    if turn.pinned_only or not turn.replied:
        return pieces
    if same and turn.reason is not EndReason.STOP_SEQUENCE:
        return [*pieces, Piece("assistant", turn.ids, written=True)]
    return [*pieces, Piece("assistant", await model.encode(turn.text))]


def _check_bias(logit_bias: Mapping[int, float], model: PromptModel) -> None:
    """Raises RefusedError for a token that the model does not have: only its vocabulary can tell."""
    foreign = [token for token in logit_bias if token >= model.vocab_size]
    if foreign:
        said = f"logit_bias names token {foreign[0]}, but those of {model.card.id} are 0 to {model.vocab_size - 1}."
        raise RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=said, param="logit_bias"))


def _too_long(model: PromptModel, room: Budget, error: ContextTooLongError) -> Refusal:
    kept = model.card.context_tokens - room.prompt_max
    return Refusal(
        kind=RefusalKind.PROMPT_TOO_LONG,
        message=f"The message is {error.count} tokens long, but {model.card.id} takes at most {error.limit}: "
        f"its context holds {model.card.context_tokens} tokens, of which {kept} are kept for the reply.",
        param="input",
    )
