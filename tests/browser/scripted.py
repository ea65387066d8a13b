"""A gateway that follows a script: for states of the page that a healthy system cannot be brought into at will.

It speaks the same wire (conversations, numbered events, resume, cancel) from one process without a bus. What a message
says decides what becomes of it: `limit` is refused, `queue` waits for ever, `fallback` is answered by the mini model,
`filter` and `fail` end so after a dozen tokens; anything else is answered with `SAMPLE`.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from services.gateway.page import add_page

WEB = Path(__file__).resolve().parents[2] / "services" / "gateway" / "web"
LATE_S = 0.02  # between tokens
SAMPLE = """## Sleeping well

Three habits help *most* people. Try **one at a time**, and keep a note of what changed:

1. **Keep the same hours**, also at weekends.
2. Dim the lights an hour before:
   - no bright screens,
   - a book instead.
3. Keep the room cool and dark.

```python
def hours(bed: int, rise: int) -> int:
    "How long that was, over midnight too."
    return (rise - bed) % 24
```

| Age | Hours |
|---|--:|
| 18 to 64 | 7 to 9 |
| 65 and more | 7 to 8 |

> Rest is not idleness. See [the guide](https://example.org/sleep).
"""


@dataclass
class Reply:
    id: str
    conversation: str
    parent: str  # the message's item id
    words: list[str]
    script: str
    model: str = "chorus"
    metadata: dict[str, str] = field(default_factory=dict)
    written: int = 0
    end: str | None = None
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "".join(self.words[: self.written])

    def object(self) -> dict[str, Any]:
        status = {None: "in_progress", "stop_token": "completed", "failed": "failed", "safety": "incomplete"}
        details = {"safety": "content_filter", "user_stop": "user_stop", "superseded": "superseded"}.get(self.end or "")
        return {
            "id": self.id,
            "model": self.model,
            "status": status.get(self.end, "cancelled"),
            "metadata": self.metadata,
            "error": {"message": "The replica was lost. Try it again."} if self.end == "failed" else None,
            "incomplete_details": {"reason": details} if details else None,
            "output": [{"content": [{"type": "output_text", "text": self.text}]}],
        }


class Script:
    """The state of all conversations, and what the doors answer."""

    def __init__(self) -> None:
        self.conversations: dict[str, dict[str, Any]] = {}
        self.items: dict[str, list[dict[str, Any]]] = {}
        self.replies: dict[str, Reply] = {}
        self._numbers = itertools.count(1)
        self._keys: dict[str, str] = {}
        self._running: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        add = app.router
        add_page(app, WEB)
        add.add_get("/v1/models", self.models)
        add.add_get("/v1/conversations", self.list)
        add.add_post("/v1/conversations", self.create)
        add.add_get("/v1/conversations/{id}", self.get)
        add.add_post("/v1/conversations/{id}", self.change)
        add.add_delete("/v1/conversations/{id}", self.remove)
        add.add_get("/v1/conversations/{id}/items", self.get_items)
        add.add_post("/v1/conversations/{id}/regenerate", self.regenerate)
        add.add_post("/v1/responses", self.send)
        add.add_get("/v1/responses/{id}", self.retrieve)
        add.add_post("/v1/responses/{id}/cancel", self.cancel)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "chorus", "note": ""}, {"id": "chorus-mini", "note": ""}]})

    async def list(self, request: web.Request) -> web.Response:
        wanted = request.query.get("search", "").lower()
        found = [one for one in reversed(self.conversations.values()) if wanted in one["title"].lower()]
        return web.json_response({"data": found, "has_more": False})

    async def create(self, _: web.Request) -> web.Response:
        made = {"id": f"conv_{next(self._numbers)}", "title": "", "updated_at": 0, "created_at": 0, "head": None}
        self.conversations[made["id"]] = made
        self.items[made["id"]] = []
        return web.json_response(made)

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self.conversations[request.match_info["id"]])

    async def change(self, request: web.Request) -> web.Response:
        one = self.conversations[request.match_info["id"]]
        one.update(await request.json())
        return web.json_response(one)

    async def remove(self, request: web.Request) -> web.Response:
        self.conversations.pop(request.match_info["id"])
        return web.json_response({"deleted": True})

    async def get_items(self, request: web.Request) -> web.Response:
        items = self.items.get(request.match_info["id"])
        if items is None:
            return _error(404, "There is no such conversation.")
        return web.json_response({"data": [self._item(item) for item in items], "has_more": False})

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        reply = self.replies.get(item["response_id"]) if item["role"] == "assistant" else None
        if reply is None:
            return item
        more = {"end_reason": reply.end, "notice": reply.metadata.get("notice"), "model": reply.model}
        if reply.end is None:
            return {**item, **more, "status": "in_progress", "content": []}
        return {**item, **more, "content": [{"type": "output_text", "text": reply.text}]}

    async def send(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text, conversation = body["input"], body["conversation"]
        if "limit" in text:
            return _error(429, "You have reached your limit of messages.", {"Retry-After": "12"})
        key = request.headers["Idempotency-Key"]
        if key not in self._keys:
            follows = body["branch_from"]
            parent = None if follows == "root" else f"msg_{follows.removeprefix('resp_')}"
            message = self._add(conversation, "user", parent, text)
            one = self.conversations[conversation]
            one["title"] = one["title"] or text
            self._keys[key] = self._write(conversation, message, text).id
        return await self._stream(request, self.replies[self._keys[key]])

    async def regenerate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        old = self.replies[body["response_id"]]
        message = next(item for item in self.items[old.conversation] if item["id"] == old.parent)
        reply = self._write(old.conversation, message, message["content"][0]["text"])
        return await self._stream(request, reply)

    def _add(self, conversation: str, role: str, parent: str | None, text: str) -> dict[str, Any]:
        item = {
            "id": f"msg_{next(self._numbers)}",
            "type": "message",
            "role": role,
            "status": "completed",
            "parent_id": parent,
            "response_id": None,
            "active": True,
            "content": [{"type": "input_text", "text": text}],
        }
        self.items[conversation].append(item)
        return item

    def _write(self, conversation: str, message: dict[str, Any], text: str) -> Reply:
        for other in self.replies.values():
            if other.conversation == conversation and other.end is None:
                _over(other, "superseded")
        reply = Reply(f"resp_{next(self._numbers)}", conversation, message["id"], _tokens(SAMPLE), text)
        if "fallback" in text:
            reply.model = "chorus-mini"
            notice = "You have used up this hour's tokens of chorus: chorus-mini answers until 14:30."
            reply.metadata = {"requested_model": "chorus", "notice": notice}
        self.replies[reply.id] = reply
        message["response_id"] = message["response_id"] or reply.id
        item = self._add(conversation, "assistant", message["id"], "")
        item.update(id=f"msg_{reply.id.removeprefix('resp_')}", response_id=reply.id)
        task = asyncio.create_task(self._run(reply))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return reply

    async def _run(self, reply: Reply) -> None:
        while "queue" in reply.script and reply.end is None:
            await asyncio.sleep(LATE_S)
        last = 12 if "filter" in reply.script or "fail" in reply.script else len(reply.words)
        while reply.written < last and reply.end is None:
            await asyncio.sleep(LATE_S)
            reply.written += 1
            _tell(reply)
        _over(reply, "safety" if "filter" in reply.script else "failed" if "fail" in reply.script else "stop_token")

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        reply = self.replies[request.match_info["id"]]
        if request.query.get("stream") == "true":
            return await self._stream(request, reply)
        return web.json_response(reply.object())

    async def cancel(self, request: web.Request) -> web.Response:
        reply = self.replies[request.match_info["id"]]
        _over(reply, "user_stop")
        return web.json_response(reply.object())

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        after = int(request.headers.get("Last-Event-ID", "-1"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-chorus-reply": reply.id})
        await response.prepare(request)
        async for number, event in _events(reply):
            if number > after:
                data = json.dumps({"sequence_number": number, **event})
                await response.write(f"id: {number}\nevent: {event['type']}\ndata: {data}\n\n".encode())
        return response


async def _events(reply: Reply) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    yield 0, {"type": "response.created", "response": {**reply.object(), "status": "queued"}}
    place = itertools.count(12, -1)
    for number in itertools.count(1):
        if "queue" not in reply.script or reply.end is not None:
            break
        at = max(1, next(place))
        more = {"position": str(at), "eta_s": f"{at * 3.4:.1f}", "notice": "queued"}
        yield number, {"type": "response.queued", "response": {**reply.object(), "metadata": more}}
        await _until(reply, 0.5)
    shown = 0
    while True:
        while shown < reply.written:
            shown += 1
            delta = reply.words[shown - 1]
            yield 1000 + 16 * shown, {"type": "response.output_text.delta", "delta": delta}
        if reply.end is not None:
            break
        await _until(reply, 5.0)
    kind = {"stop_token": "completed", "failed": "failed"}.get(reply.end, "incomplete")
    yield 1_000_000, {"type": f"response.{kind}", "response": reply.object()}


async def _until(reply: Reply, timeout_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(reply.grew.wait(), timeout_s)


def _tell(reply: Reply) -> None:
    reply.grew.set()
    reply.grew = asyncio.Event()


def _over(reply: Reply, reason: str) -> None:
    reply.end = reply.end or reason
    _tell(reply)


def _tokens(text: str) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    return web.json_response({"error": error}, status=status, headers=headers)


@contextmanager
def scripted() -> Iterator[str]:
    """The address of a scripted gateway that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(Script().app())
    thread = threading.Thread(target=loop.run_forever, name="scripted-gateway", daemon=True)
    thread.start()

    def call(make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), loop).result(10)

    call(runner.setup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    call(site.start)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        call(runner.cleanup)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
