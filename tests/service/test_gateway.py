"""The gateway's doors over HTTP: what each answers, and what it says when it must say no."""

import asyncio
import io
import json

import aiohttp
import openai
import pytest

from services.gateway import app
from services.gateway.events import terminal_event
from shared.ids import chat_id
from shared.limits import BODY_BYTES_MAX
from shared.messages import Principal
from shared.outcomes import EndReason, RefusalKind
from shared.tiers import Tier
from shared.token_log import closing_event, event_of_token
from tests.service.gateway_world import KEY, World, chunk, end, opened, refused
from tests.unit.gateway.sse_reader import parse_sse

HI = {"input": "hi"}
HI_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def world():
    async with World().running() as running:
        yield running


@pytest.fixture
async def http(world):
    async with world.client() as client:
        yield client


async def events_of(response):
    return [json.loads(event.data) for event in parse_sse(await response.read()) if event.data != "[DONE]"]


def text_of(events):
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def finished(world, http, **body):
    """The id of a reply that has ended."""
    async with http.post("/v1/responses", json={**HI, **body}) as response:
        return (await response.json())["id"]


# --- responses -------------------------------------------------------------------------------------------


async def test_a_streamed_response_arrives_as_numbered_events(http):
    """A streamed POST gives the whole event sequence, each event's id equal to its sequence number."""
    async with http.post("/v1/responses", json={**HI, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache, no-transform"
        assert response.headers["X-Accel-Buffering"] == "no"
        raw = await response.read()
    assert raw.startswith((b"retry: ", b": ping\nretry: "))
    events = parse_sse(raw)
    bodies = [json.loads(event.data) for event in events]
    assert [event.id for event in events] == [str(body["sequence_number"]) for body in bodies]
    assert [event.name for event in events] == [body["type"] for body in bodies]
    assert bodies[0]["type"] == "response.created"
    assert text_of(bodies) == "Hello world!"
    assert bodies[-1]["response"]["usage"]["output_tokens"] == 4
    assert bodies[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 2


async def test_an_unstreamed_response_is_the_object_of_the_last_event(world, http):
    """The object a POST waits for, a later GET, and the stream's last event are the same."""
    async with http.post("/v1/responses", json={**HI, "metadata": {"a": "b"}}) as response:
        whole = await response.json()
    assert (whole["object"], whole["status"], whole["metadata"]) == ("response", "completed", {"a": "b"})
    assert whole["output"][0]["content"][0]["text"] == "Hello world!"
    async with http.get(f"/v1/responses/{whole['id']}") as response:
        assert await response.json() == whole
    async with http.get(f"/v1/responses/{whole['id']}?stream=true") as response:
        assert (await events_of(response))[-1]["response"] == whole


async def test_a_background_response_answers_at_once_and_can_be_followed_later(world, http):
    """Background: the object comes while the reply is queued; a stream by id gives it from the start."""

    async def later(log, _):
        await world.released.wait()
        await world.say_hello(log, _)

    world.script = later
    async with http.post("/v1/responses", json={**HI, "background": True}) as response:
        queued = await response.json()
    assert (queued["status"], queued["output"], queued["background"]) == ("queued", [], True)
    world.released.set()
    async with http.get(f"/v1/responses/{queued['id']}?stream=true") as response:
        events = await events_of(response)
    assert events[0]["type"] == "response.created"
    assert text_of(events) == "Hello world!"


@pytest.mark.parametrize("how", ["header", "query"])
async def test_a_resume_gives_exactly_what_comes_after(world, http, how):
    """GET with Last-Event-ID or starting_after gives the events after that number, cutting a chunk inside."""
    reply_id = await finished(world, http)
    cut = event_of_token(1)
    headers = {"Last-Event-ID": str(cut)} if how == "header" else {}
    query = "" if how == "header" else f"&starting_after={cut}"
    async with http.get(f"/v1/responses/{reply_id}?stream=true{query}", headers=headers) as response:
        events = await events_of(response)
    assert text_of(events) == "ld!"
    assert events[0]["sequence_number"] == event_of_token(3)
    assert world.sample("gateway_resumes_total") == 1


async def test_after_the_last_event_there_is_nothing(world, http):
    """A reconnect with the number of the last event gets 204, so that a browser stops asking."""
    reply_id = await finished(world, http, max_output_tokens=50)
    path = f"/v1/responses/{reply_id}?stream=true"
    async with http.get(path, headers={"Last-Event-ID": str(terminal_event(50))}) as response:
        assert response.status == 204
    async with http.get(path, headers={"Last-Event-ID": str(terminal_event(50) - 1)}) as response:
        assert [event["type"] for event in await events_of(response)] == ["response.completed"]


async def test_a_reply_whose_log_has_expired_replays_as_one_delta_or_says_gone(world, http):
    """From the start: one delta and the same end. Cut inside: 410. Caught up: the closing events."""
    reply_id = await finished(world, http, max_output_tokens=50)
    world.expire(reply_id)
    path = f"/v1/responses/{reply_id}?stream=true&include[]=chorus.token_ids"
    async with http.get(path) as response:
        events = await events_of(response)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["token_ids"]) for event in deltas] == [("Hello world!", [100, 101, 102, 103])]
    assert deltas[0]["sequence_number"] == event_of_token(3)
    async with http.get(path, headers={"Last-Event-ID": str(event_of_token(1))}) as response:
        assert response.status == 410
        assert (await response.json())["error"]["code"] == "stream_expired"
    async with http.get(path, headers={"Last-Event-ID": str(event_of_token(3))}) as response:
        assert (await events_of(response))[0]["sequence_number"] == closing_event(50)
    async with http.get(f"/v1/responses/{reply_id}") as response:
        assert (await response.json())["output"][0]["content"][0]["text"] == "Hello world!"


async def test_withdrawn_text_is_shown_nowhere(world, http):
    """After a late flag neither the object nor any stream shows the text or its tokens, only the refusal."""
    reply_id = await finished(world, http, max_output_tokens=50)
    world.withdraw(reply_id)
    for path in ("", "?stream=true&include=chorus.token_ids", "?include=chorus.token_ids"):
        for headers in ({}, {"Last-Event-ID": str(event_of_token(1))}):
            async with http.get(f"/v1/responses/{reply_id}{path}", headers=headers) as response:
                raw = await response.text()
            assert response.status == 200
            assert "Hello" not in raw
            assert "101" not in raw.replace(reply_id, "").replace(reply_id[5:], "")
            assert "content_filter" in raw
            assert '"chorus"' not in raw or '"token_ids":[]' in raw


async def test_a_stop_ends_the_stream_as_cancelled(world, http):
    """POST cancel answers with the cancelled object; the open stream ends in response.incomplete with what was written."""

    async def endless(log, _):
        log.append(opened(), chunk(0, ["Once"]))

    world.script = endless
    async with http.post("/v1/responses", json={**HI, "stream": True}) as stream:
        reply_id = stream.headers["x-chorus-reply"]
        async with http.post(f"/v1/responses/{reply_id}/cancel") as response:
            stopped = await response.json()
        events = await events_of(stream)
    assert (stopped["status"], stopped["usage"]["output_tokens"]) == ("cancelled", 1)
    assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", stopped)


async def test_delete_and_input_items(world, http):
    """Input items come in pages, newest first unless asked; a deleted reply is not found on any verb."""
    items = [{"role": "user", "content": word} for word in "abc"]
    reply_id = await finished(world, http, input=items)
    base = f"/v1/responses/{reply_id}"
    async with http.get(f"{base}/input_items?order=asc&limit=2") as response:
        page = await response.json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["a", "b"]
    assert page["has_more"]
    async with http.get(f"{base}/input_items?order=asc&after={page['last_id']}") as response:
        assert [item["content"][0]["text"] for item in (await response.json())["data"]] == ["c"]
    async with http.get(f"{base}/input_items") as response:
        assert [item["content"][0]["text"] for item in (await response.json())["data"]] == ["c", "b", "a"]
    async with http.delete(base) as response:
        assert await response.json() == {"id": reply_id, "object": "response", "deleted": True}
    async with http.get(base) as response:
        assert response.status == 404


@pytest.mark.parametrize("method", ["get", "delete", "cancel", "input_items", "stream"])
async def test_foreign_and_unknown_replies_get_the_same_answer(world, http, method):
    """Whose reply it is shows in no byte of the answer, on any verb; ids that cannot be ours get a 404 too."""
    reply_id = await finished(world, http)
    unknown = reply_id[:-4] + ("0000" if not reply_id.endswith("0000") else "1111")
    world.keys["bob"] = Principal(org="evil", user="bob", tier=Tier.FREE, key_id="key_bob")
    paths = {"get": "", "delete": "", "cancel": "/cancel", "input_items": "/input_items", "stream": "?stream=true"}
    verb = {"delete": "DELETE", "cancel": "POST"}.get(method, "GET")
    answers = []
    async with world.client("bob") as bob:
        for name in (reply_id, unknown, "resp_elsewhere0101JDZZZZZZZZZZZZZZZZZZZZZZ", "nonsense"):
            async with bob.request(verb, f"/v1/responses/{name}{paths[method]}") as response:
                answers.append((response.status, await response.json()))
    assert answers[0] == answers[1]
    assert {status for status, _ in answers} == {404}


# --- chat completions ------------------------------------------------------------------------------------


async def test_a_chat_completion_whole_and_streamed(http):
    """Both forms of the chat door hold the same text, finish reason and usage; the stream ends in [DONE]."""
    async with http.post("/v1/chat/completions", json=HI_CHAT) as response:
        whole = await response.json()
    assert whole["choices"][0]["message"]["content"] == "Hello world!"
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["total_tokens"]) == ("stop", 9)
    body = {**HI_CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body) as response:
        raw = await response.read()
    assert parse_sse(raw)[-1].data == "[DONE]"
    chunks = [json.loads(event.data) for event in parse_sse(raw)[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "Hello world!"
    assert chunks[-1]["usage"] == whole["usage"]


async def test_a_chat_reply_can_be_followed_by_its_own_name(world, http):
    """The superset: a chat completion's id names its reply at the responses door."""
    reply_id = await finished(world, http)
    async with http.get(f"/v1/responses/{chat_id(reply_id)}") as response:
        assert (await response.json())["id"] == reply_id


@pytest.mark.parametrize(("reason", "status"), [(EndReason.FAILED, 500), (EndReason.EXPIRED, 504)])
async def test_a_failed_chat_completion_is_an_error(world, http, reason, status):
    """A reply that could not be finished is a 5xx at the chat door, and a failed object at the responses door."""

    async def fail(log, _):
        log.append(opened(), chunk(0, ["Once"]), end(reason, detail="It broke."))

    world.script = fail
    async with http.post("/v1/chat/completions", json=HI_CHAT) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"] == "It broke."
    async with http.post("/v1/responses", json=HI) as response:
        body = await response.json()
    assert (response.status, body["status"], body["error"]["message"]) == (200, "failed", "It broke.")
    assert body["output"][0]["content"][0]["text"] == "Once"


# --- models, keys, errors --------------------------------------------------------------------------------


async def test_models(http):
    """The catalog is listed and shown one by one; an unknown model is a 404 naming the field, on every door."""
    async with http.get("/v1/models") as response:
        listed = await response.json()
    assert [model["id"] for model in listed["data"]] == ["stub", "stub-mini"]
    assert "smaller limits" in listed["data"][1]["note"]
    async with http.get("/v1/models/stub") as response:
        assert await response.json() == listed["data"][0]
    async with http.get("/v1/models/gpt-9") as response:
        assert response.status == 404
    async with http.post("/v1/responses", json={**HI, "model": "gpt-9"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_every_answer_has_a_request_id_and_every_error_openais_shape(world, http):
    """Bad key, bad body, unknown address, wrong method, too large: one shape, four keys, an id."""
    large = b'{"input":"' + b"x" * BODY_BYTES_MAX + b'"}'
    asked = [
        ("GET", "/v1/models", {"headers": {"Authorization": "Bearer wrong"}}, 401),
        ("POST", "/v1/responses", {"data": b"{"}, 400),
        ("POST", "/v1/responses", {"data": io.BytesIO(large)}, 413),
        ("GET", "/v1/nothing", {}, 404),
        ("PUT", "/v1/responses", {}, 405),
        ("GET", "/v1/models", {"headers": {f"x-{n}": "y" * 900 for n in range(20)}}, 431),
        ("GET", "/v1/models", {"headers": {"x-one": "y" * 20_000}}, 431),
        ("GET", "/v1/responses/resp_x?stream=true", {}, 404),
    ]
    for method, path, more, status in asked:
        async with http.request(method, path, **more) as response:
            assert response.status == status, path
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
            assert status == 431 or response.headers["x-request-id"].startswith("req_")
    async with http.get("/v1/models") as response:
        assert response.headers["x-request-id"].startswith("req_")


async def test_what_is_not_http_is_answered_in_the_same_shape(world):
    """A request that cannot be parsed gets a 400 with OpenAI's error, and the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]))
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n")
    raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_a_stranger_is_turned_away_before_the_body_is_waited_for(world):
    """Without a valid key the answer comes at once, however long the body that was announced."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.readline()).split(b" ")[1] == b"401"
    writer.close()


async def test_connections_past_the_bound_are_closed_as_they_come(monkeypatch):
    """One gateway holds a bounded number of connections; when one leaves there is room again."""
    monkeypatch.setattr(app, "CONNECTIONS_MAX", 1)
    async with World().running() as world:
        async with world.client() as first, world.client() as second:
            async with first.get("/healthz") as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectionError):
                await second.get("/healthz")
        async with world.client() as third, third.get("/healthz") as response:
            assert response.status == 200


async def test_a_revoked_key_is_out_at_the_word_on_the_bus(world, http):
    """The gateway forgets a key when its revocation is said, though it had it fresh in its cache."""
    async with http.get("/v1/models") as response:
        assert response.status == 200
    await world.revoke(KEY)

    async def status():
        async with http.get("/v1/models") as response:
            return response.status

    while await status() != 401:
        assert world.lookups < 10


async def test_refusals_of_conversation_reach_the_client(world, http):
    """A refusal keeps its status, its field, and when to come again."""
    world.refuse_send = refused(RefusalKind.QUOTA, "Too many tokens.", retry_after_s=2.4)
    async with http.post("/v1/responses", json=HI) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
    world.refuse_send = refused(RefusalKind.PROMPT_TOO_LONG, "9000 tokens, at most 8192.", param="input")
    async with http.post("/v1/responses", json={**HI, "stream": True}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


async def test_the_same_idempotency_key_attaches_to_the_same_reply(world, http):
    """Two sends with one key are one generation and two identical streams; without a key they are two."""
    headers = {"Idempotency-Key": "k1"}
    streams = []
    for _ in range(2):
        async with http.post("/v1/responses", json={**HI, "stream": True}, headers=headers) as response:
            streams.append(await events_of(response))
    assert streams[0][-1] == streams[1][-1]
    assert len(world.logs) == 1
    for _ in range(2):
        await finished(world, http)
    assert len(world.logs) == 3


async def test_health_and_metrics_need_no_key(world):
    """Health doors stand on the gateway's own port; streams show in the metrics by tier and model."""
    async with world.client() as http:
        await finished(world, http)
        async with http.post("/v1/responses", json={**HI, "stream": True}) as response:
            await response.read()
    async with aiohttp.ClientSession(world.url) as bare:
        for path in ("/healthz", "/readyz"):
            async with bare.get(path) as response:
                assert response.status == 200
        async with bare.get("/metrics") as response:
            page = await response.text()
    assert 'chorus_ttft_seconds_count{model="stub",tier="paid"} 1.0' in page
    assert world.sample("gateway_tokens_total", tier="paid", model="stub") == 4
    assert world.sample("gateway_streams") == 0


async def test_the_page_is_served_with_a_policy(tmp_path):
    """`/` and `/web/*` come from the page's folder, may run only their own scripts, and nothing above it is served."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "index.html").write_text("<p>page</p>")
    (tmp_path / "web" / "main.js").write_text("1")
    (tmp_path / "secret").write_text("s")
    async with World().running(web_dir=tmp_path / "web") as world, aiohttp.ClientSession(world.url) as bare:
        for path, text in (("/", "<p>page</p>"), ("/web/main.js", "1")):
            async with bare.get(path) as response:
                assert (response.status, await response.text()) == (200, text)
                assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        async with bare.get(aiohttp.client.URL(f"{world.url}/web/..%2Fsecret", encoded=True)) as response:
            assert response.status in (403, 404)


# --- the official client ---------------------------------------------------------------------------------


async def test_the_official_client_unchanged(world):
    """openai-python with a base URL and a key: streams, objects, chat, retrieve, resume, cancel, delete, models."""
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client:
        whole = await client.responses.create(model="stub", input="hi")
        assert whole.output_text == "Hello world!"
        async with client.responses.stream(model="stub", input="hi") as stream:
            assert (await stream.get_final_response()).output_text == "Hello world!"
        rest = await client.responses.retrieve(whole.id, stream=True, starting_after=event_of_token(0))
        assert "".join([e.delta async for e in rest if e.type == "response.output_text.delta"]) == " world!"
        chat = await client.chat.completions.create(model="stub", messages=HI_CHAT["messages"])
        assert chat.choices[0].message.content == "Hello world!"
        listed = await client.responses.input_items.list(whole.id)
        assert [item.content[0].text for item in listed.data] == ["hi"]
        assert (await client.responses.cancel(whole.id)).status == "completed"
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        assert [model.id async for model in client.models.list()] == ["stub", "stub-mini"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.responses.create(model="stub", input="hi", temperature=3)
