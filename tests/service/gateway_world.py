"""A gateway on a real port, with the smallest conversation and relays that speak the messages, on the memory bus."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from shared import clock
from shared.bus.memory import MemoryBus, MemoryServer
from shared.catalog import local_catalog
from shared.messages import (
    Accepted,
    Chunk,
    Credit,
    Done,
    End,
    Entry,
    Frame,
    InputItems,
    KeyFound,
    KeyLookup,
    KeyRevoked,
    Notice,
    Open,
    OpenStream,
    Principal,
    Refused,
    RelayAlive,
    ReplyRef,
    ReplyView,
    SendMessage,
    Sent,
    SequencedEntry,
    StreamOpened,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import Metrics, configure_logging
from shared.tiers import Tier
from shared.token_log import LogView

KEY = "sk-chorus-test"
ALICE = Principal(org="acme", user="alice", tier=Tier.PAID, key_id="key_1")
NAMES = Names()
WAIT_S = 10.0
RELAY_CREDIT_WAIT_S = 0.005


def refused(kind: RefusalKind, message: str = "no", **more: Any) -> Refused:
    return Refused(refusal=Refusal(kind=kind, message=message, **more))


def chunk(first: int, words: list[str], attempt: int = 1, cached: int | None = None) -> Chunk:
    ends, text = [], ""
    for word in words:
        text += word
        ends.append(len(text))
    ids = pack_ids(range(100 + first, 100 + first + len(words)))
    return Chunk(attempt=attempt, first_index=first, ids=ids, text=text, text_ends=tuple(ends), cached_tokens=cached)


def opened(attempt: int = 1, first_index: int = 0) -> Open:
    return Open(attempt=attempt, replica="r1", model_version="v1", first_index=first_index)


def end(reason: EndReason = EndReason.STOP_TOKEN, **more: Any) -> End:
    return End(reason=reason, by="test", ended_s=1_700_000_002.0, **more)


async def eventually(condition: Callable[[], Any], what: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    assert value, what
    return value


@dataclass
class Log:
    """One reply's log; whoever follows it is woken by each entry."""

    items: list[SequencedEntry] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    alive: bool = True

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            self.items.append(SequencedEntry(seq=len(self.items) * 3 + 7, entry=entry))
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()

    @property
    def view(self) -> LogView:
        return LogView().apply_all(self.items)


class FakeRelay:
    """Follows logs for gateways, frame by frame, a credit each; dies without a word when told to."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.bus = MemoryBus(world.server)
        self.opens: list[OpenStream] = []
        self.closed: set[str] = set()
        self.credits: dict[str, int] = {}
        self.numbers: dict[str, int] = {}  # of the last frame sent, by stream
        self.frames_sent = 0
        self.refuse: Refused | None = None
        self.frame_entries_max = 8
        self.skip_number_once = False
        self.lose_last_once = False
        self.frames_first = False  # the answer to an open is overtaken by what follows it
        self.notices: dict[str, list[Notice]] = {}
        self.paused = False
        self.hold_opens = asyncio.Event()  # cleared: opens are heard and not answered
        self.hold_opens.set()
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._opens = await self.bus.subscribe(NAMES.relay_open, queue="relay")
        self._credits = await self.bus.subscribe(NAMES.credit(self.name))
        self._tasks = [
            self._group.create_task(body) for body in (self._hear_opens(), self._hear_credits(), self._live())
        ]

    async def die(self) -> None:
        """Nothing more is heard of it."""
        for task in self._tasks:
            task.cancel()
        await self._stack.aclose()
        await self._opens.close()
        await self._credits.close()
        await self.bus.close()

    async def leave(self, why: str) -> None:
        """Close every stream, as a relay does that drains or finds a client slow."""
        for request in self.opens:
            if request.stream_id not in self.closed:
                self.closed.add(request.stream_id)
                number = self.numbers.get(request.stream_id, 0) + 1
                frame = Frame(stream_id=request.stream_id, number=number, closing=why)
                await self.bus.publish(request.inbox, encode(frame))

    async def _live(self) -> None:
        while True:
            await self.bus.publish(NAMES.relay_alive, encode(RelayAlive(relay=self.name)))
            await asyncio.sleep(0.2)

    async def _hear_credits(self) -> None:
        async for message in self._credits:
            credit = decoder(Credit).decode(message.data)
            self.credits[credit.stream_id] = self.credits.get(credit.stream_id, 0) + credit.count
            if credit.close:
                self.closed.add(credit.stream_id)

    async def _hear_opens(self) -> None:
        async for message in self._opens:
            request = decoder(OpenStream).decode(message.data)
            self.opens.append(request)
            await self.hold_opens.wait()
            log = self.world.logs.get(request.reply_id)
            if self.refuse is not None:
                await self.bus.publish(message.reply, encode(self.refuse))
            elif log is None or not log.alive:
                await self.bus.publish(message.reply, encode(refused(RefusalKind.GONE)))
            else:
                self.credits[request.stream_id] = request.credits
                opened_as = StreamOpened(relay=self.name, credit_subject=NAMES.credit(self.name))
                following = self._stream(request, log)
                if self.frames_first:
                    await following
                    await self.bus.publish(message.reply, encode(opened_as))
                else:
                    await self.bus.publish(message.reply, encode(opened_as))
                    self._tasks.append(self._group.create_task(following))

    async def _stream(self, request: OpenStream, log: Log) -> None:
        at = next((n for n, item in enumerate(log.items) if item.seq > request.after_seq), len(log.items))
        while request.stream_id not in self.closed:
            grown = log.grown
            notices = self.notices.get(request.reply_id, [])
            items = log.items[at : at + self.frame_entries_max]
            if self.paused or (not items and not notices):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELAY_CREDIT_WAIT_S):
                        await grown.wait()
                continue
            if self.credits[request.stream_id] <= 0:
                await asyncio.sleep(RELAY_CREDIT_WAIT_S)
                continue
            at += len(items)
            number = self.numbers[request.stream_id] = self.numbers.get(request.stream_id, 0) + 1
            over = bool(items) and isinstance(items[-1].entry, End)
            frame = Frame(
                stream_id=request.stream_id,
                number=number,
                entries=tuple(items),
                notice=notices.pop(0) if notices else None,
                closing="ended" if over else None,
            )
            self.credits[request.stream_id] -= 1
            self.frames_sent += 1
            if self.skip_number_once and number == 2:
                self.skip_number_once = False  # this frame is lost on the way
            elif self.lose_last_once and over:
                self.lose_last_once = False  # so is this, and no later one shows it
            else:
                await self.bus.publish(request.inbox, encode(frame))
            if over:
                return


class World:
    """The bus, the fakes, and one gateway; `script` writes the log of each new reply."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.logs: dict[str, Log] = {}
        self.owners: dict[str, Principal] = {}
        self.sends: list[SendMessage] = []
        self.keys = {KEY: ALICE}
        self.lookups = 0
        self.by_key: dict[tuple[str, str | None], str] = {}
        self.stored: dict[str, ReplyView] = {}
        self.refuse_send: Refused | None = None
        self.script: Callable[[Log, Accepted], Awaitable[None]] = self.say_hello
        self.relays: list[FakeRelay] = []
        self.url = ""
        self.gateway: GatewayService
        self.metrics = Metrics()
        self.swallow_answers = 0  # sends that are done, and whose answer is lost
        self._serving: dict[str, asyncio.Task[None]] = {}
        self.released = asyncio.Event()  # for scripts that wait for the test

    # --- the reply's writer ---------------------------------------------------------------------------------

    @staticmethod
    async def say_hello(log: Log, _: Accepted) -> None:
        log.append(opened(), chunk(0, ["Hello"], cached=2), chunk(1, [" wor", "ld"]), chunk(3, ["!"]), end())

    def accept(self, message: SendMessage) -> str:
        reply_id = clock.new_reply_id("local", 1)
        accepted = Accepted(
            reply_id=reply_id,
            org=message.principal.org,
            user=message.principal.user,
            created_s=1_700_000_000.0,
            model=message.model,
            tier=message.principal.tier,
            budget=message.echo.max_output_tokens or 100_000,
            seed=1,
            input_tokens=5,
            deadline_s=600.0,
            echo=message.echo,
        )
        self.logs[reply_id] = Log()
        self.logs[reply_id].append(accepted)
        self.owners[reply_id] = message.principal
        self.group.create_task(self.script(self.logs[reply_id], accepted))
        return reply_id

    def view(self, reply_id: str) -> ReplyView:
        if reply_id in self.stored:
            return self.stored[reply_id]
        log = self.logs[reply_id].view
        assert log.accepted is not None
        return ReplyView(
            accepted=log.accepted,
            text=log.text,
            ids=pack_ids(log.ids),
            reason=log.ended.reason if log.ended else None,
            usage=log.usage,
            ended_s=log.ended.ended_s if log.ended else None,
            log_alive=self.logs[reply_id].alive,
        )

    def expire(self, reply_id: str) -> None:
        """The log is gone; what conversation stored stays."""
        view = self.view(reply_id)
        self.logs[reply_id].alive = False
        self.stored[reply_id] = msgspec.structs.replace(view, log_alive=False)

    def withdraw(self, reply_id: str) -> None:
        """A late flag took the stored text back."""
        view = msgspec.structs.replace(self.view(reply_id), text="", ids=b"", withdrawn=True, log_alive=False)
        self.stored[reply_id] = view

    async def revoke(self, key: str) -> None:
        principal = self.keys.pop(key)
        await self.bus.publish(NAMES.keys, encode(KeyRevoked(key_id=principal.key_id)))

    # --- conversation ---------------------------------------------------------------------------------------

    def serve(self, verb: str) -> None:
        self._serving[verb] = self.group.create_task(self._serve(verb, self._verbs[verb]))

    def stop_serving(self, verb: str) -> None:
        self._serving.pop(verb).cancel()

    async def _serve(self, verb: str, answer: Callable[[bytes], Any]) -> None:
        subscription = await self.bus.subscribe(NAMES.conversation(verb), queue="conversation")
        try:
            async for message in subscription:
                said = answer(message.data)
                if self.swallow_answers and verb == "send":
                    self.swallow_answers -= 1
                else:
                    await self.bus.publish(message.reply, encode(said))
        finally:
            await subscription.close()

    def _send(self, data: bytes) -> Any:
        message = decoder(SendMessage).decode(data)
        self.sends.append(message)
        if self.refuse_send is not None:
            return self.refuse_send
        place = (message.principal.user, message.idempotency_key)
        attached = place in self.by_key
        if not attached:
            self.by_key[place] = self.accept(message)
        return Sent(reply_id=self.by_key[place], attached=attached)

    def _of_reply(self, act: Callable[[str], Any]) -> Callable[[bytes], Any]:
        def answer(data: bytes) -> Any:
            ref = decoder(ReplyRef).decode(data)
            owner = self.owners.get(ref.reply_id)
            if owner is None or owner.user != ref.principal.user:
                return refused(RefusalKind.NOT_FOUND, "No such reply.")
            return act(ref.reply_id)

        return answer

    def _cancel(self, reply_id: str) -> Done:
        log = self.logs[reply_id]
        if log.view.ended is None:
            log.append(end(EndReason.USER_STOP))
        return Done()

    def _delete(self, reply_id: str) -> Done:
        del self.owners[reply_id]
        return Done()

    def _items(self, reply_id: str) -> InputItems:
        sent = next(m for m in self.sends if self.by_key.get((m.principal.user, m.idempotency_key)) == reply_id)
        numbered = (msgspec.structs.replace(item, id=f"msg_{n}") for n, item in enumerate(sent.items))
        return InputItems(items=tuple(numbered))

    def _key(self, data: bytes) -> Any:
        self.lookups += 1
        digest = decoder(KeyLookup).decode(data).digest
        for key, principal in self.keys.items():
            if hashlib.sha256(key.encode()).digest() == digest:
                return KeyFound(principal=principal)
        return refused(RefusalKind.NOT_FOUND)

    async def add_relay(self) -> FakeRelay:
        relay = FakeRelay(self, f"relay-{len(self.relays) + 1}")
        self.relays.append(relay)
        await relay.start()
        return relay

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"chorus_{name}", labels) or 0.0

    @contextlib.asynccontextmanager
    async def running(
        self, *, relays: int = 1, ping_s: float = 1.0, web_dir: Path | None = None
    ) -> AsyncIterator["World"]:
        settings = GatewaySettings(
            name="gateway-1",
            catalog=Path("unused"),
            ping_s=ping_s,
            **({"web_dir": web_dir} if web_dir else {}),
        )
        bus = MemoryBus(self.server)
        log = configure_logging("gateway", "gateway-1", "error")
        self.gateway_bus = bus
        self.gateway = GatewayService(settings, local_catalog("stub"), bus, self.metrics, log)
        self._verbs: dict[str, Callable[[bytes], Any]] = {
            "send": self._send,
            "get": self._of_reply(self.view),
            "cancel": self._of_reply(self._cancel),
            "delete": self._of_reply(self._delete),
            "input_items": self._of_reply(self._items),
            "key": self._key,
        }
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as self.group:
            for verb in self._verbs:
                self.serve(verb)
            for _ in range(relays):
                await self.add_relay()
            await self.gateway.start()
            running = self.group.create_task(self.gateway.run())
            self.url = f"http://127.0.0.1:{await self.gateway.listen(stack)}"
            try:
                yield self
            finally:
                await stack.aclose()
                for relay in self.relays:
                    await relay.die()
                running.cancel()
                for verb in list(self._serving):
                    self.stop_serving(verb)

    def client(self, key: str = KEY, **more: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, headers={"Authorization": f"Bearer {key}"}, **more)
