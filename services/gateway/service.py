"""The gateway: wires keys, conversation and relays to the HTTP doors."""

import asyncio
import contextlib
from contextlib import AsyncExitStack

import msgspec

from services.gateway.app import Draining, listen, make_app
from services.gateway.auth import Keys
from services.gateway.conversation_client import Conversation
from services.gateway.conversation_doors import ConversationDoors
from services.gateway.doors import Doors
from services.gateway.limits_store import Limits
from services.gateway.measures import Measures
from services.gateway.settings import GatewaySettings
from services.gateway.streams import Relays
from shared.bus import Bus, Subscription
from shared.catalog import Catalog
from shared.messages import KeyRevoked, decoder
from shared.service import HealthDoors
from shared.subjects import Names
from shared.telemetry import Journal, Log, Metrics
from shared.valkey import Valkey

_revoked = decoder(KeyRevoked)


class GatewayService:
    """See `shared.service.Service` for the doors."""

    def __init__(self, settings: GatewaySettings, catalog: Catalog, bus: Bus, metrics: Metrics, log: Log) -> None:
        self._settings, self._bus, self._log = settings, bus, log
        self._names = Names(settings.region)
        conversation = Conversation(bus, self._names)
        self._keys = Keys(conversation)
        self.relays = Relays(bus, self._names, settings.name, metrics, log)
        self._draining = Draining()
        self._revocations: Subscription | None = None
        self.health = HealthDoors(self, metrics)
        measures = Measures(metrics)
        self._journal = Journal(bus, self._names, "gateway", metrics)
        self._valkey = _valkey(settings, measures, self._journal)
        self._limits = Limits(self._valkey, settings.region, settings.allowed, measures)
        self._doors = Doors(
            settings=settings,
            catalog=catalog,
            keys=self._keys,
            conversation=conversation,
            relays=self.relays,
            measures=measures,
            limits=self._limits,
            log=log,
        )
        self._conversation_doors = ConversationDoors(self._doors, catalog, conversation)

    async def listen(self, stack: AsyncExitStack) -> int:
        """Open the HTTP doors until the stack closes; returns the port. Subscribes first: no frame is missed."""
        await self.start()
        if self._valkey is not None:
            stack.push_async_callback(self._valkey.close)
        app = make_app(
            (self._doors, self._conversation_doors), self.health, self._settings.web_dir, self._draining, self._log
        )
        return await listen(stack, app, self._settings.http_host, self._settings.http_port)

    async def start(self) -> None:
        if self._revocations is None:
            self._revocations = await self._bus.subscribe(self._names.keys)
            await self.relays.start()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.relays.run(), name="gateway.streams")
            group.create_task(self._hear_revocations(), name="gateway.keys")
            group.create_task(self._limits.run(), name="gateway.limits")
            group.create_task(self._journal.run(), name="gateway.journal")

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new; let streams end. Those that do not are cut when we leave, and resume elsewhere."""
        self._draining.on = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.relays.idle.wait()

    def ready(self) -> str | None:
        if self._revocations is None:
            return "not yet subscribed"
        return None if self._bus.connected else "the bus is away"

    async def _hear_revocations(self) -> None:
        assert self._revocations is not None, "start() first"
        async for message in self._revocations:
            try:
                self._keys.revoked(_revoked.decode(message.data).key_id)
            except msgspec.DecodeError as error:
                self._log.warning("message_undecodable", subject=message.subject, error=str(error))


def _valkey(settings: GatewaySettings, measures: Measures, journal: Journal) -> Valkey | None:
    """Told of in the journal when it goes and when it is back; nobody waits for it."""
    if not settings.redis_url:
        return None

    def changed(away: bool, why: str) -> None:
        measures.valkey_away.set(away)
        journal.note("valkey_away" if away else "valkey_back", why=why)

    return Valkey(settings.redis_url.reveal(), changed=changed)
