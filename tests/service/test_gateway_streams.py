"""Streams when things go wrong: relays that die, frames that are lost, clients that leave or do not read."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest

from services.gateway import conversation_client, live, lives, streams
from shared.limits import GATEWAY_STREAMS_MAX, STREAM_CREDITS
from shared.messages import Frame, Notice, encode
from shared.outcomes import RefusalKind
from tests.service.conversation_world import a_message
from tests.service.gateway_world import KEY, Log, World, chunk, end, eventually, opened, refused
from tests.unit.gateway.sse_reader import parse_sse

STREAM = {"input": "hi", "stream": True}


@pytest.fixture
async def world():
    async with World().running(ping_s=0.1) as running:
        yield running


@pytest.fixture
async def http(world):
    async with world.client() as client:
        yield client


def bodies_of(raw):
    return [json.loads(event.data) for event in parse_sse(raw)]


def text_of(bodies):
    return "".join(body["delta"] for body in bodies if body["type"] == "response.output_text.delta")


class Writer:
    """Writes a reply word by word, when the test says so."""

    def __init__(self, world):
        self.ready = asyncio.Event()
        self.count = 0
        world.script = self

    async def __call__(self, log, _):
        self.log = log
        log.append(opened())
        self.ready.set()

    def write(self, words):
        for _ in range(words):
            self.log.append(chunk(self.count, [f" {self.count}"]))
            self.count += 1

    def finish(self):
        self.log.append(end())

    @property
    def text(self):
        return "".join(f" {n}" for n in range(self.count))


async def leave(asking):
    """The client goes, whether its answer has begun or not."""
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await asking).close()


async def read_until(response, what, raw=b""):
    async with asyncio.timeout(10):
        while what not in raw:
            raw += await response.content.readany()
    return raw


# --- relays ----------------------------------------------------------------------------------------------


async def test_a_relay_that_dies_is_replaced_without_a_lost_or_repeated_token(world, http):
    """When a relay falls silent mid-reply the stream goes on at another one, after the last entry it had."""
    writer = Writer(world)
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        writer.write(3)
        raw = await read_until(response, b' 2"')
        other = await world.add_relay()
        await world.relays[0].die()
        writer.write(3)
        raw = await read_until(response, b' 5"', raw)
        writer.finish()
        raw += await response.read()
    bodies = bodies_of(raw)
    assert text_of(bodies) == writer.text
    assert bodies[-1]["type"] == "response.completed"
    assert other.opens[0].after_seq > 0
    assert world.sample("gateway_reopened_total", why="relay") == 1
    numbers = [body["sequence_number"] for body in bodies]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("why", ["gap", "draining", "slow"])
async def test_a_frame_lost_or_a_relay_leaving_opens_the_stream_again(world, http, why):
    """A missing frame number, or a relay that says it leaves, costs the client nothing."""
    writer = Writer(world)
    relay = world.relays[0]
    relay.skip_number_once = why == "gap"
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        await eventually(lambda: relay.frames_sent, "the head was sent")
        if why != "gap":
            await relay.leave(why)
        for _ in range(4):
            sent = relay.frames_sent
            writer.write(2)
            await eventually(lambda sent=sent: relay.frames_sent > sent, "another frame")
        writer.finish()
        raw = await response.read()
    assert text_of(bodies_of(raw)) == writer.text
    assert world.sample("gateway_reopened_total", why=why) == 1


async def test_a_frame_that_cannot_be_read_opens_the_stream_again(world, http):
    """Garbage on a stream's subject is counted, and the reply is shown whole all the same."""
    writer = Writer(world)
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        writer.write(1)
        raw = await read_until(response, b' 0"')
        await world.relays[0].bus.publish(world.relays[0].opens[0].inbox, b"\xc1garbage")
        await eventually(lambda: world.sample("gateway_reopened_total", why="unreadable") == 1, "opened again")
        writer.write(2)
        writer.finish()
        raw += await response.read()
    assert text_of(bodies_of(raw)) == writer.text
    assert world.sample("gateway_undecodable_total") == 1


async def test_a_last_frame_that_was_lost_is_asked_for(world, http, monkeypatch):
    """No later number shows that it is missing: a stream with nothing new for long asks again."""
    monkeypatch.setattr(streams, "QUIET_S", 0.3)
    writer = Writer(world)
    world.relays[0].lose_last_once = True
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        writer.write(2)
        writer.finish()
        raw = await response.read()
    assert text_of(bodies_of(raw)) == writer.text
    assert world.sample("gateway_reopened_total", why="quiet") >= 1


async def test_frames_lost_with_the_bus_are_asked_for_again(world, http):
    """After the gateway's connection to the bus was away, streams open again: even a lost last frame is found."""
    writer = Writer(world)
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        writer.write(1)
        raw = await read_until(response, b' 0"')
        world.gateway_bus.disconnect()
        sent = world.relays[0].frames_sent
        writer.write(2)
        writer.finish()
        await eventually(lambda: world.relays[0].frames_sent > sent, "frames were sent into the void")
        raw = await read_until(response, b": ping", raw)
        await asyncio.sleep(2 * lives.ROUND_S)  # long enough for the gateway to see the connection down
        world.gateway_bus.reconnect()
        raw += await response.read()
    assert text_of(bodies_of(raw)) == writer.text


async def test_a_stream_waits_for_a_relay_and_shows_itself_alive(http, world):
    """With no relay the client gets comments, and its events as soon as there is one."""
    await world.relays.pop().die()
    async with http.post("/v1/responses", json=STREAM) as response:
        raw = await read_until(response, b": ping\n: ping\n")
        await world.add_relay()
        raw += await response.read()
    assert text_of(bodies_of(raw)) == "Hello world!"
    assert b": ping\n\n" not in raw


async def test_without_any_relay_the_connection_is_dropped_and_can_be_resumed(world, http, monkeypatch):
    """Past its deadline a stream without a relay ends as a broken connection, never as a finished reply."""
    monkeypatch.setattr(streams, "RELAY_GONE_S", 0.3)
    relay = world.relays.pop()
    await relay.die()
    async with http.post("/v1/responses", json=STREAM) as response:
        reply_id = response.headers["x-chorus-reply"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    async with http.post("/v1/responses", json={"input": "hi"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "unavailable")
    await world.add_relay()
    async with http.get(f"/v1/responses/{reply_id}?stream=true") as response:
        assert text_of(bodies_of(await response.read())) == "Hello world!"


async def test_a_relay_that_is_full_is_asked_again(world, http):
    """A refusal for lack of room is not the client's business."""
    relay = world.relays[0]
    relay.refuse = refused(RefusalKind.UNAVAILABLE)
    async with http.post("/v1/responses", json=STREAM) as response:
        await eventually(lambda: len(relay.opens) >= 2, "it asks again")
        relay.refuse = None
        assert text_of(bodies_of(await response.read())) == "Hello world!"


async def test_a_reply_a_moment_ahead_of_its_log_is_waited_for(world, http):
    """A relay that does not find the log of a reply just accepted is asked again, and the stream begins."""
    relay = world.relays[0]
    relay.refuse = refused(RefusalKind.NOT_FOUND)
    async with http.post("/v1/responses", json=STREAM) as response:
        await eventually(lambda: len(relay.opens) >= 2, "it asks again")
        relay.refuse = None
        assert text_of(bodies_of(await response.read())) == "Hello world!"


async def test_a_log_that_expires_under_a_stream_ends_it_honestly(world, http):
    """Nothing shown yet: the stored reply is. Cut inside: the last event says why, and the reply can be retrieved."""
    writer = Writer(world)
    relay = world.relays[0]
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        writer.write(2)
        raw = await read_until(response, b' 1"')
        relay.paused = True
        writer.write(1)
        writer.finish()
        world.expire(response.headers["x-chorus-reply"])
        await relay.leave("draining")
        raw += await response.read()
    bodies = bodies_of(raw)
    assert (bodies[-1]["type"], bodies[-1]["code"]) == ("error", "stream_expired")
    assert text_of(bodies) == " 0 1"


@pytest.mark.parametrize("body", [STREAM, {"input": "hi"}], ids=["streamed", "waiting for the whole"])
async def test_a_log_that_is_lost_and_written_anew_goes_on_without_a_repeated_word(world, http, body):
    """When the bucket was lost the reply is written again as one chunk: what was shown is skipped, the rest follows."""
    writer = Writer(world)
    relay = world.relays[0]
    asking = asyncio.create_task(http.post("/v1/responses", json=body).__aenter__())
    await writer.ready.wait()
    writer.write(2)
    await eventually(lambda: relay.frames_sent >= 1, "some of it was sent")
    (reply_id,) = world.logs
    old = world.logs[reply_id]
    old.alive = False
    await relay.leave("gone")
    await eventually(lambda: len(relay.opens) >= 2, "the stream asks again")
    world.logs[reply_id] = Log()
    world.logs[reply_id].append(old.items[0].entry, opened(), chunk(0, [f" {n}" for n in range(4)]), end())
    async with await asking as response:
        raw = await response.read()
    text = text_of(bodies_of(raw)) if body is STREAM else json.loads(raw)["output"][0]["content"][0]["text"]
    assert text == " 0 1 2 3"


async def test_frames_that_may_be_lost_while_a_stream_opens_are_asked_for_again(world, http):
    """The bus drops frames while the open is under way: the stream opens once more instead of trusting itself whole."""
    relay = world.relays[0]
    relay.hold_opens.clear()
    async with http.post("/v1/responses", json=STREAM) as response:
        await eventually(lambda: relay.opens, "the open is under way")
        world.gateway.relays.lose_all("dropped")
        relay.hold_opens.set()
        assert text_of(bodies_of(await response.read())) == "Hello world!"
    assert len(relay.opens) == 2


async def left_while_opening(relay, http):
    """The open of a stream whose client left before the relay answered; the relay has been told that nobody waits."""
    async with http.post("/v1/responses", json=STREAM) as response:
        await response.read()
    relay.hold_opens.clear()
    asking = asyncio.create_task(http.post("/v1/responses", json=STREAM).__aenter__())
    await eventually(lambda: len(relay.opens) == 2, "the open is under way")
    await leave(asking)
    await eventually(lambda: relay.opens[1].stream_id in relay.closed, "the relay knows")
    return relay.opens[1]


async def test_a_stream_whose_open_was_never_answered_is_let_go(world, http):
    """The client left before the relay answered: the relay is told that nobody waits."""
    assert await left_while_opening(world.relays[0], http)


async def test_frames_that_overtake_the_answer_to_their_open_are_shown_at_once(world):
    """All of a reply may be here before the relay's answer is: nothing would come after it to wake anybody."""
    world.relays[0].frames_first = True
    reply_id = world.accept(a_message())
    async with world.gateway.relays.follow(reply_id) as stream, asyncio.timeout(streams.QUIET_S / 2):
        batch = await stream.next(streams.QUIET_S)
    assert batch.closing == "ended"


async def test_a_relay_that_goes_on_with_a_stream_nobody_waits_for_is_told_again(world, http, monkeypatch):
    """It heard the close before it had opened the stream; what it sends later shows that it did not take it in."""
    monkeypatch.setattr(streams, "RELAY_ALIVE_S", 0.1)
    relay = world.relays[0]
    opened_late = await left_while_opening(relay, http)
    relay.closed.clear()
    await asyncio.sleep(0.15)
    await world.bus.publish(opened_late.inbox, encode(Frame(stream_id=opened_late.stream_id, number=1)))
    await eventually(lambda: opened_late.stream_id in relay.closed, "the relay is told again")


async def test_notices_reach_whoever_waits_and_are_not_replayed(world, http):
    """Position and ETA come while queued; a later stream of the same reply starts without them."""

    async def queued(log, accepted):
        world.relays[0].notices[accepted.reply_id] = [Notice(kind="queued", position=n, eta_s=9.0) for n in (2, 1)]
        log.append()
        await world.released.wait()
        await world.say_hello(log, accepted)

    world.script = queued
    async with http.post("/v1/responses", json=STREAM) as response:
        raw = await read_until(response, b'"position":"1"')
        world.released.set()
        bodies = bodies_of(raw + await response.read())
    notices = [body for body in bodies if body["type"] == "response.queued"]
    assert [body["sequence_number"] for body in notices] == list(range(1, len(notices) + 1))
    assert notices[-1]["response"]["metadata"] == {"notice": "queued", "position": "1", "eta_s": "9.0"}
    async with http.get(f"/v1/responses/{bodies[0]['response']['id']}?stream=true") as response:
        again = bodies_of(await response.read())
    assert [body for body in bodies if body["type"] != "response.queued"][-1] == again[-1]
    assert "response.queued" not in {body["type"] for body in again}


# --- clients ---------------------------------------------------------------------------------------------


async def test_credits_go_back_as_frames_are_written(world, http):
    """A long reply passes although no more than STREAM_CREDITS frames may be on the way."""
    writer = Writer(world)
    world.relays[0].frame_entries_max = 1
    async with http.post("/v1/responses", json=STREAM) as response:
        await writer.ready.wait()
        writer.write(5 * STREAM_CREDITS)
        writer.finish()
        raw = await response.read()
    assert text_of(bodies_of(raw)) == writer.text
    assert world.relays[0].frames_sent == 5 * STREAM_CREDITS + 3
    assert world.sample("gateway_reopened_total", why="gap") == 0


@pytest.mark.parametrize("body", [STREAM, {"input": "hi"}], ids=["streamed", "waiting for the whole"])
async def test_a_client_that_leaves_closes_its_stream_at_the_relay(world, http, body):
    """However the client waited, its leaving reaches the relay, whose presence then stops."""
    writer = Writer(world)
    relay = world.relays[0]
    asking = asyncio.create_task(http.post("/v1/responses", json=body).__aenter__())
    await writer.ready.wait()
    writer.write(1)
    await eventually(lambda: relay.frames_sent, "the stream runs")
    await leave(asking)
    await eventually(lambda: relay.opens[0].stream_id in relay.closed, "the relay knows")
    await eventually(lambda: world.sample("gateway_streams") == 0, "nothing is followed")


async def test_a_reader_that_takes_nothing_holds_a_bounded_few_and_is_dropped(world, monkeypatch):
    """Megabytes for a client that reads nothing stay at the relay; past the deadline the connection is cut."""
    monkeypatch.setattr(live, "SLOW_READER_S", 0.5)
    relay = world.relays[0]
    relay.frame_entries_max = 1
    word = "x" * 60_000
    words = 400

    async def huge(log, _):
        log.append(opened(), *(chunk(n, [word]) for n in range(words)), end())

    world.script = huge
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", int(world.url.rsplit(":", 1)[1])))
    body = json.dumps(STREAM).encode()
    head = (
        f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(raw, head.encode() + body)
    try:
        outcome = {"door": "responses", "outcome": "slow"}
        await eventually(lambda: world.sample("gateway_streams_closed_total", **outcome) == 1, "it was dropped")
        assert relay.frames_sent < words / 2
        await eventually(lambda: relay.opens[0].stream_id in relay.closed, "the relay knows")
    finally:
        raw.close()


async def test_a_reader_slower_than_the_reply_gets_all_of_it(world, http):
    """Backpressure without an end: a slow but living client has every byte, in fewer, larger deltas."""
    word = "y" * 20_000
    words = 80

    async def long(log, _):
        log.append(opened(), *(chunk(n, [word]) for n in range(words)), end())

    world.script = long
    async with http.post("/v1/responses", json=STREAM, read_bufsize=2**12) as response:
        raw = b""
        async for piece in response.content.iter_chunked(2**16):
            raw += piece
            await asyncio.sleep(0)
    assert text_of(bodies_of(raw)) == word * words


async def test_past_the_bound_a_stream_is_refused_with_a_time(world, http, monkeypatch):
    """A gateway that follows as many replies as it may says 503 and when to come again."""
    monkeypatch.setattr(streams, "GATEWAY_STREAMS_MAX", 0)
    async with http.post("/v1/responses", json=STREAM) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert GATEWAY_STREAMS_MAX > 0


# --- conversation ----------------------------------------------------------------------------------------


async def test_a_conversation_service_that_comes_back_in_time_is_not_noticed(world, http):
    """A question that nobody listens to is asked again for a moment, under the same idempotency key."""
    async with http.get("/v1/models") as response:
        assert response.status == 200
    world.stop_serving("send")
    asking = asyncio.create_task(http.post("/v1/responses", json={"input": "hi"}).__aenter__())
    await asyncio.sleep(0.05)
    world.serve("send")
    async with await asking as response:
        assert response.status == 200
    assert world.sends[0].idempotency_key.startswith("gw:")


async def test_a_send_that_is_not_answered_is_sent_again_under_its_key(world, http, monkeypatch):
    """When the effect of a send is unknown the second one carries the same key, so one reply is written."""
    monkeypatch.setattr(conversation_client, "REQUEST_TIMEOUT_S", 0.2)
    world.swallow_answers = 1
    async with http.post("/v1/responses", json={"input": "hi"}) as response:
        assert response.status == 200
    assert len(world.sends) == 2
    assert len({message.idempotency_key for message in world.sends}) == 1
    assert len(world.logs) == 1


async def test_without_a_conversation_service_the_answer_is_an_honest_503(world, http, monkeypatch):
    """After a few seconds the client is told to come again; a reply that is being followed is undisturbed."""
    monkeypatch.setattr(conversation_client, "CONVERSATION_TRY_S", 0.2)
    writer = Writer(world)
    async with http.post("/v1/responses", json=STREAM) as stream:
        await writer.ready.wait()
        for verb in ("send", "get", "key"):
            world.stop_serving(verb)
        async with http.post("/v1/responses", json={"input": "hi"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        async with world.client("never-seen") as stranger, stranger.get("/v1/models") as response:
            assert response.status == 503
        writer.write(2)
        writer.finish()
        assert text_of(bodies_of(await stream.read())) == writer.text


# --- leaving ---------------------------------------------------------------------------------------------


async def test_a_draining_gateway_takes_nothing_new_and_lets_streams_end(world, http):
    """While it drains, new requests are sent elsewhere and an open stream comes to its end."""
    writer = Writer(world)
    async with http.post("/v1/responses", json=STREAM) as stream:
        await writer.ready.wait()
        draining = asyncio.create_task(world.gateway.drain(10.0))
        await asyncio.sleep(0)
        async with http.get("/v1/models") as response:
            assert (response.status, response.headers["Connection"]) == (503, "close")
        assert not draining.done()
        writer.write(2)
        writer.finish()
        assert text_of(bodies_of(await stream.read())) == writer.text
    await draining
