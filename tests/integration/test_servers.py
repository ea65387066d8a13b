"""The embedded servers themselves: they come up, keep their data over a SIGKILL, and let each user do its own part."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg
import nats
import pytest
import redis.asyncio as redis

from bench.region import free_port
from ops import database
from ops.credentials import load_credentials
from ops.permissions import USERS, inbox_prefix
from ops.servers.nats import NatsServer
from ops.servers.valkey import ValkeyServer
from shared.bus import Bus
from shared.bus.nats import connect
from shared.errors import BusTimeoutError, ConfigError
from shared.ids import reply_id
from shared.tiers import Tier
from shared.topology import topology
from tests.integration.servers import RunningNats, RunningPostgres, RunningValkey

ANSWER_S = 2.0


async def connected(server: RunningNats, user: str = "ops", errors: list[Exception] | None = None, **options):
    name, password = server.user(user)

    async def note(error: Exception) -> None:
        if errors is not None:
            errors.append(error)

    return await nats.connect(
        server.url, user=name, password=password, inbox_prefix=inbox_prefix(user), error_cb=note, **options
    )


@asynccontextmanager
async def bus_of(server: RunningNats, user: str) -> AsyncIterator[Bus]:
    name, password = server.user(user)
    bus = await connect(server.url, user=name, password=password, inbox_prefix=inbox_prefix(user))
    try:
        yield bus
    finally:
        await bus.close()


async def until(condition, what: str, deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


async def test_a_file_stream_survives_the_kill_of_nats(fresh_nats: RunningNats):
    """After SIGKILL and a restart the stream holds what was acknowledged, under the same passwords."""
    client = await connected(fresh_nats)
    await client.jetstream().add_stream(name="KEPT", subjects=["kept.>"])
    await client.jetstream().publish("kept.a", b"one")
    await client.close()
    await fresh_nats.kill()
    await fresh_nats.start()
    client = await connected(fresh_nats)
    assert (await client.jetstream().get_last_msg("KEPT", "kept.a")).data == b"one"
    await client.close()


async def test_nats_lets_nobody_in_without_the_password(nats_server: RunningNats, tmp_path: Path):
    """A login with another password is refused."""
    other = load_credentials(tmp_path / "other.json", USERS)
    port = int(nats_server.url.rpartition(":")[2])
    server = NatsServer(tmp_path, tmp_path / "log", port, other, names=nats_server.names, shards=nats_server.shards)
    assert "Authorization Violation" in (await server.probe() or "")


async def test_an_asker_is_answered_in_its_own_inbox(nats_server: RunningNats):
    """The gateway asks conversation, and conversation may answer exactly where it was asked to."""
    subject = nats_server.names.conversation("get")
    async with bus_of(nats_server, "gateway") as asker, bus_of(nats_server, "conversation") as answerer:
        questions = await answerer.subscribe(subject)

        async def answer() -> None:
            question = await questions.next(ANSWER_S)
            assert question is not None
            await answerer.publish(question.reply, b"here")

        async with asyncio.TaskGroup() as group:
            group.create_task(answer())
            assert (await asker.request(subject, b"", timeout_s=ANSWER_S)).data == b"here"


@pytest.mark.parametrize(
    ("user", "subject"),
    [("relay", "_INBOX_gateway.>"), ("gateway", "_INBOX.>"), ("safety", "local.frames.>"), ("usage", ">")],
)
async def test_nobody_listens_to_what_is_not_theirs(nats_server: RunningNats, user: str, subject: str):
    """A subscription outside a user's permissions is refused by the server."""
    errors: list[Exception] = []
    client = await connected(nats_server, user, errors)
    await client.subscribe(subject)
    await until(lambda: errors, "the server refused the subscription")
    assert "permissions violation for subscription" in str(errors[0]).lower()
    await client.close()


async def test_a_gateway_cannot_write_a_token_log(nats_server: RunningNats):
    """A publish outside a user's permissions is refused by the server."""
    errors: list[Exception] = []
    client = await connected(nats_server, "gateway", errors)
    await client.publish("$KV.local_replies_0.resp_x", b"forged")
    await until(lambda: errors, "the server refused the publish")
    assert "permissions violation for publish" in str(errors[0]).lower()
    await client.close()


@pytest.mark.parametrize("user", ["conversation", "router"])
async def test_the_streams_are_declared_under_a_service_s_own_user(nats_server: RunningNats, user: str):
    """The idempotent apply step runs under the users that may run it, again and again."""
    async with bus_of(nats_server, user) as bus:
        await bus.apply(*topology(nats_server.names, ["m"]))
        await bus.apply(*topology(nats_server.names, ["m"]))


async def test_a_request_goes_its_way_under_each_one_s_own_user(fresh_nats: RunningNats):
    """Conversation writes log and lane; the router pulls, opens, acks; the replica extends and appends; relays read."""
    names = fresh_nats.names
    reply = reply_id("local", 1, 1, b"0123456789")
    log, lane = names.log_subject(reply), names.lane_stream(Tier.PAID)
    async with AsyncExitStack() as stack:
        conversation, router, replica, relay = [
            await stack.enter_async_context(bus_of(fresh_nats, user))
            for user in ("conversation", "router", "replica", "relay")
        ]
        await conversation.apply(*topology(names, ["m"]))
        live = await relay.subscribe(names.live(reply))
        first = await conversation.append(log, b"accepted", expected_last_seq=0, timeout_s=ANSWER_S)
        await conversation.append(names.lane_subject(Tier.PAID, "m", 0), b"request", timeout_s=ANSWER_S)
        (delivery,) = await router.puller(lane, names.lane_consumer(Tier.PAID, "m", 0)).pull(1, ANSWER_S)
        second = await router.append(log, b"open", expected_last_seq=first, timeout_s=ANSWER_S)
        await replica.extend(delivery.ack_subject)
        await replica.append(log, b"chunk", expected_last_seq=second, timeout_s=ANSWER_S)
        await router.ack(delivery.ack_subject)
        got = [await live.next(ANSWER_S) for _ in range(3)]
        assert [entry.data for entry in got if entry] == [b"accepted", b"open", b"chunk"]
        stored = await relay.read(names.log_stream_of(reply), log, from_seq=1, most=10)
        assert [entry.data for entry in stored] == [b"accepted", b"open", b"chunk"]
        last = await replica.last(names.log_stream_of(reply), log)
        assert last is not None
        assert last.data == b"chunk"
        assert await router.stream_bytes(names.log_stream_of(reply)) > 0
        with pytest.raises(BusTimeoutError):  # and a relay may not write
            await relay.append(log, b"forged", expected_last_seq=last.seq, timeout_s=0.3)


async def test_postgres_recovers_from_a_kill(tmp_path):
    """After SIGKILL of the whole server a committed row is there, and the stale lock file is no obstacle."""
    running = RunningPostgres(tmp_path)
    await running.start()
    try:
        connection = await asyncpg.connect(running.url)
        await connection.execute("CREATE TABLE t (x int); INSERT INTO t VALUES (7)")
        await running.kill()
        await connection.close(timeout=1)
        await running.start()
        connection = await asyncpg.connect(running.url)
        assert await connection.fetchval("SELECT x FROM t") == 7
        await connection.close()
    finally:
        await running.stop()


async def test_postgres_waits_for_the_workers_of_a_killed_server(tmp_path):
    """A worker that is late to notice the kill holds the old memory: the start waits for it instead of failing."""
    running = RunningPostgres(tmp_path)
    await running.start()
    server = running.child.pid
    try:
        worker = int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])
        os.kill(worker, signal.SIGSTOP)
        try:
            await running.kill()
            starting = asyncio.create_task(running.start())
            await asyncio.sleep(0.5)
            assert not starting.done()
        finally:
            os.kill(worker, signal.SIGCONT)
        await starting
        assert running.child.pid != server
    finally:
        await running.stop()


async def test_an_operator_s_command_waits_for_a_database_that_starts_again(tmp_path, capsys):
    """While it is down or recovers the command waits, and says so once; a wrong password is no reason to wait."""
    running = RunningPostgres(tmp_path)
    await running.start()
    try:
        await running.kill()
        waiting = asyncio.create_task(database.connected(running.url))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await running.start()
        connection = await waiting
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()
        assert capsys.readouterr().err.count("waiting for PostgreSQL") == 1
        with pytest.raises(ConfigError, match="cannot be used"):
            await database.connected(running.url.replace("://chorus:", "://chorus:no"))
        assert capsys.readouterr().err == ""
    finally:
        await running.stop()


async def test_a_database_that_stays_away_is_said(monkeypatch, tmp_path):
    """The wait ends, with what the driver says and what to look at; an address that is none is said at once."""
    with pytest.raises(ConfigError, match="address cannot be read"):
        await database.connected("postgresql://u@127.0.0.1:port/x")
    monkeypatch.setattr(database, "CONNECT_S", 0.5)
    with pytest.raises(ConfigError, match=r"does not answer .*is `chorus up` running"):
        await database.connected(f"postgresql://u@127.0.0.1:{free_port()}/x")


@pytest.mark.parametrize("rubbish", [b"", b"\xff\xfe" * 60, b"1\n" * 7, b"\xff\n" * 9, b"x\n" * 6 + b"1 \xff\n"])
async def test_a_lock_file_of_rubbish_is_postgres_s_own_to_judge(tmp_path, rubbish: bytes):
    """Whatever stands in it, our own wait is over at once and nothing is raised."""
    running = RunningPostgres(tmp_path)
    (tmp_path / "postgres" / "cluster").mkdir(parents=True)
    (tmp_path / "postgres" / "cluster" / "postmaster.pid").write_bytes(rubbish)
    async with asyncio.timeout(5):  # the wait for workers takes 10 s
        await running.unit.prepare()


async def test_the_database_user_is_no_superuser(postgres_url: str):
    """`chorus` owns its database and rules nothing else; the superuser cannot log in at all."""
    connection = await asyncpg.connect(postgres_url)
    assert await connection.fetchval("SELECT usesuper FROM pg_user WHERE usename = current_user") is False
    await connection.close()
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
        await asyncpg.connect(postgres_url.replace("://chorus:", "://postgres:"))
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(postgres_url, password="wrong")


async def test_an_unfinished_cluster_is_made_anew(tmp_path):
    """A start that was killed while making the cluster leaves nothing that the next start trips over."""
    running = RunningPostgres(tmp_path)
    (tmp_path / "postgres" / "cluster.unfinished" / "base").mkdir(parents=True)
    await running.start()
    await running.stop()


async def test_valkey_asks_for_its_password(valkey_server: RunningValkey, valkey_url: str):
    """Commands without the password are refused, with it they work."""
    async with redis.Redis.from_url(valkey_url) as client:
        assert await client.set("k", "v")
    async with redis.Redis(port=redis.Redis.from_url(valkey_url).connection_pool.connection_kwargs["port"]) as client:
        with pytest.raises(redis.AuthenticationError):
            await client.get("k")


async def test_a_server_that_cannot_start_says_why(valkey_server: RunningValkey, tmp_path: Path):
    """A port that is taken is reported with the server's own words, and nothing is left running."""
    second = RunningValkey(tmp_path)
    port = int(valkey_server.url.rpartition(":")[2].partition("/")[0])
    second.unit = ValkeyServer(tmp_path, tmp_path / "log", port, load_credentials(tmp_path / "credentials.json", USERS))
    with pytest.raises(RuntimeError, match=r"did not come up(?s:.*)Address already in use"):
        await second.start()
    assert second.child is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(second.child.pid, 0)
