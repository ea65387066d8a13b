"""A region for tests of conversation: an in-memory bus, a real PostgreSQL, and a hand in place of router and replica."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from services.conversation.composition import compose
from services.conversation.service import ConversationService
from services.conversation.settings import ConversationSettings
from services.conversation.store import Store
from shared import clock
from shared.bus.memory import MemoryServer
from shared.catalog import Catalog, ModelCard
from shared.log_store import LogStore
from shared.messages import (
    Chunk,
    ConversationItems,
    ConversationPage,
    ConversationView,
    Done,
    End,
    GenerateRequest,
    InputItem,
    InputItems,
    KeyFound,
    Open,
    Principal,
    Refused,
    ReplyRef,
    ReplyView,
    RequestEcho,
    Sampling,
    SendMessage,
    Sent,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.settings import Secret
from shared.storage import Pool, borrow, open_pool
from shared.subjects import Names
from shared.telemetry import Metrics
from shared.tiers import Tier
from shared.token_log import ended_reply
from shared.tokenizer import StubTokenizer

NAMES = Names()
ANN = Principal(org="acme", user="ann", tier=Tier.PAID, key_id="key_1")
BOB = Principal(org="acme", user="bob", tier=Tier.PAID, key_id="key_2")
CATALOG = Catalog(
    models=(
        ModelCard(id="stub", file="stub", context_tokens=512, output_tokens_max=128),
        ModelCard(id="stub-mini", file="stub", context_tokens=128, output_tokens_max=32, role="mini"),
    )
)
_Answer = (
    Sent | Refused | ReplyView | Done | InputItems | KeyFound | ConversationView | ConversationPage | ConversationItems
)
_answers = decoder(_Answer)  # type: ignore[arg-type,var-annotated]
_generate = decoder(GenerateRequest)
STUB = StubTokenizer()


def answer(data: bytes) -> Any:
    """What conversation answered."""
    return _answers.decode(data)


async def until(condition: Callable[[], Awaitable[Any]], what: str, deadline_s: float = 15.0) -> Any:
    """The first true value of `condition`."""
    give_up_s = clock.now_s() + deadline_s
    while True:
        value = await condition()
        if value:
            return value
        assert clock.now_s() < give_up_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)


class World:
    """One region: a bus, a database, conversation services, and a hand in place of router and replica."""

    def __init__(self, pool: Pool, stack: AsyncExitStack, postgres_url: str) -> None:
        self.skipped_s = 0.0  # the server's clock is ahead by this
        self.server = MemoryServer(now=lambda: clock.wall_s() + self.skipped_s)
        self.pool, self.stack, self.url = pool, stack, postgres_url
        self.bus = self.server.bus()
        self.store = Store(pool)
        self.logs = LogStore(self.bus, NAMES)
        self.metrics = Metrics()
        self.lines: list[dict[str, Any]] = []
        self.services: list[ConversationService] = []

    async def service(self, name: str = "conversation-1", **settings: Any) -> ConversationService:
        """A service that runs until the world ends."""
        made = ConversationSettings(
            name=name, catalog=Path("unused"), postgres_url=Secret(self.url), log_shards=2, **settings
        )
        pool = await open_pool(self.url, name=name, stack=self.stack)
        self.metrics = Metrics()
        service = compose(made, CATALOG, bus=self.server.bus(), pool=pool, metrics=self.metrics, log=self.log)
        await service.start()
        task = asyncio.create_task(service.run())
        self.stack.push_async_callback(_ended, task)
        self.services.append(service)
        return service

    @property
    def log(self) -> Any:
        """Keeps every line."""
        return structlog.wrap_logger(
            structlog.PrintLogger(), processors=[self._keep], wrapper_class=structlog.BoundLogger
        )

    def _keep(self, _: Any, level: str, event: dict[str, Any]) -> str:
        self.lines.append({"level": level, **event})
        return ""

    async def ask(self, verb: str, message: Any, timeout_s: float = 10.0) -> Any:
        found = await self.bus.request(NAMES.conversation(verb), encode(message), timeout_s=timeout_s)
        return answer(found.data)

    async def send(self, text: str = "hello", **changes: Any) -> Any:
        return await self.ask("send", a_message(text, **changes))

    async def queued(self, reply_id: str) -> GenerateRequest:
        """The request as it stands in its lane."""
        found = await self.all_queued()
        return next(request for request in found if request.reply_id == reply_id)

    async def all_queued(self) -> list[GenerateRequest]:
        requests = []
        for tier in Tier:
            entries = self.server.stream(NAMES.lane_stream(tier)).entries.values()
            requests += [_generate.decode(entry.data) for entry in entries]
        return requests

    async def write(self, reply_id: str, words: list[str], reason: EndReason | None = EndReason.STOP_TOKEN) -> None:
        """What router and replica do: open, one chunk, end, ENDED."""
        view = await self.logs.read(reply_id)
        ids, texts = [], []
        for word in words:
            for token in STUB.encode(word):
                ids.append(token)
                texts.append(STUB.decode([token]))
        if reason is EndReason.STOP_TOKEN:
            ids.append(STUB.special_ids["<|im_end|>"])
            texts.append("")
        opened = Open(attempt=1, replica="r1", model_version="1", first_index=0)
        seq = await self.logs.append(reply_id, view.last_seq, encode(opened))
        ends, at = [], 0
        for text in texts:
            at += len(text)
            ends.append(at)
        if ids:
            chunk = Chunk(
                attempt=1, first_index=0, ids=pack_ids(ids), text="".join(texts), text_ends=tuple(ends), cached_tokens=0
            )
            seq = await self.logs.append(reply_id, seq, encode(chunk))
        if reason is not None:
            await self.logs.append(reply_id, seq, encode(End(reason=reason, by="r1", ended_s=clock.wall_s())))
            await self.publish_ended(reply_id)

    async def publish_ended(self, reply_id: str) -> None:
        ended = ended_reply(await self.logs.read(reply_id))
        await self.bus.append(NAMES.ended(reply_id), encode(ended), message_id=reply_id, timeout_s=1.0)

    async def archived(self, reply_id: str, who: Principal = ANN) -> ReplyView:
        async def stored() -> ReplyView | None:
            found = await self.store.reply(who, reply_id)
            return found.view if found is not None and found.view.reason is not None else None

        return await until(stored, f"{reply_id} is archived")

    async def rows(self, sql: str, *arguments: Any) -> list[Any]:
        async with borrow(self.pool) as conn:
            return await conn.fetch(sql, *arguments)

    def finished(self, reply_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "reply_finished" and line["reply_id"] == reply_id]


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def a_world(postgres_url: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        pool = await open_pool(postgres_url, name="test", stack=stack)
        yield World(pool, stack, postgres_url)


def a_message(
    text: str = "hello",
    *,
    who: Principal = ANN,
    key: str | None = None,
    body: bytes = b"body",
    model: str = "stub",
    items: tuple[InputItem, ...] | None = None,
    branch_from: str | None = None,
    sampling: Sampling | None = None,
    **echo: Any,
) -> SendMessage:
    return SendMessage(
        principal=who,
        request_id="req_1",
        model=model,
        items=items if items is not None else (InputItem(role="user", text=text),),
        sampling=sampling or Sampling(),
        echo=RequestEcho(**echo),
        idempotency_key=key,
        body_hash=body,
        branch_from=branch_from,
    )


def ref(reply_id: str, who: Principal = ANN) -> ReplyRef:
    return ReplyRef(principal=who, request_id="req_2", reply_id=reply_id)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))


async def seen(value: Any) -> Any:
    """A value as a condition of `until`."""
    return value
