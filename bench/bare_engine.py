"""Our engine behind a bare HTTP server, as its peers are served: OpenAI's completions, streamed, and nothing else.

python -m bench.bare_engine PORT MODEL_FILE [THREADS]
"""

import asyncio
import itertools
import json
import sys
from dataclasses import dataclass, field

import uvloop
from aiohttp import web

from services.replica.engine_messages import EngineConfig, SequenceTokens, SubmitSequence
from services.replica.engine_process import EngineHandle
from shared.messages import Sampling, pack_ids
from shared.tiers import Tier
from shared.tokenizer import Tokenizer, load_tokenizer

KV_BYTES = 1 << 30


@dataclass
class Bare:
    engine: EngineHandle
    tokenizer: Tokenizer
    replies: dict[str, asyncio.Queue[SequenceTokens]] = field(default_factory=dict)
    numbers: itertools.count = field(default_factory=itertools.count)

    async def hand_out(self) -> None:
        """Each step's tokens to the streams that wait for them."""
        async for report in self.engine.__aiter__():
            for tokens in report.tokens:
                if (queue := self.replies.get(tokens.sequence_id)) is not None:
                    queue.put_nowait(tokens)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self.tokenizer.encode(body["prompt"])
        name = str(next(self.numbers))
        queue = self.replies[name] = asyncio.Queue()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Connection": "close"})
        try:
            sampling = Sampling(
                temperature=body.get("temperature", 1.0),
                ignore_eos=body.get("ignore_eos", False),
                seed=body.get("seed"),
            )
            sequence = SubmitSequence(
                sequence_id=name,
                tier=Tier.PAID,
                prompt=pack_ids(prompt),
                budget=body["max_tokens"],
                sampling=sampling,
            )
            if not self.engine.submit(sequence):
                raise web.HTTPTooManyRequests
            await response.prepare(request)
            written, finish = 0, None
            while finish is None:
                tokens = await queue.get()
                written += len(tokens.ids)
                finish = tokens.finish
                await response.write(_event(name, "".join(tokens.texts), finish and finish.value))
            usage = {"prompt_tokens": len(prompt), "completion_tokens": written}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            del self.replies[name]
            self.engine.cancel(name)
        return response


def _event(name: str, text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    body = {"id": name, "object": "text_completion", "choices": [choice]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def main(port: int, model_file: str, threads: int) -> None:
    bare = Bare(EngineHandle(), load_tokenizer(model_file))
    config = EngineConfig(model_file=model_file, threads=threads, kv_bytes=KV_BYTES, waiting_max=256)
    ready = await bare.engine.start(config, on_progress=lambda said: print(said.phase, said.detail, file=sys.stderr))
    print(ready.model_version, ready.phases_s, ready.step, file=sys.stderr)
    app = web.Application()
    app.router.add_post("/v1/completions", bare.complete)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response(text="ok")))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await bare.hand_out()
    finally:
        await bare.engine.stop()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2))
