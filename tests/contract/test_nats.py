"""What only a real server can show: first connections, permissions, a frozen server, an election's statuses."""

import asyncio
import signal

import nats.errors
import pytest
import uvloop

from shared.bus import ConsumerSpec, StreamSpec
from shared.bus.nats import connect
from shared.bus.nats_link import Link
from shared.errors import BusError, BusTimeoutError, NoRespondersError
from shared.limits import BUS_UNSENT_BYTES_MAX
from tests.contract.conftest import until

S = 2.0


async def test_no_server_is_one_sentence_without_the_password():
    """A start without a server fails at its deadline and says where; what stands in the URL stays secret."""
    with pytest.raises(BusTimeoutError, match=r"no NATS at 127\.0\.0\.1:9 within 0\.5 s") as failed:
        await connect("nats://me:secret@127.0.0.1:9", timeout_s=0.5)
    assert "secret" not in str(failed.value)


async def test_a_wrong_password_is_said(own_nats):
    """A user the server does not know fails the start with the server's word for it."""
    with pytest.raises(BusTimeoutError, match="Authorization Violation"):
        await connect(own_nats.url, user="known", password="wrong", timeout_s=2.5)


async def test_the_server_s_own_word_outlasts_what_the_network_says():
    """A refusal is followed by resets and refused connections, which tell nobody what to do."""
    link = Link("_INBOX")
    for error in (OSError("before"), nats.errors.Error("nats: Authorization Violation"), OSError("after")):
        await link._on_error(error)
    with pytest.raises(BusTimeoutError, match="Authorization Violation"):
        await link.connect("nats://127.0.0.1:1", None, None, "test", 0.1)


async def test_a_missing_permission_costs_the_deadline_and_is_counted(own_nats):
    """What a user may not publish is lost: its request times out, the error is counted, the connection lives."""
    bus = await connect(own_nats.url, user="narrow", password="pw", inbox_prefix="_INBOX_narrow")
    with pytest.raises(BusTimeoutError):
        await bus.request("forbidden.x", b"", timeout_s=0.2)
    assert bus.counts.errors == 1
    inbox = await bus.subscribe("allowed.>")
    await bus.publish("allowed.x", b"1")
    assert (await inbox.next(S)).data == b"1"
    await bus.close()


async def test_a_foreign_inbox_cannot_be_read(own_nats):
    """A user that may subscribe its own inbox alone hears nothing of another's answers."""
    narrow = await connect(own_nats.url, user="narrow", password="pw", inbox_prefix="_INBOX_narrow")
    other = await connect(own_nats.url, inbox_prefix="_INBOX_other")
    spy = await narrow.subscribe("_INBOX_other.>")
    with pytest.raises(BusError):
        await other.request("$JS.API.STREAM.INFO.none.such", b"", timeout_s=0.1)
    assert (await other.request("$JS.API.INFO", b"", timeout_s=S)).data
    await narrow.publish("allowed.x", b"")
    assert spy.take_ready(9) == []
    await narrow.close()
    await other.close()


async def test_a_frozen_server_blocks_nobody(nats_world):
    """While the server stands still, publishes are bounded and dropped, waits end at their deadline, cancels work."""
    bus = await nats_world.bus()
    stream = StreamSpec(name=f"{nats_world.region}_L", subjects=(f"{nats_world.region}.lane.>",))
    await bus.apply([stream], [])
    nats_world.server.process.send_signal(signal.SIGSTOP)
    try:
        chunk = bytes(512 * 1024)
        async with asyncio.timeout(S):
            while bus.counts.published_dropped < 5:
                await bus.publish(f"{nats_world.region}.x", chunk)
                await asyncio.sleep(0)
        appends = [bus.append(f"{nats_world.region}.lane.a", chunk, timeout_s=0.1) for _ in range(20)]
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert all(isinstance(outcome, BusTimeoutError) for outcome in outcomes)
        assert bus._link._client.pending_data_size <= BUS_UNSENT_BYTES_MAX + 2 * len(chunk)
        cancelled = asyncio.create_task(bus.append(f"{nats_world.region}.lane.a", b"x", timeout_s=60))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        await asyncio.wait_for(asyncio.wait([cancelled]), S)
        assert cancelled.cancelled()
    finally:
        nats_world.server.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(10):
        while not await append_once(bus, f"{nats_world.region}.lane.a"):
            pass


async def append_once(bus, subject):
    try:
        return await bus.append(subject, b"x", timeout_s=S)
    except BusTimeoutError:
        return 0


async def test_a_consumer_made_again_is_pulled_from_again(nats_world):
    """A pull whose consumer is deleted under it does not hang: it asks again, and serves the consumer made anew."""
    bus = await nats_world.bus()
    region = nats_world.region
    stream = StreamSpec(name=f"{region}_L", subjects=(f"{region}.lane.>",), work_queue=True)
    consumer = ConsumerSpec(stream.name, "c", f"{region}.lane.a", 30.0)
    await bus.apply([stream], [consumer])
    puller = bus.puller(stream.name, "c")
    pulling = asyncio.create_task(puller.pull(1, 20.0))
    await asyncio.sleep(0.05)
    assert b'"success":true' in (await bus.request(f"$JS.API.CONSUMER.DELETE.{stream.name}.c", b"")).data
    await bus.apply([], [consumer])
    await bus.append(f"{region}.lane.a", b"1", timeout_s=S)
    assert [one.data for one in await asyncio.wait_for(pulling, 5)] == [b"1"]


async def test_a_pull_that_is_turned_down_does_not_hammer(nats_world):
    """A pull from a consumer that is not there asks again a few times, not thousands of times."""
    bus = await nats_world.bus()
    stream = StreamSpec(name=f"{nats_world.region}_L", subjects=(f"{nats_world.region}.lane.>",))
    await bus.apply([stream], [])
    sent = bus._link._client.stats["out_msgs"]
    with pytest.raises(NoRespondersError):
        await bus.puller(stream.name, "none").pull(1, 0.5)
    assert 1 < bus._link._client.stats["out_msgs"] - sent < 10


async def test_an_old_delivery_gives_way_to_its_newer_one(nats_world):
    """A message that comes again while its first delivery still waits to be taken is handed out once, as the newer."""
    bus = await nats_world.bus()
    region = nats_world.region
    stream = StreamSpec(name=f"{region}_L", subjects=(f"{region}.lane.>",), work_queue=True)
    await bus.apply([stream], [ConsumerSpec(stream.name, "c", f"{region}.lane.a", 0.2)])
    puller = bus.puller(stream.name, "c")
    pulling = asyncio.create_task(puller.pull(10, 5.0))
    await asyncio.sleep(0.02)
    await bus.append(f"{region}.lane.a", b"1", timeout_s=S)
    first = await pulling
    await bus.append(f"{region}.lane.a", b"2", timeout_s=S)
    await bus.extend(first[0].ack_subject)
    await until(lambda: any(one.delivered >= 2 and one.data == b"2" for one in puller._ready.values()))
    got = await puller.pull(10, S)
    assert [one.data for one in got].count(b"2") == 1
    assert next(one for one in got if one.data == b"2").delivered >= 2


def test_it_runs_on_uvloop(own_nats):
    """Appends, live entries and pulls work on uvloop as on asyncio's own loop."""

    async def main():
        bus = await connect(own_nats.url, inbox_prefix="_INBOX_uv")
        spec = StreamSpec(name="KV_uv", subjects=("$KV.uv.>",), history=8, republish_to="uv.live.>")
        await bus.apply([spec], [ConsumerSpec("KV_uv", "c", "$KV.uv.a", 30.0)])
        live, puller = await bus.subscribe("uv.live.a"), bus.puller("KV_uv", "c")
        await bus.append("$KV.uv.a", b"1", expected_last_seq=0, timeout_s=S)
        seen = (await live.next(S)).data, [one.data for one in await puller.pull(1, S)]
        await bus.close()
        return seen

    assert uvloop.run(main()) == (b"1", [b"1"])
