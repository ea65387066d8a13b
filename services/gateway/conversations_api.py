"""Conversations on the wire: bodies of clients -> orders, and views -> OpenAI's objects with what we add. Pure.

docs/api.md is the contract of what stands beyond OpenAI's own.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.bodies import Item, Metadata, Name, bound_texts, clean, decode, item_of
from services.gateway.http import bad_request, no_branch, no_conversation
from services.gateway.openai_objects import (
    REFUSAL_TEXT,
    Json,
    input_item,
    item_status,
    message_item,
    refusal_part,
    text_part,
)
from shared.ids import is_conversation_id, reply_place
from shared.limits import CONVERSATION_ITEMS_MAX, PAGE_MAX, SEARCH_CHARS_MAX, TITLE_GIVEN_CHARS_MAX
from shared.messages import (
    AddItems,
    ConversationItem,
    ConversationView,
    CreateConversation,
    InputItem,
    ListConversations,
    ListItems,
    Principal,
    RegenerateReply,
    UpdateConversation,
)
from shared.outcomes import EndReason

BRANCHES = "branches"  # an `include` value
PAGE_DEFAULT = 20

_Title = Annotated[str, Meta(max_length=TITLE_GIVEN_CHARS_MAX)]


class _Create(msgspec.Struct):
    items: Annotated[list[Item], Meta(max_length=CONVERSATION_ITEMS_MAX)] | None = None
    metadata: Metadata | None = None
    title: _Title | None = None


class _Add(msgspec.Struct):
    items: Annotated[list[Item], Meta(min_length=1, max_length=CONVERSATION_ITEMS_MAX)]


class _Update(msgspec.Struct):
    metadata: Metadata | None = None
    title: _Title | None = None
    head: Name | None = None


class _Regenerate(msgspec.Struct, forbid_unknown_fields=True):
    """It is asked as the first time: a parameter that would change that is refused, not ignored."""

    response_id: Name | None = None
    model: Name | None = None
    stream: bool | None = None
    background: bool | None = None
    include: Annotated[list[Name], Meta(max_length=32)] | None = None


_create = msgspec.json.Decoder(_Create)
_add = msgspec.json.Decoder(_Add)
_update = msgspec.json.Decoder(_Update)
_regenerate = msgspec.json.Decoder(_Regenerate)


class Regeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for another reply, and how the client wants to hear of it."""

    order: RegenerateReply  # its key is still to come
    stream: bool
    include: tuple[str, ...]


# --- bodies and queries -> orders ------------------------------------------------------------------------


def parse_create(data: bytes, who: Principal, request_id: str) -> CreateConversation:
    """The body of `POST /v1/conversations`, which may be empty; raises RefusedError naming the field."""
    body = decode(_create, data or b"{}")
    items = _items(body.items or ())
    return CreateConversation(
        principal=who,
        request_id=request_id,
        title=_title(body.title),
        metadata=_metadata(body.metadata) or {},
        items=items,
    )


def parse_add(data: bytes, who: Principal, request_id: str, conversation_id: str) -> AddItems:
    """The body of `POST /v1/conversations/{id}/items`; raises RefusedError naming the field."""
    items = _items(decode(_add, data).items)
    return AddItems(principal=who, request_id=request_id, conversation_id=conversation_id, items=items)


def parse_update(data: bytes, who: Principal, request_id: str, conversation_id: str) -> UpdateConversation:
    """The body of `POST /v1/conversations/{id}`; raises RefusedError naming the field."""
    body = decode(_update, data or b"{}")
    if body.head is not None and reply_place(body.head) is None:
        raise no_branch(body.head, "head")
    return UpdateConversation(
        principal=who,
        request_id=request_id,
        conversation_id=conversation_id,
        title=_title(body.title),
        metadata=_metadata(body.metadata),
        head=body.head,
    )


def parse_regenerate(data: bytes, who: Principal, request_id: str, conversation_id: str) -> Regeneration:
    """The body of `POST /v1/conversations/{id}/regenerate`, which may be empty; raises RefusedError."""
    body = decode(_regenerate, data or b"{}")
    if body.response_id is not None and reply_place(body.response_id) is None:
        raise no_branch(body.response_id, "response_id")
    asked = [conversation_id, body.response_id, body.model, bool(body.background)]
    order = RegenerateReply(
        principal=who,
        request_id=request_id,
        conversation_id=conversation_id,
        reply_id=body.response_id,
        model=body.model,
        background=bool(body.background),
        body_hash=hashlib.sha256(msgspec.msgpack.encode(asked)).digest(),
    )
    return Regeneration(order=order, stream=bool(body.stream), include=tuple(body.include or ()))


def parse_list(query: Mapping[str, str], who: Principal, request_id: str) -> ListConversations:
    """The query of `GET /v1/conversations`; raises RefusedError naming the field."""
    after, search = query.get("after"), clean(query.get("search", ""), "search").strip()
    if after is not None and not is_conversation_id(after):
        raise no_conversation(after, "after")
    if len(search) > SEARCH_CHARS_MAX:
        raise bad_request(f"search takes at most {SEARCH_CHARS_MAX} characters.", "search")
    return ListConversations(
        principal=who, request_id=request_id, limit=page_limit(query), after=after, search=_sound(search, "search")
    )


def parse_items(
    query: Mapping[str, str], include: Iterable[str], who: Principal, request_id: str, conversation_id: str
) -> ListItems:
    """The query of `GET /v1/conversations/{id}/items`; raises RefusedError naming the field."""
    after = query.get("after")
    return ListItems(
        principal=who,
        request_id=request_id,
        conversation_id=conversation_id,
        limit=page_limit(query),
        after=None if after is None else _sound(after[:80], "after"),
        ascending=ascending(query),
        branches=BRANCHES in include,
    )


def page_limit(query: Mapping[str, str]) -> int:
    return integer(query.get("limit", str(PAGE_DEFAULT)), "limit", 1, PAGE_MAX)


def ascending(query: Mapping[str, str]) -> bool:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be 'asc' or 'desc'.", "order")
    return order == "asc"


def integer(said: str, name: str, least: int, most: int) -> int:
    """A number of a query; raises RefusedError."""
    if not (said.isascii() and said.isdigit() and len(said) <= 9 and least <= int(said) <= most):
        raise bad_request(f"{name} must be an integer from {least} to {most}.", name)
    return int(said)


def _sound(text: str, param: str) -> str:
    """A query's text that is text: percent-encoding can smuggle in half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{param} is not valid text.", param) from None
    return text


def _items(said: Sequence[Item]) -> tuple[InputItem, ...]:
    items = tuple(item_of(item, f"items[{at}]") for at, item in enumerate(said))
    bound_texts([item.text for item in items], "items")
    return items


def _title(title: str | None) -> str | None:
    return None if title is None else clean(title, "title")


def _metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    for key, value in (metadata or {}).items():
        clean(key + value, "metadata")
    return metadata


# --- views -> objects ------------------------------------------------------------------------------------


def conversation_object(view: ConversationView) -> Json:
    return {
        "id": view.id,
        "object": "conversation",
        "created_at": int(view.created_s),
        "metadata": view.metadata,
        "title": view.title,
        "updated_at": int(view.updated_s),
        "head": view.head,
        "in_flight": view.in_flight,
    }


def deleted_conversation(conversation_id: str) -> Json:
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


def list_object(data: list[Json], *, has_more: bool) -> Json:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def conversation_item(node: ConversationItem) -> Json:
    """An item, with its place in the tree."""
    made = _written_item(node) if node.written else input_item(node.item)
    made["parent_id"] = node.parent_id
    made["response_id"] = node.reply_id
    made["active"] = node.active
    made["created_at"] = int(node.created_s)
    return made


def _written_item(node: ConversationItem) -> Json:
    reason = EndReason.SAFETY if node.withdrawn and node.ended else node.reason
    parts = [text_part("" if node.withdrawn else node.item.text)] if node.ended else []
    if reason is EndReason.SAFETY:
        parts.append(refusal_part(REFUSAL_TEXT))
    made = message_item(node.reply_id, item_status(reason), parts)
    made["end_reason"] = None if reason is None else reason.value
    made["model"] = node.model
    made["notice"] = node.notice
    return made


def export_head(view: ConversationView) -> bytes:
    """The beginning of an export file; its items follow, comma separated, and then EXPORT_TAIL."""
    return b'{"object":"conversation.export","conversation":%b,"items":[' % msgspec.json.encode(
        conversation_object(view)
    )


EXPORT_TAIL = b"]}\n"
