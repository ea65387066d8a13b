"""The scripted token source that proxies stand in front of: chat completions, one event per token, as fast as it can.

python -m bench.source PORT [TOKENS_PER_S]       0: as fast as possible
"""

import asyncio
import json
import sys
import time

import uvloop
from aiohttp import web

MODEL = "scripted"


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    body = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    tokens = int(body.get("max_tokens") or 128)
    pace = request.app["tps"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    started = time.monotonic()
    for index in range(tokens):
        if pace:
            await asyncio.sleep(max(0.0, started + index / pace - time.monotonic()))
        await response.write(_chunk({"content": f" w{index % 1024:04d}"}))
    await response.write(_chunk({}, "stop"))
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    tail = {"id": "chatcmpl-scripted", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": []}
    await response.write(b"data: " + json.dumps({**tail, "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def main() -> None:
    app = web.Application()
    app["tps"] = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    app.router.add_post("/v1/chat/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    loop = uvloop.new_event_loop()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), loop=loop, print=None, access_log=None)


if __name__ == "__main__":
    main()
