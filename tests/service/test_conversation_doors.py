"""Conversations over HTTP, through gateway, conversation and relay: what clients are promised in docs/api.md."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from shared import clock
from tests.service.whole_world import Whole, a_whole_world, said, unknown_reply


@pytest.fixture
async def whole(postgres_url: str) -> AsyncIterator[Whole]:
    async with a_whole_world(postgres_url) as made:
        yield made


async def post(client: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with client.post(path, json=body) as answer:
        found = await said(answer)
        assert answer.status == 200, found
        return found


async def get(client: aiohttp.ClientSession, path: str, **query: Any) -> Any:
    async with client.get(path, params=query) as answer:
        found = await said(answer)
        assert answer.status == 200, found
        return found


async def test_the_official_client_keeps_a_conversation(whole: Whole) -> None:
    """openai-python creates, reads, updates, continues and deletes a conversation and its items, unchanged."""
    client = openai.AsyncOpenAI(base_url=f"{whole.url}/v1", api_key=await whole.key())
    async with client:
        made = await client.conversations.create(
            metadata={"topic": "demo"}, items=[{"type": "message", "role": "user", "content": "Hello!"}]
        )
        assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
        reply = await client.responses.create(model="stub", input="and you?", conversation=made.id)
        assert reply.conversation is not None
        assert (reply.output_text, reply.conversation.id) == ("Hello there", made.id)
        items = [item async for item in client.conversations.items.list(made.id, limit=2, order="asc")]
        assert [item.content[0].text for item in items] == ["Hello!", "and you?", "Hello there"]
        more = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "by the way"}])
        kept = await client.conversations.items.retrieve(more.data[0].id, conversation_id=made.id)
        assert (kept.role, kept.content[0].text) == ("user", "by the way")
        assert (await client.conversations.items.delete(kept.id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve(kept.id, conversation_id=made.id)
        assert (await client.conversations.update(made.id, metadata={"topic": "x"})).metadata == {"topic": "x"}
        assert (await client.conversations.retrieve(made.id)).id == made.id
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def stored_items(
    client: aiohttp.ClientSession, conversation: str, count: int, **query: str
) -> list[dict[str, Any]]:
    """The conversation's items once the archive has every active reply: it follows a stream's end, it does not lead it."""
    async with asyncio.timeout(20):
        while True:
            items = (await get(client, f"/v1/conversations/{conversation}/items", **query))["data"]
            if len(items) == count and all(one.get("end_reason", "") is not None for one in items if one["active"]):
                return items
            await asyncio.sleep(0.02)


async def test_a_reply_is_regenerated_as_a_stream(whole: Whole) -> None:
    """Regenerate streams as /v1/responses does, and both replies stand under one message, the new one active."""
    client = await whole.client()
    conversation = (await post(client, "/v1/conversations"))["id"]
    first = await post(client, "/v1/responses", input="Hi, you", conversation=conversation)
    whole.words = ["Other"]
    async with client.post(f"/v1/conversations/{conversation}/regenerate", json={"stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        text = (await answer.read()).decode()
    assert "event: response.created" in text
    assert "event: response.completed" in text
    second = answer.headers["x-chorus-reply"]
    items = await stored_items(client, conversation, 3, include="branches", order="asc")
    assert [(one["response_id"], one["active"]) for one in items] == [
        (first["id"], True),
        (first["id"], False),
        (second, True),
    ]
    assert items[1]["parent_id"] == items[2]["parent_id"] == items[0]["id"]
    assert items[2]["end_reason"] == "stop_token"
    listed = (await get(client, "/v1/conversations", search="hi, YOU"))["data"]
    assert [(one["id"], one["title"], one["head"]) for one in listed] == [(conversation, "Hi, you", second)]
    again = await post(client, f"/v1/conversations/{conversation}/regenerate", response_id=first["id"])
    assert again["output"][0]["content"][0]["text"] == "Other"


async def test_an_edited_message_is_sent_again(whole: Whole) -> None:
    """branch_from places a message behind an earlier reply, or at the root, and says what it cannot do."""
    client = await whole.client()
    conversation = (await post(client, "/v1/conversations", title="Mine"))["id"]
    first = await post(client, "/v1/responses", input="one", conversation={"id": conversation})
    await post(client, "/v1/responses", input="two", conversation=conversation)
    await post(client, "/v1/responses", input="2", conversation=conversation, branch_from=first["id"])
    await post(client, "/v1/responses", input="I", conversation=conversation, branch_from="root")
    items = await stored_items(client, conversation, 2)
    assert [one["content"][0]["text"] for one in items] == ["Hello there", "I"]
    for body, status in (
        ({"branch_from": first["id"]}, 400),
        ({"conversation": conversation, "previous_response_id": first["id"]}, 400),
        ({"conversation": conversation, "store": False}, 400),
        ({"conversation": conversation, "branch_from": unknown_reply()}, 404),
        ({"conversation": conversation, "branch_from": "\0"}, 404),
        ({"conversation": "conv_x"}, 404),
    ):
        async with client.post("/v1/responses", json={"input": "x", **body}) as answer:
            assert answer.status == status, await said(answer)


async def test_an_export_is_everything(whole: Whole) -> None:
    """The export holds the conversation and the items of all branches, in more than one page when there are many."""
    client = await whole.client()
    given = [{"role": "user", "content": f"m{number} " + "x" * 90_000} for number in range(8)]
    conversation = (await post(client, "/v1/conversations", items=given))["id"]
    async with client.get(f"/v1/conversations/{conversation}/export") as answer:
        found = await said(answer)
        assert "attachment" in answer.headers["Content-Disposition"]
    assert found["conversation"]["id"] == conversation
    assert [one["content"][0]["text"] for one in found["items"]] == [one["content"] for one in given]


async def test_foreign_and_unknown_are_one_answer_on_every_door(whole: Whole) -> None:
    """Every endpoint that takes an id, with another user's, unknown, deleted and malformed ones: one 404, no change."""
    owner, other = await whole.client("ann"), await whole.client("bob")
    conversations, replies = await _things_of(whole, owner)
    mine = (await post(other, "/v1/conversations"))["id"]
    before = [await get(owner, f"/v1/conversations/{one}/export") for one in conversations]
    conversations += [
        clock.new_conversation_id(),
        "conv_",
        await _deleted(other),
        "conv_x",
        "conv_%00",
        "conv_" + "I" * 26,
    ]
    replies += [
        unknown_reply(),
        clock.new_reply_id("local", 255),
        "resp_x",
        "resp_%00",
        "chatcmpl-x",
        "resp_elsewhere00" + unknown_reply()[-26:],
    ]
    items = [one["id"] for export in before for one in export["items"]]
    items += [clock.new_item_id(), "msg_x", "msg_%00", "msg_" + "I" * 26, "msg_" + unknown_reply()[5:]]
    doors = (
        (replies, _doors_of_replies(mine)),
        (conversations, _doors_of_conversations()),
        (items, _doors_of_items(mine)),
    )
    tried = 0
    for ids, known in doors:
        for method, path, body in known:
            answers = set()
            for one in ids:
                sent = None if body is None else {key: _named(value, one) for key, value in body.items()}
                async with other.request(method, path.replace("ID", one), json=sent) as answer:
                    error = (await said(answer))["error"]
                    answers.add((answer.status, error["code"], error["param"]))
                    tried += 1
            assert len(answers) == 1, (method, path, answers)
            assert next(iter(answers))[0] == 404, (method, path, answers)
    assert tried >= 250
    assert [await get(owner, f"/v1/conversations/{one['conversation']['id']}/export") for one in before] == before
    assert len((await get(other, "/v1/conversations"))["data"]) == 1


async def _things_of(whole: Whole, owner: aiohttp.ClientSession) -> tuple[list[str], list[str]]:
    """(conversations, replies): with and without words, ended and running, stored and not, from both doors."""
    given = [{"role": "user", "content": "secret"}]
    conversations = [(await post(owner, "/v1/conversations", **more))["id"] for more in ({}, {"items": given}, {})]
    asked: list[dict[str, Any]] = [{"conversation": conversations[2]}, {}, {"store": False}]
    replies = [(await post(owner, "/v1/responses", input="secret", **more))["id"] for more in asked]
    replies.append((await post(owner, "/v1/chat/completions", messages=given, store=True))["id"])
    whole.words = None
    running = {"input": "secret", "background": True}
    replies.append((await post(owner, "/v1/responses", **running))["id"])
    replies.append((await post(owner, "/v1/responses", conversation=conversations[2], **running))["id"])
    return conversations, replies


async def _deleted(client: aiohttp.ClientSession) -> str:
    conversation = (await post(client, "/v1/conversations"))["id"]
    async with client.delete(f"/v1/conversations/{conversation}") as answer:
        assert answer.status == 200
    return str(conversation)


def _named(value: Any, one: str) -> Any:
    return one.replace("%00", "\0") if value == "ID" else value


_Door = tuple[str, str, dict[str, Any] | None]


def _doors_of_replies(mine: str) -> list[_Door]:
    return [
        ("GET", "/v1/responses/ID", None),
        ("GET", "/v1/responses/ID?stream=true&starting_after=3", None),
        ("DELETE", "/v1/responses/ID", None),
        ("POST", "/v1/responses/ID/cancel", {}),
        ("GET", "/v1/responses/ID/input_items", None),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": "ID"}),
        ("POST", "/v1/responses", {"input": "x", "conversation": mine, "branch_from": "ID"}),
        ("POST", f"/v1/conversations/{mine}", {"head": "ID"}),
        ("POST", f"/v1/conversations/{mine}/regenerate", {"response_id": "ID"}),
    ]


def _doors_of_items(mine: str) -> list[_Door]:
    one = f"/v1/conversations/{mine}/items"
    return [("GET", f"{one}/ID", None), ("DELETE", f"{one}/ID", None), ("GET", f"{one}?after=ID", None)]


def _doors_of_conversations() -> list[_Door]:
    one, item = "/v1/conversations/ID", {"role": "user", "content": "x"}
    listed = [("GET", f"{one}/items", None), ("GET", f"{one}/items?include=branches&limit=3&order=asc", None)]
    return [
        *listed,
        ("GET", one, None),
        ("POST", one, {"title": "mine", "metadata": {}}),
        ("DELETE", one, None),
        ("POST", f"{one}/items", {"items": [item]}),
        ("GET", f"{one}/items/{clock.new_item_id()}", None),
        ("DELETE", f"{one}/items/{clock.new_item_id()}", None),
        ("GET", f"{one}/export", None),
        ("POST", f"{one}/regenerate", {}),
        ("POST", f"{one}/regenerate", {"stream": True}),
        ("POST", "/v1/responses", {"input": "x", "conversation": "ID"}),
        ("POST", "/v1/responses", {"input": "x", "conversation": "ID", "branch_from": "root", "stream": True}),
        ("GET", "/v1/conversations?after=ID", None),
    ]


async def test_five_presses_over_http_are_five_branches(whole: Whole) -> None:
    """Five streams of regenerate at once: four end as superseded, one lives, and all five are listed."""
    client = await whole.client()
    conversation = (await post(client, "/v1/conversations"))["id"]
    await post(client, "/v1/responses", input="one", conversation=conversation)
    whole.words = None
    path = f"/v1/conversations/{conversation}/regenerate"

    async def press() -> str:
        async with client.post(path, json={"stream": True}) as answer:
            return (await answer.read()).decode()

    async with asyncio.TaskGroup() as group:
        presses = [group.create_task(press()) for _ in range(5)]
        async with asyncio.timeout(20):
            while sum(press.done() for press in presses) < 4:
                await asyncio.sleep(0.01)
        whole.words = ["done"]
    streams = [press.result() for press in presses]
    assert sum('"reason":"superseded"' in stream for stream in streams) == 4
    assert sum("response.completed" in stream for stream in streams) == 1
    items = await stored_items(client, conversation, 7, include="branches", order="asc")
    written = [one for one in items if one["role"] == "assistant"]
    assert len(written) == 6
    assert [one["end_reason"] for one in written if one["active"]] == ["stop_token"]
    assert len({one["parent_id"] for one in written}) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/conversations", {"items": [{"role": "user", "content": "x"}] * 21}),
        ("/v1/conversations", {"items": [{"role": "robot", "content": "x"}]}),
        ("/v1/conversations", {"title": "x" * 513}),
        ("/v1/conversations", {"metadata": {"a": 1}}),
        ("/v1/conversations", {"title": "a\0b"}),
        ("/v1/conversations", []),
        ("/v1/conversations/ID", {"head": 7}),
        ("/v1/conversations/ID/items", {}),
        ("/v1/conversations/ID/items", {"items": []}),
        ("/v1/conversations/ID/items", {"items": [{"role": "user", "content": "x"}] * 21}),
        ("/v1/conversations/ID/items", {"items": [{"role": "user", "content": "x"}, {"role": "user"}]}),
        ("/v1/conversations/ID/items", {"items": [{"role": "user", "content": "a\0b"}]}),
        ("/v1/conversations/ID/items", {"items": [{"type": "reasoning", "summary": []}]}),
        ("/v1/conversations/ID/regenerate", {"stream": "yes"}),
        ("/v1/conversations/ID/regenerate", {}),
        ("/v1/conversations/ID/regenerate", {"temperature": 0.5}),
        ("/v1/conversations/ID/items?limit=0", None),
        ("/v1/conversations/ID/items?order=up", None),
        ("/v1/conversations?limit=101", None),
        ("/v1/conversations?search=" + "x" * 201, None),
        ("/v1/conversations?search=%00", None),
    ],
)
async def test_what_makes_no_sense_is_said_so(whole: Whole, path: str, body: Any) -> None:
    """Each field is checked before anything is stored: 400 in OpenAI's shape."""
    client = await whole.client()
    conversation = (await post(client, "/v1/conversations"))["id"]
    path = path.replace("ID", conversation)
    async with client.request("GET" if body is None else "POST", path, json=body) as answer:
        assert (answer.status, (await said(answer))["error"]["type"]) == (400, "invalid_request_error")
    assert len((await get(client, "/v1/conversations"))["data"]) == 1
    assert (await get(client, f"/v1/conversations/{conversation}/items"))["data"] == []
