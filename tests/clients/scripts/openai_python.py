"""What users of openai-python write, each demand as they would write it. Prints one JSON object: what came of each.

openai_python.py BASE_URL KEY MODEL SEED STOP     with this seed STOP is the fourth word, so that a reply can be complete
"""

import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

URL, KEY, MODEL, SEED, STOP = sys.argv[1:]
client = OpenAI(base_url=URL, api_key=KEY)
SHORT = 3
COMPLETE: Any = {"extra_body": {"seed": int(SEED), "stop": [STOP]}}  # the helpers insist on it
HELLO: Any = [{"role": "user", "content": "hello"}]


def chat() -> dict[str, Any]:
    made = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=SHORT)
    return {
        "text": made.choices[0].message.content,
        "finish_reason": made.choices[0].finish_reason,
        "completion_tokens": made.usage.completion_tokens,
        "prompt_tokens": made.usage.prompt_tokens,
    }


def chat_stream() -> dict[str, Any]:
    ids, text, finish, usage = set(), "", None, None
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=SHORT, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        ids.add(chunk.id)
        if chunk.usage is not None:
            usage = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return {"ids": len(ids), "text": text, "finish_reason": finish, "completion_tokens": usage}


def chat_stream_helper() -> dict[str, Any]:
    heard = ""
    with client.chat.completions.stream(model=MODEL, messages=HELLO, seed=int(SEED), stop=[STOP]) as stream:
        for event in stream:
            if event.type == "content.delta":
                heard += event.delta
        final = stream.get_final_completion()
    return {"heard": heard, "text": final.choices[0].message.content, "finish_reason": final.choices[0].finish_reason}


def response() -> dict[str, Any]:
    made = client.responses.create(model=MODEL, input="hello", max_output_tokens=SHORT)
    again = client.responses.retrieve(made.id)
    return {
        "text": made.output_text,
        "again": again.output_text,
        "status": made.status,
        "reason": made.incomplete_details.reason,
        "output_tokens": made.usage.output_tokens,
        "cached_tokens": made.usage.input_tokens_details.cached_tokens,
    }


def response_stream() -> dict[str, Any]:
    types, numbers, text = [], [], ""
    for event in client.responses.create(model=MODEL, input="hello", max_output_tokens=SHORT, stream=True):
        types.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.incomplete":
            final = event.response
    return {
        "types": types,
        "rising": numbers == sorted(set(numbers)),
        "text": text,
        "final": final.output_text,
        "output_tokens": final.usage.output_tokens,
    }


def response_stream_helper() -> dict[str, Any]:
    """The helper, left in the middle and gone on with by the reply's id."""
    text, last = "", 0
    with client.responses.stream(model=MODEL, input="hello", **COMPLETE) as stream:
        for event in stream:
            if event.type == "response.created":
                reply = event.response.id
            if event.type == "response.output_text.delta":
                text, last = text + event.delta, event.sequence_number
                break
    numbers = []
    with client.responses.stream(response_id=reply, starting_after=last) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    return {
        "text": text,
        "final": final.output_text,
        "after_the_cut": bool(numbers) and min(numbers) > last,
        "status": final.status,
    }


def background() -> dict[str, Any]:
    made = client.responses.create(model=MODEL, input="hello", max_output_tokens=SHORT, background=True)
    first, seen = made.status, made
    for _ in range(200):
        if seen.status not in ("queued", "in_progress"):
            break
        time.sleep(0.25)
        seen = client.responses.retrieve(made.id)
    events = list(client.responses.retrieve(made.id, stream=True, starting_after=0))
    return {
        "first": first,
        "status": seen.status,
        "text": seen.output_text,
        "replayed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "begins_after": events[0].sequence_number,
    }


def cancel() -> dict[str, Any]:
    made = client.responses.create(model=MODEL, input="hello", max_output_tokens=400, background=True)
    stopped = client.responses.cancel(made.id)
    again = client.responses.cancel(made.id)
    return {"status": stopped.status, "again": again.status, "usage": stopped.usage is not None}


def turns() -> dict[str, Any]:
    one = client.responses.create(model=MODEL, input="hello", max_output_tokens=SHORT)
    two = client.responses.create(model=MODEL, input="and now?", previous_response_id=one.id, max_output_tokens=SHORT)
    items = client.responses.input_items.list(two.id)
    client.responses.delete(one.id)
    try:
        client.responses.retrieve(one.id)
        deleted = False
    except openai.NotFoundError:
        deleted = True
    return {
        "named": two.previous_response_id == one.id,
        "longer": two.usage.input_tokens > one.usage.input_tokens + one.usage.output_tokens,
        "items": [item.content[0].text for item in items],
        "deleted": deleted,
    }


def conversation() -> dict[str, Any]:
    mine = client.conversations.create(metadata={"topic": "walls"}, items=[{"role": "user", "content": "first"}])
    made = client.responses.create(model=MODEL, input="second", conversation=mine.id, max_output_tokens=SHORT)
    listed = [item.content[0].text for item in client.conversations.items.list(mine.id, order="asc", limit=2).data]
    added = client.conversations.items.create(mine.id, items=[{"role": "user", "content": "third"}]).data[0]
    kept = client.conversations.items.retrieve(added.id, conversation_id=mine.id)
    left = client.conversations.items.delete(added.id, conversation_id=mine.id)
    renamed = client.conversations.update(mine.id, metadata={"topic": "doors"})
    gone = client.conversations.delete(mine.id)
    return {
        "named": made.conversation.id == mine.id,
        "items": [*listed, kept.content[0].text],
        "left": left.id == mine.id,
        "text": made.output_text,
        "topic": [mine.metadata["topic"], renamed.metadata["topic"]],
        "deleted": gone.deleted,
    }


def errors() -> dict[str, Any]:
    """The class of each, its status, its code, and whether it names its request."""

    def said(call: Any) -> list[Any]:
        try:
            call()
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.code, (error.request_id or "").startswith("req_")]
        return ["nothing raised"]

    stranger = OpenAI(base_url=URL, api_key="sk-chorus-none")
    create, ask = client.responses.create, client.chat.completions.create
    key, tool = f"key-{time.time_ns()}", {"type": "function", "function": {"name": "f", "parameters": {}}}
    create(model=MODEL, input="a", max_output_tokens=1, extra_headers={"Idempotency-Key": key})
    return {
        "key": said(stranger.models.list),
        "key_stream": said(lambda: stranger.responses.create(model=MODEL, input="hello", stream=True)),
        "reply": said(lambda: client.responses.retrieve("resp_none")),
        "cancel": said(lambda: client.responses.cancel("resp_none")),
        "conversation": said(lambda: client.conversations.retrieve("conv_none")),
        "model": said(lambda: ask(model="none", messages=HELLO)),
        "field": said(lambda: create(model=MODEL, input="hello", temperature=9)),
        "field_stream": said(lambda: ask(model=MODEL, messages=HELLO, n=2, stream=True)),
        "tools": said(lambda: ask(model=MODEL, messages=HELLO, tools=[tool])),
        "other_body": said(lambda: create(model=MODEL, input="b", extra_headers={"Idempotency-Key": key})),
    }


def headers() -> dict[str, Any]:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=SHORT)
    return {
        "request_id": (raw.headers["x-request-id"], raw.parse()._request_id),
        "limits": sorted(name for name in raw.headers if name.startswith("x-ratelimit-")),
        "models": [model.id for model in client.models.list()],
        "model": client.models.retrieve(MODEL).id,
    }


def asynchronous() -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=URL, api_key=KEY) as other:
            stream = await other.chat.completions.create(
                model=MODEL, messages=HELLO, max_completion_tokens=SHORT, stream=True
            )
            chat = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            async with other.responses.stream(model=MODEL, input="hello", **COMPLETE) as events:
                text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
                final = await events.get_final_response()
        return {"chat": chat, "text": text, "final": final.output_text}

    return asyncio.run(run())


SCENES = (
    chat,
    chat_stream,
    chat_stream_helper,
    response,
    response_stream,
    response_stream_helper,
    background,
    cancel,
    turns,
    conversation,
    errors,
    headers,
    asynchronous,
)


def shown(scene: Any) -> Any:
    try:
        return scene()
    except Exception as error:  # it is the result
        return {"raised": f"{type(error).__name__}: {error}"}


with ThreadPoolExecutor(len(SCENES)) as pool:  # side by side: the replies are slow on purpose
    results = dict(zip([scene.__name__ for scene in SCENES], pool.map(shown, SCENES), strict=True))
print(json.dumps({"version": openai.__version__, **results}))  # noqa: T201
