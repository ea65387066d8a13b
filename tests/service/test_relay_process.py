"""Relay, safety and usage as their own processes on real servers, each with its own bus user and permissions."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import asyncpg
import msgspec

from ops.files import free_port
from ops.permissions import inbox_prefix
from services.safety.rules import CANARY
from shared import clock
from shared.bus.nats import NatsBus, connect
from shared.errors import BusTimeoutError, NoRespondersError
from shared.log_store import LogStore
from shared.messages import (
    Accepted,
    Chunk,
    End,
    Frame,
    Open,
    OpenStream,
    Refused,
    RequestEcho,
    SafetyCheck,
    SafetyWatch,
    StreamOpened,
    UsageRecord,
    Verdict,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.subjects import Names
from shared.tiers import Tier
from shared.topology import topology
from tests.house import ROOT
from tests.integration.servers import RunningNats

NAMES = Names("local")
PATIENCE_S = 30.0


class Process:
    """One service, started as an operator would."""

    def __init__(self, service: str, nats: RunningNats, **settings: str) -> None:
        self.service, self.port = service, free_port()
        user, password = nats.user(service)
        self.env = {
            "PATH": os.environ.get("PATH", ""),
            "CHORUS_NAME": f"{service}-1",
            "CHORUS_NATS_URL": nats.url,
            "CHORUS_NATS_USER": user,
            "CHORUS_NATS_PASSWORD": password,
            "CHORUS_HTTP_PORT": str(self.port),
            **settings,
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"services.{self.service}", cwd=ROOT, env=self.env, stderr=asyncio.subprocess.PIPE
        )

    async def page(self, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
            session.get(f"http://127.0.0.1:{self.port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def ready(self) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, (await self.process.stderr.read()).decode()
        try:
            return (await self.page("/readyz"))[0] == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await self.process.communicate()
        return self.process.returncode or 0


@asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    await process.start()
    try:
        await eventually(process.ready, f"{process.service} is ready")
        yield process
    finally:
        await process.stop()


async def eventually(holds: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait for a condition, with a deadline."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


@asynccontextmanager
async def bus_of(nats: RunningNats, user: str) -> AsyncIterator[NatsBus]:
    name, password = nats.user(user)
    bus = await connect(nats.url, user=name, password=password, inbox_prefix=inbox_prefix(user))
    try:
        yield bus
    finally:
        await bus.close()


async def begin(store: LogStore) -> tuple[str, int]:
    """An accepted and opened reply, and the sequence its next entry follows."""
    reply = clock.new_reply_id("local", 0)
    accepted = Accepted(
        reply_id=reply,
        org="o",
        user="u",
        created_s=clock.wall_s(),
        model="m",
        tier=Tier.FREE,
        budget=64,
        seed=1,
        input_tokens=3,
        deadline_s=600.0,
        echo=RequestEcho(),
    )
    seq = await store.append(reply, 0, encode(accepted))
    return reply, await store.append(
        reply, seq, encode(Open(attempt=1, replica="r1", model_version="1", first_index=0))
    )


def chunk(index: int, text: str) -> bytes:
    return encode(Chunk(attempt=1, first_index=index, ids=pack_ids([index]), text=text, text_ends=(len(text),)))


async def test_a_relay_process_serves_a_gateway(fresh_nats):
    """Frames reach the gateway's own user; a SIGTERM sends it elsewhere and ends the process cleanly."""
    relay = Process("relay", fresh_nats)
    async with bus_of(fresh_nats, "ops") as ops, bus_of(fresh_nats, "gateway") as gateway:
        await ops.apply(*topology(NAMES, []))
        store = LogStore(ops, NAMES)
        reply, seq = await begin(store)
        async with running(relay):
            inbox = await gateway.subscribe(NAMES.frames("g1", "s1"))
            request = OpenStream(reply_id=reply, stream_id="s1", inbox=NAMES.frames("g1", "s1"))
            answer = await gateway.request(NAMES.relay_open, encode(request))
            assert decoder(StreamOpened).decode(answer.data).relay.startswith("relay-1-")
            texts: list[str] = []
            for index, word in enumerate(("one ", "two ", "three")):
                seq = await store.append(reply, seq, chunk(index, word))
                while len(texts) <= index:
                    message = await inbox.next(PATIENCE_S)
                    assert message is not None
                    entries = [item.entry for item in decoder(Frame).decode(message.data).entries]
                    texts += [entry.text for entry in entries if isinstance(entry, Chunk)]
            assert texts == ["one ", "two ", "three"]
            _, page = await relay.page("/metrics")
            assert "chorus_relay_frames_total" in page
            assert await relay.stop() == 0
        last = await inbox.next(PATIENCE_S)
        assert last is not None
        assert decoder(Frame).decode(last.data).closing == "draining"


async def test_a_safety_process_checks_and_watches(fresh_nats):
    """A replica's check is answered; a watched reply that is flagged ends in its log."""
    async with bus_of(fresh_nats, "ops") as ops, bus_of(fresh_nats, "replica") as replica:
        await ops.apply(*topology(NAMES, []))
        store = LogStore(ops, NAMES)
        reply, seq = await begin(store)
        async with running(Process("safety", fresh_nats)) as safety:
            answer = await replica.request(NAMES.safety_check, encode(SafetyCheck(stage="output", text=CANARY)))
            assert decoder(Verdict).decode(answer.data).category == "canary"
            async with bus_of(fresh_nats, "router") as router:
                await router.publish(NAMES.safety_watch, encode(SafetyWatch(reply_id=reply)))
                await store.append(reply, seq, chunk(0, f"{CANARY}."))

                async def ended() -> End | None:
                    return (await store.read(reply)).ended

                await eventually(ended, "the reply is ended")
            end = await ended()
            assert end is not None
            assert (end.reason, end.by) == (EndReason.SAFETY, "safety-1")
            assert await safety.stop() == 0


async def test_a_usage_process_fills_the_ledger(fresh_nats, postgres_url):
    """A replica's cost record becomes a row, and the record is acknowledged."""
    async with running(Process("usage", fresh_nats, CHORUS_POSTGRES_URL=postgres_url)) as usage:
        record = UsageRecord(
            reply_id="resp_1",
            attempt=1,
            org="o",
            user="u",
            tier=Tier.PAID,
            model="m",
            replica="r1",
            input_tokens=10,
            cached_tokens=0,
            output_tokens=5,
            engine_s=0.5,
            at_s=clock.wall_s(),
        )
        async with bus_of(fresh_nats, "replica") as replica:
            await replica.append(NAMES.usage("resp_1"), encode(record), message_id="resp_1.1", timeout_s=5.0)

        async def counted() -> bool:
            return 'chorus_usage_records_total{outcome="new"} 1.0' in (await usage.page("/metrics"))[1]

        await eventually(counted, "the record is charged")
        connection = await asyncpg.connect(postgres_url)
        rows = await connection.fetch("SELECT reply_id, attempt, output_tokens FROM usage_records")
        await connection.close()
        assert [tuple(row) for row in rows] == [("resp_1", 1, 5)]
        assert await usage.stop() == 0


async def test_bad_settings_end_the_process_with_a_sentence(fresh_nats):
    """A missing address and a rules file that is not there are said, and the process ends with status 2."""
    for process, said in (
        (Process("usage", fresh_nats), "CHORUS_POSTGRES_URL: must be set"),
        (
            Process("safety", fresh_nats, CHORUS_SAFETY_RULES="nowhere.json"),
            "cannot read the safety rules nowhere.json",
        ),
    ):
        await process.start()
        async with asyncio.timeout(PATIENCE_S):
            _, errors = await process.process.communicate()
        assert process.process.returncode == 2
        assert said in errors.decode()


async def test_a_relay_lives_through_the_death_of_the_bus(fresh_nats):
    """NATS is killed and comes back: the stream is closed as `draining`, and opened again it holds the whole log."""
    async with bus_of(fresh_nats, "ops") as ops, bus_of(fresh_nats, "gateway") as gateway:
        await ops.apply(*topology(NAMES, []))
        store = LogStore(ops, NAMES)
        reply, seq = await begin(store)
        async with running(Process("relay", fresh_nats)) as relay:
            inbox = await gateway.subscribe(NAMES.frames("g1", "*"))

            async def open_again(stream_id: str) -> bool:
                request = OpenStream(reply_id=reply, stream_id=stream_id, inbox=NAMES.frames("g1", stream_id))
                try:
                    answer = await gateway.request(NAMES.relay_open, encode(request), timeout_s=2.0)
                except (BusTimeoutError, NoRespondersError):
                    return False
                return isinstance(msgspec.msgpack.decode(answer.data, type=StreamOpened | Refused), StreamOpened)

            assert await open_again("s1")
            await fresh_nats.kill()
            await fresh_nats.start()
            await eventually(relay.ready, "the relay is connected again")
            await store.append(reply, seq, chunk(0, "after"))
            await eventually(lambda: open_again("s2"), "a stream opens")
            texts, closings = [], set()
            while texts != ["after"] or "draining" not in closings:
                message = await inbox.next(PATIENCE_S)
                assert message is not None, (texts, closings)
                frame = decoder(Frame).decode(message.data)
                closings.add(frame.closing)
                if frame.stream_id == "s2":
                    texts += [item.entry.text for item in frame.entries if isinstance(item.entry, Chunk)]
