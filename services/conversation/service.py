"""Conversation on the bus: verbs as a queue group, the archive, the guards.

<region>.conversation.<verb> ──inbox──> at most VERBS_IN_PROGRESS_MAX at once ──> answer
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import asyncpg
import msgspec

from services.conversation import migrate
from services.conversation.archive import Archive
from services.conversation.conversation_verbs import ConversationVerbs
from services.conversation.figures import Figures
from services.conversation.guards import Guards
from services.conversation.item_verbs import ItemVerbs
from services.conversation.marks import QueuedMarks
from services.conversation.quotas import OverLimitError
from services.conversation.sending import Sender
from services.conversation.shards import FILL_CHECK_S, Shards
from services.conversation.store import Store, StoreAwayError
from services.conversation.verbs import Verbs
from shared import clock
from shared.bus import Bus, BusMessage, Puller, Subscription
from shared.errors import BusClosedError, BusError, ConfigError, RefusedError
from shared.limits import REQUEST_TIMEOUT_S
from shared.messages import (
    AddItems,
    ConversationRef,
    CreateConversation,
    ItemRef,
    KeyLookup,
    ListConversations,
    ListItems,
    Message,
    Refused,
    RegenerateReply,
    ReplyRef,
    SendMessage,
    UpdateConversation,
    WithdrawReply,
    decoder,
    encode,
)
from shared.outcomes import Refusal, RefusalKind
from shared.storage import UNAVAILABLE_ERRORS, Pool
from shared.subjects import Names
from shared.telemetry import Journal, Log
from shared.topology import ARCHIVE_CONSUMER, topology
from shared.valkey import Valkey

QUEUE_GROUP = "conversation"
VERBS_IN_PROGRESS_MAX = 128  # of each verb; more wait in its inbox
VERB_INBOX_MAX = 1024  # what does not fit is dropped: the asker's deadline says so
DATABASE_WAIT_S = 60.0  # at start; then the process ends with a sentence, and its supervisor tries again
_DATABASE_RETRY_S = 0.5

STORE_AWAY = Refusal(
    kind=RefusalKind.UNAVAILABLE,
    message="Conversations cannot be read or stored at the moment. Replies already running go on. Try again soon.",
    retry_after_s=2.0,
)
BUS_AWAY = Refusal(
    kind=RefusalKind.UNAVAILABLE,
    message="A part of the service did not answer in time. Try again in a few seconds.",
    retry_after_s=2.0,
)
OUR_FAULT = Refusal(
    kind=RefusalKind.UNAVAILABLE,
    message="Something went wrong on our side. It was recorded. Try again in a few seconds.",
    retry_after_s=5.0,
)


class _Verb(NamedTuple):
    name: str
    decode: Callable[[bytes], Any]
    answer: Callable[[Any], Awaitable[Message]]


class ConversationService:
    def __init__(
        self,
        *,
        models: tuple[str, ...],
        log_shards: int,
        names: Names,
        bus: Bus,
        pool: Pool,
        store: Store,
        sender: Sender,
        verbs: Verbs,
        conversations: ConversationVerbs,
        items: ItemVerbs,
        archive: Archive,
        guards: Guards,
        marks: QueuedMarks,
        shards: Shards,
        valkey: Valkey | None,
        journal: Journal,
        figures: Figures,
        log: Log,
    ) -> None:
        self._models, self._log_shards, self._names = models, log_shards, names
        self._bus, self._pool, self._store, self._archive = bus, pool, store, archive
        self._guards, self._marks, self._shards, self._journal = guards, marks, shards, journal
        self._valkey, self._figures, self._log = valkey, figures, log
        self._verbs = (
            _Verb("send", decoder(SendMessage).decode, sender.send),
            _Verb("get", decoder(ReplyRef).decode, verbs.get),
            _Verb("cancel", decoder(ReplyRef).decode, verbs.cancel),
            _Verb("delete", decoder(ReplyRef).decode, verbs.delete),
            _Verb("input_items", decoder(ReplyRef).decode, verbs.input_items),
            _Verb("key", decoder(KeyLookup).decode, verbs.key),
            _Verb("withdraw", decoder(WithdrawReply).decode, verbs.withdraw),
            _Verb("conversation_create", decoder(CreateConversation).decode, conversations.create),
            _Verb("conversation_list", decoder(ListConversations).decode, conversations.newest),
            _Verb("conversation_get", decoder(ConversationRef).decode, conversations.get),
            _Verb("conversation_update", decoder(UpdateConversation).decode, conversations.update),
            _Verb("conversation_items", decoder(ListItems).decode, items.page),
            _Verb("conversation_items_add", decoder(AddItems).decode, items.add),
            _Verb("conversation_item", decoder(ItemRef).decode, items.get),
            _Verb("conversation_item_delete", decoder(ItemRef).decode, items.delete),
            _Verb("conversation_delete", decoder(ConversationRef).decode, conversations.delete),
            _Verb("regenerate", decoder(RegenerateReply).decode, conversations.regenerate),
        )
        self._subscriptions: list[tuple[_Verb, Subscription]] = []
        self._in_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._migrate()
        await self._bus.apply(*topology(self._names, self._models, shards=self._log_shards))
        await self._shards.look()
        for verb in self._verbs:
            subscription = await self._bus.subscribe(
                self._names.conversation(verb.name), queue=QUEUE_GROUP, inbox_max=VERB_INBOX_MAX
            )
            self._subscriptions.append((verb, subscription))

    async def _migrate(self) -> None:
        give_up_s = clock.now_s() + DATABASE_WAIT_S
        while True:
            try:
                applied = await migrate.apply(self._pool)
            except UNAVAILABLE_ERRORS as error:
                if clock.now_s() >= give_up_s:
                    raise ConfigError(
                        f"PostgreSQL does not answer ({type(error).__name__}). Start it, or check CHORUS_POSTGRES_URL."
                    ) from error
                await asyncio.sleep(_DATABASE_RETRY_S)
            else:
                self._log.info("migrated", applied=applied)
                return

    async def run(self) -> None:
        puller = self._bus.puller(self._names.ended_stream, ARCHIVE_CONSUMER)
        try:
            async with asyncio.TaskGroup() as group:
                for verb, subscription in self._subscriptions:
                    group.create_task(self._serve(group, verb, subscription), name=f"verb.{verb.name}")
                for name, job, every_s in self._jobs(puller):
                    group.create_task(self._again(name, job, every_s), name=name)
                group.create_task(self._marks.run(), name="marks")
                group.create_task(self._journal.run(), name="journal")
        finally:
            await puller.close()
            if self._valkey is not None:
                await self._valkey.close()

    def _jobs(self, puller: Puller) -> list[tuple[str, Callable[[], Awaitable[None]], float]]:
        """(name, job, seconds between)."""
        return [
            ("archive", lambda: self._archive.run(puller), 0.0),
            ("look", self._look, 1.0),
            ("shards", self._shards.look, FILL_CHECK_S),
            ("outbox", self._guards.outbox, 0.5),
            ("sweeper", self._guards.sweep, 5.0),
            ("purges", self._guards.purge, 2.0),
            ("claims", self._guards.claims, 300.0),
        ]

    async def drain(self, deadline_s: float) -> None:
        for _, subscription in self._subscriptions:
            await subscription.close()
        async with asyncio.timeout(deadline_s):
            await self._idle.wait()
            while self._marks.pending:
                await self._marks.flush()

    def ready(self) -> str | None:
        if not self._bus.connected:
            return "the message bus is not connected"
        if self._store.away is not None:
            return f"PostgreSQL is away: {self._store.away}"
        return None if self._subscriptions else "not subscribed yet"

    # --- verbs -------------------------------------------------------------------------------------------

    async def _serve(self, group: asyncio.TaskGroup, verb: _Verb, subscription: Subscription) -> None:
        room = asyncio.Semaphore(VERBS_IN_PROGRESS_MAX)

        def done(_: asyncio.Task[None]) -> None:
            room.release()
            self._finished()

        async for message in subscription:
            await room.acquire()
            self._started()
            group.create_task(self._answer(verb, message)).add_done_callback(done)
        await asyncio.Event().wait()  # drained: nothing new comes, and the service lives until it is cancelled

    def _started(self) -> None:
        self._in_progress += 1
        self._figures.in_progress.set(self._in_progress)
        self._idle.clear()

    def _finished(self) -> None:
        self._in_progress -= 1
        self._figures.in_progress.set(self._in_progress)
        if self._in_progress == 0:
            self._idle.set()

    async def _answer(self, verb: _Verb, message: BusMessage) -> None:
        began_s = clock.now_s()
        answer = await self._outcome(verb, message.data)
        if isinstance(answer, Refused):
            self._figures.refused(answer.refusal)
        if message.reply:
            try:
                await self._bus.publish(message.reply, encode(answer))
            except BusError as error:
                self._log.warning("not_answered", verb=verb.name, error=str(error))
        self._figures.verb_s.labels(verb.name).observe(clock.now_s() - began_s)

    async def _outcome(self, verb: _Verb, data: bytes) -> Message:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await verb.answer(verb.decode(data))
        except RefusedError as error:
            left = error.allowance if isinstance(error, OverLimitError) else None
            return Refused(refusal=error.refusal, allowance=left)
        except (msgspec.DecodeError, asyncpg.DataError) as error:
            self._log.error("verb_not_understood", verb=verb.name, error=f"{type(error).__name__}: {error}")
            return Refused(refusal=Refusal(kind=RefusalKind.BAD_REQUEST, message="The request was not understood."))
        except StoreAwayError:
            return Refused(refusal=STORE_AWAY)
        except (BusError, TimeoutError) as error:
            self._log.warning("verb_unanswered", verb=verb.name, error=f"{type(error).__name__}: {error}")
            return Refused(refusal=BUS_AWAY)
        except Exception:  # noqa: BLE001 - one request's fault must not end the others'
            self._figures.crashed.labels(verb.name).inc()
            self._log.exception("verb_failed", verb=verb.name)
            return Refused(refusal=OUR_FAULT)

    # --- background --------------------------------------------------------------------------------------

    async def _again(self, name: str, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        """A job for ever, spread out so that instances do not march in step; what is away is waited for."""
        away = False
        while True:
            try:
                await job()
                away = False
            except BusClosedError:
                raise
            except (StoreAwayError, BusError) as error:
                if not away:
                    self._log.warning("background_waits", job=name, error=f"{type(error).__name__}: {error}")
                away = True
            except Exception:  # noqa: BLE001 - one row's fault must not end the service; counted, and seen in the log
                away = True
                self._figures.crashed.labels(name).inc()
                self._log.exception("background_failed", job=name)
            await asyncio.sleep(max(every_s, 1.0 if away else 0.0) * (0.75 + 0.5 * clock.random_unit()))

    async def _look(self) -> None:
        try:
            await self._store.watch()
        finally:
            self._figures.store_away.set(self._store.away is not None)
