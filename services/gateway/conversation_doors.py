"""The doors of conversations: each handler is one demand, from headers to answer. docs/api.md says what they take."""

import msgspec
from aiohttp import web

from services.gateway.conversation_client import Conversation
from services.gateway.conversations_api import (
    EXPORT_TAIL,
    conversation_item,
    conversation_object,
    deleted_conversation,
    export_head,
    list_object,
    parse_add,
    parse_create,
    parse_items,
    parse_list,
    parse_regenerate,
    parse_update,
)
from services.gateway.doors import Demand, Doors, answer
from services.gateway.http import REQUEST_ID, idempotency_key, no_conversation, no_item
from services.gateway.openai_api import TOKEN_IDS, check_model
from shared.catalog import Catalog
from shared.ids import is_conversation_id, is_item_id
from shared.limits import PAGE_MAX
from shared.messages import ConversationRef, ItemRef, ListItems

_json = msgspec.json.Encoder().encode


class ConversationDoors:
    """`doors` are the others: keys, and how a client hears of a reply, are the same here."""

    def __init__(self, doors: Doors, catalog: Catalog, conversation: Conversation) -> None:
        self._doors, self._catalog, self._conversation = doors, catalog, conversation

    def add_to(self, app: web.Application) -> None:
        router, door, one = app.router, self._doors.door, "/v1/conversations/{conversation_id}"
        router.add_post("/v1/conversations", door(self.create))
        router.add_get("/v1/conversations", door(self.newest))
        router.add_get(one, door(self.retrieve))
        router.add_post(one, door(self.update))
        router.add_delete(one, door(self.delete))
        router.add_get(f"{one}/items", door(self.items))
        router.add_post(f"{one}/items", door(self.add_items))
        router.add_get(f"{one}/items/{{item_id}}", door(self.retrieve_item))
        router.add_delete(f"{one}/items/{{item_id}}", door(self.delete_item))
        router.add_post(f"{one}/regenerate", door(self._doors.limited(self.regenerate)))
        router.add_get(f"{one}/export", door(self.export))

    async def create(self, demand: Demand) -> web.StreamResponse:
        order = parse_create(await demand.body(), demand.principal, demand.request_id)
        return answer(conversation_object(await self._conversation.create_conversation(order)))

    async def newest(self, demand: Demand) -> web.StreamResponse:
        order = parse_list(demand.http.query, demand.principal, demand.request_id)
        found = await self._conversation.list_conversations(order)
        return answer(list_object([conversation_object(one) for one in found.conversations], has_more=found.has_more))

    async def retrieve(self, demand: Demand) -> web.StreamResponse:
        return answer(conversation_object(await self._conversation.get_conversation(_ref(demand))))

    async def update(self, demand: Demand) -> web.StreamResponse:
        ref = _ref(demand)
        order = parse_update(await demand.body(), demand.principal, demand.request_id, ref.conversation_id)
        return answer(conversation_object(await self._conversation.update_conversation(order)))

    async def delete(self, demand: Demand) -> web.StreamResponse:
        ref = _ref(demand)
        await self._conversation.delete_conversation(ref)
        return answer(deleted_conversation(ref.conversation_id))

    async def items(self, demand: Demand) -> web.StreamResponse:
        ref = _ref(demand)
        order = parse_items(demand.http.query, demand.include, demand.principal, demand.request_id, ref.conversation_id)
        found = await self._conversation.conversation_items(order)
        return answer(list_object([conversation_item(node) for node in found.items], has_more=found.has_more))

    async def add_items(self, demand: Demand) -> web.StreamResponse:
        ref = _ref(demand)
        order = parse_add(await demand.body(), demand.principal, demand.request_id, ref.conversation_id)
        added = await self._conversation.add_items(order)
        return answer(list_object([conversation_item(node) for node in added.items], has_more=False))

    async def retrieve_item(self, demand: Demand) -> web.StreamResponse:
        return answer(conversation_item(await self._conversation.get_item(_item_ref(demand))))

    async def delete_item(self, demand: Demand) -> web.StreamResponse:
        return answer(conversation_object(await self._conversation.delete_item(_item_ref(demand))))

    async def regenerate(self, demand: Demand) -> web.StreamResponse:
        ref = _ref(demand)
        asked = parse_regenerate(await demand.body(), demand.principal, demand.request_id, ref.conversation_id)
        order = asked.order
        if order.model is not None:
            check_model(order.model, self._catalog)
        key = idempotency_key(demand.headers, demand.principal, order.body_hash, demand.request_id)
        sent = await self._conversation.regenerate(msgspec.structs.replace(order, idempotency_key=key))
        demand.say(sent.allowance)
        return await self._doors.new_response(
            demand,
            sent.reply_id,
            stream=asked.stream,
            background=order.background,
            token_ids=TOKEN_IDS in asked.include,
        )

    async def export(self, demand: Demand) -> web.StreamResponse:
        """Everything, page by page, so that nothing here has to hold it all."""
        ref = _ref(demand)
        view = await self._conversation.get_conversation(ref)
        name = f'attachment; filename="{ref.conversation_id}.json"'
        headers = {
            "Content-Type": "application/json",
            "Content-Disposition": name,
            REQUEST_ID: demand.request_id,
        }
        after: str | None = None
        found = await self._conversation.conversation_items(self._all(demand, ref, after))
        response = web.StreamResponse(headers=headers)
        await response.prepare(demand.http)
        await response.write(export_head(view))
        while found.items:
            pieces = b",".join(_json(conversation_item(node)) for node in found.items)
            await response.write(pieces if after is None else b"," + pieces)
            after = found.items[-1].item.id
            if not found.has_more:
                break
            found = await self._conversation.conversation_items(self._all(demand, ref, after))
        await response.write(EXPORT_TAIL)
        await response.write_eof()
        return response

    def _all(self, demand: Demand, ref: ConversationRef, after: str | None) -> ListItems:
        return ListItems(
            principal=demand.principal,
            request_id=demand.request_id,
            conversation_id=ref.conversation_id,
            limit=PAGE_MAX,
            after=after,
            ascending=True,
            branches=True,
        )


def _ref(demand: Demand) -> ConversationRef:
    """The conversation named in the path; raises RefusedError NOT_FOUND for what cannot be one."""
    conversation_id = demand.http.match_info["conversation_id"]
    if not is_conversation_id(conversation_id):
        raise no_conversation(conversation_id)
    return ConversationRef(principal=demand.principal, request_id=demand.request_id, conversation_id=conversation_id)


def _item_ref(demand: Demand) -> ItemRef:
    """The item named in the path; raises RefusedError NOT_FOUND for what cannot be one."""
    ref, item_id = _ref(demand), demand.http.match_info["item_id"]
    if not is_item_id(item_id):
        raise no_item(item_id)
    return ItemRef(
        principal=ref.principal, request_id=ref.request_id, conversation_id=ref.conversation_id, item_id=item_id
    )
