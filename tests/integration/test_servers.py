"""The embedded servers themselves: they come up, keep their data over a SIGKILL, and let each user do its own part."""

import asyncio
import os
from pathlib import Path

import asyncpg
import nats
import pytest
import redis.asyncio as redis
from nats.errors import Error as NatsError
from nats.js.errors import APIError

from ops.credentials import load_credentials
from ops.permissions import USERS, inbox_prefix
from ops.servers.nats import NatsServer
from ops.servers.valkey import ValkeyServer
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
    asker, answerer = await connected(nats_server, "gateway"), await connected(nats_server, "conversation")

    async def answer(message) -> None:
        await message.respond(b"here")

    await answerer.subscribe(nats_server.names.conversation("get"), cb=answer)
    await answerer.flush()
    got = await asker.request(nats_server.names.conversation("get"), b"", timeout=ANSWER_S)
    assert got.data == b"here"
    await asker.close()
    await answerer.close()


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


async def test_a_router_works_its_lane(fresh_nats: RunningNats):
    """Within its permissions the router declares a lane and its consumer, pulls, extends and acknowledges."""
    names = fresh_nats.names
    errors: list[Exception] = []
    router, sender = await connected(fresh_nats, "router", errors), await connected(fresh_nats, "conversation", errors)
    stream = "local_LANE_PAID"
    await router.jetstream().add_stream(name=stream, subjects=["local.lane.paid.>"], retention="workqueue")
    await sender.jetstream().publish("local.lane.paid.m.0", b"request")
    subscription = await router.jetstream().pull_subscribe(
        "local.lane.paid.m.0", durable="lane_paid_m_0", stream=stream
    )
    (message,) = await subscription.fetch(1, timeout=ANSWER_S)
    await message.in_progress()
    await message.ack_sync(timeout=ANSWER_S)
    assert (await router.jetstream().stream_info(stream)).state.messages == 0
    with pytest.raises((APIError, NatsError, TimeoutError)):
        await router.jetstream(timeout=0.3).delete_stream(stream)
    assert names.region == "local"
    await router.close()
    await sender.close()


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
