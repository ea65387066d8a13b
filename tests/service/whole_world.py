"""Gateway, conversation and relay in one process on the in-memory bus, with a hand that answers what is queued.

HTTP ──> gateway ──> conversation ──> lane ──> the hand ──> log ──> relay ──> gateway ──> HTTP
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from services.conversation import key_store
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from services.relay.service import RelayService
from services.relay.settings import RelaySettings
from shared import clock
from shared.errors import LogGoneError, TokenLogError, WrongLastSequenceError
from shared.log_store import LogStore
from shared.storage import borrow
from shared.telemetry import Metrics
from shared.tiers import Tier
from tests.service.conversation_world import CATALOG, NAMES, World, a_world


class Whole:
    """A region with doors. `words` is what the hand writes to every reply; None: it waits."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.words: list[str] | None = ["Hello", " there"]
        self.metrics = Metrics()
        self.url = ""
        self.gateway: GatewayService
        self._written: set[str] = set()

    async def start(self, **gateway: Any) -> None:
        world, log = self.world, self.world.log
        relay = RelayService(
            RelaySettings(name="relay-1"), bus := world.server.bus(), LogStore(bus, NAMES), Metrics(), log
        )
        await relay.start()
        settings = GatewaySettings(name="gateway-1", catalog=Path("unused"), **gateway)
        self.gateway = GatewayService(settings, CATALOG, world.server.bus(), self.metrics, log)
        await self.gateway.start()
        for forever in (relay.run(), self.gateway.run(), self._hand()):
            task = asyncio.create_task(forever)
            world.stack.push_async_callback(_ended, task)
        self.url = f"http://127.0.0.1:{await self.gateway.listen(world.stack)}"

    async def key(self, user: str = "ann", tier: Tier = Tier.PAID) -> str:
        async with borrow(self.world.pool) as conn:
            return (await key_store.create_key(conn, org="acme", user=user, tier=tier))[0]

    async def client(self, user: str = "ann", tier: Tier = Tier.PAID) -> aiohttp.ClientSession:
        """A session of one user, closed with the world."""
        headers = {"Authorization": f"Bearer {await self.key(user, tier)}"}
        return await self.world.stack.enter_async_context(aiohttp.ClientSession(self.url, headers=headers))

    async def _hand(self) -> None:
        while True:
            if self.words is not None:
                for request in await self.world.all_queued():
                    if request.reply_id not in self._written:
                        self._written.add(request.reply_id)
                        with contextlib.suppress(TokenLogError, LogGoneError, WrongLastSequenceError):
                            await self.world.write(request.reply_id, self.words)
            await asyncio.sleep(0.005)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def a_whole_world(postgres_url: str, **conversation: Any) -> AsyncIterator[Whole]:
    async with a_world(postgres_url) as world:
        await world.service(**conversation)
        whole = Whole(world)
        await whole.start()
        yield whole


async def said(answer: aiohttp.ClientResponse) -> Any:
    """The JSON of an answer that is as it should be: an id, and one shape for errors."""
    assert answer.headers["x-request-id"].startswith("req_")
    body = msgspec.json.decode(await answer.read())
    if answer.status >= 400:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body


def unknown_reply() -> str:
    return clock.new_reply_id(NAMES.region, 0)
