"""Questions to the conversation service. Each may be asked twice: sends carry a key, the rest change nothing by it."""

import asyncio
from typing import TypeVar

import msgspec

from services.gateway.http import unavailable
from shared import clock
from shared.bus import Bus, BusMessage
from shared.errors import BusError, BusTimeoutError, NoRespondersError, RefusedError
from shared.limits import CONVERSATION_TRY_S, KEY_LOOKUP_S, PAYLOAD_BYTES_MAX, REQUEST_TIMEOUT_S
from shared.messages import (
    AddItems,
    Allowance,
    ConversationItem,
    ConversationItems,
    ConversationPage,
    ConversationRef,
    ConversationView,
    CreateConversation,
    Done,
    InputItem,
    InputItems,
    ItemRef,
    KeyFound,
    KeyLookup,
    ListConversations,
    ListItems,
    Message,
    Principal,
    Refused,
    RegenerateReply,
    ReplyRef,
    ReplyView,
    SendMessage,
    Sent,
    UpdateConversation,
    encode,
)
from shared.outcomes import Refusal, RefusalKind
from shared.subjects import Names

_RETRY_S = 0.1
_ENVELOPE_BYTES = 4096  # the bus's own headers beside a payload

_Answer = (
    Sent | ReplyView | Done | InputItems | KeyFound | ConversationView | ConversationPage | ConversationItems | Refused
)
_answer: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)
A = TypeVar("A", bound=Message)


class OverTokensError(RefusedError):
    """The user's tokens do not suffice; `allowance` is what there is."""

    def __init__(self, refusal: Refusal, allowance: Allowance) -> None:
        super().__init__(refusal)
        self.allowance = allowance


class Conversation:
    """All methods raise RefusedError: with conversation's own refusal, or UNAVAILABLE when nobody answers in time."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names

    async def send(self, message: SendMessage) -> Sent:
        return await self._ask("send", message, Sent)

    async def get(self, ref: ReplyRef) -> ReplyView:
        return await self._ask("get", ref, ReplyView)

    async def cancel(self, ref: ReplyRef) -> None:
        await self._ask("cancel", ref, Done)

    async def delete(self, ref: ReplyRef) -> None:
        await self._ask("delete", ref, Done)

    async def input_items(self, ref: ReplyRef) -> tuple[InputItem, ...]:
        return (await self._ask("input_items", ref, InputItems)).items

    async def create_conversation(self, order: CreateConversation) -> ConversationView:
        return await self._ask("conversation_create", order, ConversationView)

    async def list_conversations(self, order: ListConversations) -> ConversationPage:
        return await self._ask("conversation_list", order, ConversationPage)

    async def get_conversation(self, ref: ConversationRef) -> ConversationView:
        return await self._ask("conversation_get", ref, ConversationView)

    async def update_conversation(self, order: UpdateConversation) -> ConversationView:
        return await self._ask("conversation_update", order, ConversationView)

    async def conversation_items(self, order: ListItems) -> ConversationItems:
        return await self._ask("conversation_items", order, ConversationItems)

    async def add_items(self, order: AddItems) -> ConversationItems:
        return await self._ask("conversation_items_add", order, ConversationItems)

    async def get_item(self, ref: ItemRef) -> ConversationItem:
        return (await self._ask("conversation_item", ref, ConversationItems)).items[0]

    async def delete_item(self, ref: ItemRef) -> ConversationView:
        return await self._ask("conversation_item_delete", ref, ConversationView)

    async def delete_conversation(self, ref: ConversationRef) -> None:
        await self._ask("conversation_delete", ref, Done)

    async def regenerate(self, order: RegenerateReply) -> Sent:
        return await self._ask("regenerate", order, Sent)

    async def key(self, digest: bytes, *, patient: bool) -> Principal:
        question = KeyLookup(digest=digest)
        return (await self._ask("key", question, KeyFound, timeout_s=KEY_LOOKUP_S, patient=patient)).principal

    async def _ask(
        self, verb: str, question: Message, kind: type[A], *, timeout_s: float | None = None, patient: bool = True
    ) -> A:
        """Nobody there: again for a few seconds. No answer in time: once more, to another one with luck.

        Whoever is not patient asks once.
        """
        timeout_s = REQUEST_TIMEOUT_S if timeout_s is None else timeout_s
        subject, data = self._names.conversation(verb), encode(question)
        if len(data) > PAYLOAD_BYTES_MAX - _ENVELOPE_BYTES:
            said = f"The request is {len(data)} bytes when parsed; at most {PAYLOAD_BYTES_MAX - _ENVELOPE_BYTES} fit."
            raise RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=said))
        give_up_s = clock.now_s() + min(CONVERSATION_TRY_S, timeout_s)
        tries_left = 2 if patient else 1  # that may end without an answer
        while tries_left:
            try:
                return self._read(await self._bus.request(subject, data, timeout_s=timeout_s), kind)
            except NoRespondersError:
                if not patient or clock.now_s() >= give_up_s:
                    break
                await asyncio.sleep(_RETRY_S * (0.5 + clock.random_unit()))
            except BusTimeoutError:
                tries_left -= 1
        raise unavailable("The conversation service does not answer. Try again in a moment.")

    def _read(self, answer: BusMessage, kind: type[A]) -> A:
        said = _answer.decode(answer.data)
        if isinstance(said, Refused):
            if said.allowance is not None:
                raise OverTokensError(said.refusal, said.allowance)
            raise RefusedError(said.refusal)
        if not isinstance(said, kind):
            raise BusError(f"{type(said).__name__} is no answer to a question that wants {kind.__name__}")
        return said
