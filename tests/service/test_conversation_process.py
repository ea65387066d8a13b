"""Conversation as its own process on a real NATS (under its own user's permissions) and a real PostgreSQL."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from ops.files import free_port
from ops.permissions import inbox_prefix
from shared import clock
from shared.bus.nats import NatsBus, connect
from shared.errors import BusTimeoutError, NoRespondersError
from shared.limits import LOG_SHARDS
from shared.log_store import LogStore
from shared.messages import Chunk, End, GenerateRequest, Open, decoder, encode, pack_ids, unpack_ids
from shared.outcomes import EndReason, RefusalKind
from shared.subjects import user_bucket
from shared.tiers import Tier
from shared.token_log import ended_reply
from shared.topology import topology
from tests.house import ROOT
from tests.integration.servers import RunningNats
from tests.service.conversation_world import ANN, BOB, CATALOG, NAMES, STUB, a_message, ref, until
from tests.service.conversation_world import answer as read_answer


class Region:
    """A conversation process, and buses as the gateway and the router have them."""

    def __init__(self, nats: RunningNats, postgres_url: str, folder: Path) -> None:
        self.nats, self.port = nats, free_port()
        user, password = nats.user("conversation")
        catalog = folder / "catalog.json"
        catalog.write_bytes(msgspec.json.encode(CATALOG))
        self._env = {
            "PATH": os.environ.get("PATH", ""),
            "CHORUS_NAME": "conversation-1",
            "CHORUS_NATS_URL": nats.url,
            "CHORUS_NATS_USER": user,
            "CHORUS_NATS_PASSWORD": password,
            "CHORUS_POSTGRES_URL": postgres_url,
            "CHORUS_CATALOG": str(catalog),
            "CHORUS_HTTP_PORT": str(self.port),
        }
        self.process: asyncio.subprocess.Process | None = None
        self.gateway: NatsBus | None = None
        self.router: NatsBus | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.conversation", cwd=ROOT, env=self._env, stderr=asyncio.subprocess.PIPE
        )
        await until(self._ready, "conversation is ready", 60.0)

    async def _ready(self) -> bool:
        if self.process.returncode is not None:
            raise AssertionError((await self.process.stderr.read()).decode())
        return await self.page("/readyz") is not None

    async def page(self, path: str) -> str | None:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
                session.get(f"http://127.0.0.1:{self.port}{path}") as answer,
            ):
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(sign)
        async with asyncio.timeout(30.0):
            await self.process.communicate()
        return self.process.returncode

    async def ask(self, verb: str, message):
        """As the gateway asks: while nobody listens, again."""

        async def asked():
            try:
                return await self.gateway.request(NAMES.conversation(verb), encode(message), timeout_s=5.0)
            except (NoRespondersError, BusTimeoutError):
                return None

        return read_answer((await until(asked, f"{verb} is answered", 30.0)).data)

    async def as_user(self, name: str) -> NatsBus:
        user, password = self.nats.user(name)
        return await connect(self.nats.url, user=user, password=password, inbox_prefix=inbox_prefix(name))


@asynccontextmanager
async def a_region(nats: RunningNats, postgres_url: str, folder: Path) -> AsyncIterator[Region]:
    region = Region(nats, postgres_url, folder)
    region.gateway, region.router = await region.as_user("gateway"), await region.as_user("router")
    await region.router.apply(*topology(NAMES, [card.id for card in CATALOG.models], shards=LOG_SHARDS))
    try:
        await region.start()
        yield region
    finally:
        await region.stop()
        await region.gateway.close()
        await region.router.close()


async def test_a_message_goes_its_whole_way_under_its_own_permissions(
    fresh_nats: RunningNats, postgres_url: str, tmp_path: Path
) -> None:
    """Send, run, archive, next turn, cancel, delete and purge need nothing that the service's own user may not do."""
    async with a_region(fresh_nats, postgres_url, tmp_path) as region:
        first = await region.ask("send", a_message("one", key="k"))
        lane = NAMES.lane_consumer(Tier.PAID, "stub", user_bucket(ANN.org, ANN.user))
        puller = region.router.puller(NAMES.lane_stream(Tier.PAID), lane)
        (delivery,) = await puller.pull(1, 5.0)
        request = decoder(GenerateRequest).decode(delivery.data)
        assert request.reply_id == first.reply_id
        logs = LogStore(region.router, NAMES)
        await _write(logs, request, "alpha", EndReason.STOP_TOKEN)
        ended = ended_reply(await logs.read(first.reply_id))
        await region.router.append(NAMES.ended(first.reply_id), encode(ended), timeout_s=5.0)
        await region.router.ack(delivery.ack_subject)

        async def archived() -> bool:
            return "chorus_replies_ended_total{" in (await region.page("/metrics") or "")

        await until(archived, "it is archived")
        second = await region.ask("send", a_message("two", previous_response_id=first.reply_id))
        (delivery,) = await puller.pull(1, 5.0)
        prompt = unpack_ids(decoder(GenerateRequest).decode(delivery.data).prompt)
        assert "assistant\nalpha\nuser\ntwo" in STUB.decode(prompt)
        await region.ask("cancel", ref(second.reply_id))
        assert (await region.ask("get", ref(second.reply_id))).reason is EndReason.USER_STOP
        assert (await region.ask("get", ref(second.reply_id, BOB))).refusal.kind is RefusalKind.NOT_FOUND
        await region.ask("delete", ref(first.reply_id))

        async def purged() -> bool:
            return (await logs.read(first.reply_id)).accepted is None

        await until(purged, "the log is purged")
        assert (await region.ask("get", ref(first.reply_id))).refusal.kind is RefusalKind.NOT_FOUND
        await puller.close()
        assert await region.stop() == 0


async def test_killed_between_two_sends_it_loses_none(
    fresh_nats: RunningNats, postgres_url: str, tmp_path: Path
) -> None:
    """Killed with SIGKILL while sends are under way and started again, every send that is tried again with its key is
    one reply, in the lane once.
    """
    async with a_region(fresh_nats, postgres_url, tmp_path) as region:

        async def persist(number: int) -> str:
            message = a_message(f"text {number}", key=f"k{number}", body=str(number).encode())

            async def sent():
                answer = await region.ask("send", message)
                return getattr(answer, "reply_id", None)

            return await until(sent, f"send {number}", 60.0)

        sends = [asyncio.create_task(persist(number)) for number in range(40)]
        await until(lambda: _some(sends), "some are sent")
        await region.stop(signal.SIGKILL)
        await region.start()
        replies = await asyncio.gather(*sends)
        assert len(set(replies)) == 40
        lane = NAMES.lane_consumer(Tier.PAID, "stub", user_bucket(ANN.org, ANN.user))
        puller = region.router.puller(NAMES.lane_stream(Tier.PAID), lane)
        queued: list[str] = []

        async def all_there() -> bool:
            for delivery in await puller.pull(100, 0.5):
                queued.append(decoder(GenerateRequest).decode(delivery.data).reply_id)
                await region.router.ack(delivery.ack_subject)
            return set(queued) >= set(replies)

        await until(all_there, "all are queued", 30.0)
        assert len(queued) == len(set(queued))
        await puller.close()


async def _some(sends: list[asyncio.Task[str]]) -> bool:
    return any(send.done() for send in sends)


async def _write(logs: LogStore, request: GenerateRequest, text: str, reason: EndReason) -> None:
    ids = STUB.encode(text)
    opened = Open(attempt=1, replica="r1", model_version="1", first_index=0)
    seq = await logs.append(request.reply_id, request.accepted_seq, encode(opened))
    chunk = Chunk(
        attempt=1, first_index=0, ids=pack_ids(ids), text=text, text_ends=tuple(range(1, len(ids) + 1)), cached_tokens=0
    )
    seq = await logs.append(request.reply_id, seq, encode(chunk))
    await logs.append(request.reply_id, seq, encode(End(reason=reason, by="r1", ended_s=clock.wall_s())))
