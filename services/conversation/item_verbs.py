"""What may be asked about the items of a conversation: list, add, get, delete.

Items that are added are a turn behind the head to which nobody has replied: the next message follows them. What is
deleted is out of every later context, on every branch that has it.
"""

from collections.abc import Awaitable, Callable, Sequence

from services.conversation.contexts import encode_items
from services.conversation.conversation_store import ConversationStore, SeedTurn
from services.conversation.conversations import no_conversation
from services.conversation.history_cache import HistoryCache
from services.conversation.prompts import PromptModel
from services.conversation.rows import Line
from services.conversation.shards import Shards
from services.conversation.titles import title_of
from services.conversation.tree import Node, nodes, page
from services.conversation.verbs import PURGE_LATEST_S
from shared import clock
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.limits import CONVERSATION_REPLIES_MAX, PAGE_BYTES_MAX, REQUEST_DEADLINE_S
from shared.messages import (
    Accepted,
    AddItems,
    ConversationItem,
    ConversationItems,
    ConversationView,
    InputItem,
    ItemRef,
    ListItems,
    Principal,
    RequestEcho,
)
from shared.outcomes import Refusal, RefusalKind
from shared.telemetry import Journal

Stop = Callable[[str], Awaitable[object]]


class ItemVerbs:
    """`stop` ends a running reply; `model` encodes what is added."""

    def __init__(
        self,
        *,
        store: ConversationStore,
        shards: Shards,
        model: PromptModel,
        stop: Stop,
        cache: HistoryCache,
        journal: Journal,
    ) -> None:
        self._store, self._shards, self._model = store, shards, model
        self._stop, self._cache, self._journal = stop, cache, journal

    async def page(self, order: ListItems) -> ConversationItems:
        line = await line_of(self._store, order.principal, order.conversation_id)
        every = await self._nodes(order.principal, order.conversation_id, line)
        found = page(every, after=order.after, limit=order.limit, ascending=order.ascending, branches=order.branches)
        if found is None:
            raise _no_item(order.after or "", "after")
        shown = found[: order.limit]
        items = await self._words(order.principal, shown)
        return ConversationItems(items=tuple(items), has_more=len(found) > len(shown) or len(items) < len(shown))

    async def add(self, order: AddItems) -> ConversationItems:
        who, conversation_id = order.principal, order.conversation_id
        line = await line_of(self._store, who, conversation_id)
        if line.version >= CONVERSATION_REPLIES_MAX:
            said = f"This conversation has {line.version} replies, which is the most. Begin another."
            raise RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=said))
        turn = await items_turn(who, order.items, self._model, self._shards.new_reply_id(), clock.wall_s())
        if not await self._store.add(who, conversation_id, turn, title_of(order.items)):
            raise no_conversation(conversation_id)
        line = await line_of(self._store, who, conversation_id)
        every = await self._nodes(who, conversation_id, line)
        made = [node for node in every if node.reply_id == turn.accepted.reply_id]
        return ConversationItems(items=tuple(await self._store.words(who, made)), has_more=False)

    async def get(self, ref: ItemRef) -> ConversationItems:
        node = await self._node(ref, await line_of(self._store, ref.principal, ref.conversation_id))
        found = await self._store.words(ref.principal, [node])
        if not found:
            raise _no_item(ref.item_id)
        return ConversationItems(items=tuple(found), has_more=False)

    async def delete(self, ref: ItemRef) -> ConversationView:
        """A reply that is being written is ended first. Raises RefusedError: NOT_FOUND, UNAVAILABLE."""
        who, conversation_id = ref.principal, ref.conversation_id
        line = await line_of(self._store, who, conversation_id)
        node = await self._node(ref, line)
        begins_with = title_of(await self._store.first_items(who, conversation_id))
        if node.position is not None:
            epoch = await self._store.remove_message(who, conversation_id, ref.item_id)
        else:
            epoch = await self._remove_reply(ref, line, node.reply_id)
        if epoch is None:
            raise _no_item(ref.item_id)
        await self._cache.forget(conversation_id, epoch)
        self._journal.note("item_deleted", node.reply_id, conversation_id=conversation_id, item_id=ref.item_id)
        return await self._renamed(who, conversation_id, begins_with)

    async def _remove_reply(self, ref: ItemRef, line: Line, reply_id: str) -> int | None:
        if reply_id in line.in_flight:
            try:
                await self._stop(reply_id)
            except (LogGoneError, TokenLogError):
                said = "This reply is only just beginning. Try again in a moment."
                raise RefusedError(Refusal(kind=RefusalKind.UNAVAILABLE, message=said, retry_after_s=1.0)) from None
        now_s = clock.wall_s()
        return await self._store.remove_reply(
            ref.principal, ref.conversation_id, reply_id, now_s=now_s, latest_s=now_s + PURGE_LATEST_S
        )

    async def _renamed(self, who: Principal, conversation_id: str, began_with: str) -> ConversationView:
        """A title that was made of what is deleted now is made anew."""
        view = await self._store.view(who, conversation_id)
        begins_with = title_of(await self._store.first_items(who, conversation_id))
        if view is not None and view.title == began_with != begins_with:
            await self._store.update(who, conversation_id, title=begins_with, metadata=None, head=None)
            view = await self._store.view(who, conversation_id)
        if view is None:
            raise no_conversation(conversation_id)
        return view

    async def _node(self, ref: ItemRef, line: Line) -> Node:
        every = await self._nodes(ref.principal, ref.conversation_id, line)
        node = next((node for node in every if node.item_id == ref.item_id), None)
        if node is None:
            raise _no_item(ref.item_id)
        return node

    async def _nodes(self, who: Principal, conversation_id: str, line: Line) -> list[Node]:
        return nodes(await self._store.turns(who, conversation_id), line.head_id)

    async def _words(self, who: Principal, shown: list[Node]) -> list[ConversationItem]:
        """As many from the beginning as fit into one answer, at least one."""
        items: list[ConversationItem] = []
        size = 0
        for item in await self._store.words(who, shown):
            size += len(item.item.text.encode())
            if items and size > PAGE_BYTES_MAX:
                break
            items.append(item)
        return items


async def line_of(store: ConversationStore, who: Principal, conversation_id: str) -> Line:
    """Raises RefusedError NOT_FOUND."""
    line = await store.line(who, conversation_id)
    if line is None:
        raise no_conversation(conversation_id)
    return line


async def items_turn(
    who: Principal, items: Sequence[InputItem], model: PromptModel, reply_id: str, now_s: float
) -> SeedTurn:
    """Items as a turn that nobody replied to."""
    accepted = Accepted(
        reply_id=reply_id,
        org=who.org,
        user=who.user,
        created_s=now_s,
        model=model.card.id,
        tier=who.tier,
        budget=0,
        seed=0,
        input_tokens=0,
        deadline_s=REQUEST_DEADLINE_S,
        echo=RequestEcho(),
    )
    return SeedTurn(accepted, model.tokenizer_name, await encode_items(items, model))


def _no_item(item_id: str, param: str | None = None) -> RefusedError:
    said = f"No item {item_id} was found in this conversation."
    return RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message=said, param=param))
