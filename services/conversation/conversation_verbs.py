"""What may be asked about a conversation: create, list, get, update, delete, regenerate.

Foreign and unknown ids have one answer. Deleting reaches everything: what is being written is ended, rows go at once,
and logs and ENDED records as soon as no router needs them.
"""

from collections.abc import Awaitable, Callable

import msgspec

from services.conversation.conversation_store import ConversationStore
from services.conversation.conversations import no_branch, no_conversation
from services.conversation.history_cache import HistoryCache
from services.conversation.item_verbs import items_turn, line_of
from services.conversation.prompts import PromptModel
from services.conversation.shards import Shards
from services.conversation.titles import title_of
from services.conversation.verbs import PURGE_LATEST_S
from shared import clock
from shared.errors import LogGoneError, RefusedError, TokenLogError
from shared.limits import TITLE_GIVEN_CHARS_MAX
from shared.messages import (
    ROOT,
    ConversationPage,
    ConversationRef,
    ConversationView,
    CreateConversation,
    Done,
    ListConversations,
    RegenerateReply,
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
        seed = None
        if order.items:
            seed = await items_turn(order.principal, order.items, self._model, self._shards.new_reply_id(), now_s)
        await self._store.create(view, order.principal, seed)
        return view

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
        await line_of(self._store, who, conversation_id)
        if order.head is not None and not await self._store.holds(who, conversation_id, order.head):
            raise no_branch(order.head, "head")
        title = _given(order.title, order.metadata or {})
        if title == "":
            title = title_of(await self._store.first_items(who, conversation_id))
        await self._store.update(who, conversation_id, title=title, metadata=order.metadata, head=order.head)
        return await self.get(
            ConversationRef(principal=who, request_id=order.request_id, conversation_id=conversation_id)
        )

    async def delete(self, ref: ConversationRef) -> Done:
        line = await line_of(self._store, ref.principal, ref.conversation_id)
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
        line = await line_of(self._store, order.principal, order.conversation_id)
        reply_id = order.reply_id or line.head_id
        source = None
        if reply_id is not None:
            source = await self._store.source(order.principal, order.conversation_id, reply_id)
        if source is None:
            if order.reply_id is not None:
                raise no_branch(order.reply_id, "response_id")
            raise _bad("This conversation does not end in a reply: name the one to write anew in response_id.")
        if not source.items:
            raise _bad("The message of this reply was deleted.")
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


def _given(title: str | None, metadata: dict[str, str]) -> str | None:
    """The title that a person set: None when none was, empty when it is to be made again."""
    said = title if title is not None else metadata.get("title")
    return None if said is None else " ".join(said.split())[:TITLE_GIVEN_CHARS_MAX]


def _bad(said: str) -> RefusedError:
    return RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=said))
