"""What may be asked about a conversation: create, list, get, update, items, delete, regenerate.

Foreign and unknown ids have one answer. Deleting reaches everything: what is being written is ended, rows go at once,
and logs and ENDED records as soon as no router needs them.
"""

from collections.abc import Awaitable, Callable

import msgspec

from services.conversation.contexts import encode_items
from services.conversation.conversation_store import ConversationStore, SeedTurn
from services.conversation.conversations import no_branch, no_conversation
from services.conversation.history_cache import HistoryCache
from services.conversation.prompts import PromptModel
from services.conversation.rows import Line
from services.conversation.shards import Shards
from services.conversation.titles import title_of
from services.conversation.tree import Node, nodes, page
from services.conversation.verbs import PURGE_LATEST_S
from shared import clock
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.limits import PAGE_BYTES_MAX, REQUEST_DEADLINE_S, TITLE_GIVEN_CHARS_MAX
from shared.messages import (
    ROOT,
    Accepted,
    ConversationItem,
    ConversationItems,
    ConversationPage,
    ConversationRef,
    ConversationView,
    CreateConversation,
    Done,
    ListConversations,
    ListItems,
    Principal,
    RegenerateReply,
    RequestEcho,
    SendMessage,
    Sent,
    UpdateConversation,
)
from shared.outcomes import Refusal, RefusalKind
from shared.telemetry import Journal

Stop = Callable[[str], Awaitable[object]]
Send = Callable[[SendMessage], Awaitable[Sent]]


class ConversationVerbs:
    """`stop` ends a running reply, `send` begins one; `model` encodes what a conversation begins with."""

    def __init__(
        self,
        *,
        store: ConversationStore,
        shards: Shards,
        model: PromptModel,
        stop: Stop,
        send: Send,
        cache: HistoryCache,
        journal: Journal,
    ) -> None:
        self._store, self._shards, self._model = store, shards, model
        self._stop, self._send, self._cache, self._journal = stop, send, cache, journal

    async def create(self, order: CreateConversation) -> ConversationView:
        now_s = clock.wall_s()
        view = ConversationView(
            id=clock.new_conversation_id(),
            created_s=now_s,
            updated_s=now_s,
            title=_given(order.title, order.metadata) or title_of(order.items),
            metadata=order.metadata,
        )
        seed = await self._seed(order, now_s) if order.items else None
        await self._store.create(view, order.principal, seed)
        return view

    async def _seed(self, order: CreateConversation, now_s: float) -> SeedTurn:
        accepted = Accepted(
            reply_id=self._shards.new_reply_id(),
            org=order.principal.org,
            user=order.principal.user,
            created_s=now_s,
            model=self._model.card.id,
            tier=order.principal.tier,
            budget=0,
            seed=0,
            input_tokens=0,
            deadline_s=REQUEST_DEADLINE_S,
            echo=RequestEcho(),
        )
        return SeedTurn(accepted, self._model.tokenizer_name, await encode_items(order.items, self._model))

    async def get(self, ref: ConversationRef) -> ConversationView:
        view = await self._store.view(ref.principal, ref.conversation_id)
        if view is None:
            raise no_conversation(ref.conversation_id)
        return view

    async def newest(self, order: ListConversations) -> ConversationPage:
        if order.after is not None and await self._store.line(order.principal, order.after) is None:
            raise no_conversation(order.after, "after")
        found = await self._store.newest(order.principal, limit=order.limit + 1, after=order.after, search=order.search)
        return ConversationPage(conversations=tuple(found[: order.limit]), has_more=len(found) > order.limit)

    async def update(self, order: UpdateConversation) -> ConversationView:
        who, conversation_id = order.principal, order.conversation_id
        await self._line(who, conversation_id)
        if order.head is not None and not await self._store.holds(who, conversation_id, order.head):
            raise no_branch(order.head, "head")
        title = _given(order.title, order.metadata or {})
        if title == "":
            title = title_of(await self._store.first_items(who, conversation_id))
        await self._store.update(who, conversation_id, title=title, metadata=order.metadata, head=order.head)
        return await self.get(
            ConversationRef(principal=who, request_id=order.request_id, conversation_id=conversation_id)
        )

    async def items(self, order: ListItems) -> ConversationItems:
        line = await self._line(order.principal, order.conversation_id)
        every = nodes(await self._store.turns(order.principal, order.conversation_id), line.head_id)
        found = page(every, after=order.after, limit=order.limit, ascending=order.ascending, branches=order.branches)
        if found is None:
            said = f"No item {order.after} was found in this conversation."
            raise RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message=said, param="after"))
        shown = found[: order.limit]
        items = await self._words(order.principal, shown)
        return ConversationItems(items=tuple(items), has_more=len(found) > len(shown) or len(items) < len(shown))

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

    async def delete(self, ref: ConversationRef) -> Done:
        line = await self._line(ref.principal, ref.conversation_id)
        for reply_id in line.in_flight:
            try:
                await self._stop(reply_id)
            except (LogGoneError, TokenLogError):
                continue  # nothing was written yet; without its outbox row nothing will be
        now_s = clock.wall_s()
        gone = await self._store.delete(
            ref.principal, ref.conversation_id, now_s=now_s, latest_s=now_s + PURGE_LATEST_S
        )
        await self._cache.forget(ref.conversation_id)
        self._journal.note("conversation_deleted", conversation_id=ref.conversation_id, replies=len(gone))
        return Done()

    async def regenerate(self, order: RegenerateReply) -> Sent:
        """Raises RefusedError: NOT_FOUND, BAD_REQUEST, and whatever a send may be refused for."""
        line = await self._line(order.principal, order.conversation_id)
        reply_id = order.reply_id or line.head_id
        source = None
        if reply_id is not None:
            source = await self._store.source(order.principal, order.conversation_id, reply_id)
        if source is None:
            if order.reply_id is not None:
                raise no_branch(order.reply_id, "response_id")
            said = "There is no reply in this conversation yet."
            raise RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=said))
        asked, echo = source.accepted, source.accepted.echo
        model = order.model or echo.requested_model or asked.model
        return await self._send(
            SendMessage(
                principal=order.principal,
                request_id=order.request_id,
                model=model,
                items=source.items,
                sampling=msgspec.structs.replace(source.sampling, seed=None),
                echo=msgspec.structs.replace(
                    echo,
                    conversation_id=order.conversation_id,
                    background=order.background,
                    requested_model=model,
                    notice=None,
                ),
                idempotency_key=order.idempotency_key,
                body_hash=order.body_hash,
                branch_from=source.parent_id or ROOT,
            )
        )

    async def _line(self, who: Principal, conversation_id: str) -> Line:
        line = await self._store.line(who, conversation_id)
        if line is None:
            raise no_conversation(conversation_id)
        return line


def _given(title: str | None, metadata: dict[str, str]) -> str | None:
    """The title that a person set: None when none was, empty when it is to be made again."""
    said = title if title is not None else metadata.get("title")
    return None if said is None else " ".join(said.split())[:TITLE_GIVEN_CHARS_MAX]
