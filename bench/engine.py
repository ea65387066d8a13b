"""The engine beside what people would use instead: same weights, same machine, same client, one server at a time.

python -m bench.engine [--trials 3] [--only NAME,...] [--threads 2] [--out bench/results/engine.json]
    prints a table, writes the figures and, beside them, a picture

Each figure is the median of the trials; trials go round the systems, so that a machine that slows down slows all. Every
trial has a slice of text that no server has seen. Prompts are token ids, greedy, end-of-text ignored.

`ratios` are ours to the best peer on the same weights. In `ratios_rounded` counts, too, a peer that rounds them to
bfloat16: the faster one where the processor has instructions for it.

figure          from                          to                           unit
batch N         first request sent            last event of the last one   output tokens of all N / s
single          first token of one stream     its last token               tokens / s
prefill         request of 1,024 tokens sent  its first token              prompt tokens / s
repeat_ttft     the same request sent again   its first token              s
turn_ttft       turn k of a conversation sent its first token              s, worst of turns 2..6
itl_beside      gaps of 16 decodes while a prompt of 1,024 arrives         s, 95th percentile
long_prompt     the same while one of 4,000 is computed, to without it     ratio; of those whose context holds it
long_ttft       that prompt sent              its first token              s
whole           batch 32 through all of Chorus, gateway to one replica with the same threads: `chorus-whole`, batch32
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client import Stream, stream
from bench.engine_peers import MODEL_FILE, PEERS, Peer
from bench.hardware import describe
from bench.region import region
from shared.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
PRINTED_S = 900.0
SHARED, OWN, OUT = 64, 64, 128  # tokens of a request of a batch
LONG = 1_024
BATCHES = (1, 8, 32, 64)
COMPARED = 32  # the batch that is also sent through all of Chorus
WHOLE = "chorus-whole"
TURNS, TURN_IN, TURN_OUT = 6, 48, 48
BESIDE = 16
LONG_BESIDE, LONG_OUT = 4_000, 1_400  # the decodes must outlast the prompt
LONG_CONTEXT = 4_800


@dataclass
class Texts:
    """Token ids nobody has seen: each slice is new, a seeded shuffle of our own prose's sentences."""

    tokenizer: Tokenizer
    sentences: list[list[int]]
    rng: random.Random

    def take(self, count: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < count:
            ids += self.rng.choice(self.sentences)
        return ids[:count]


def read_texts(model_file: Path, seed: int) -> Texts:
    tokenizer = load_tokenizer(str(model_file))
    prose = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    sentences = [tokenizer.encode(part.strip() + ". ") for part in prose.split(". ") if len(part) > 40]
    return Texts(tokenizer, sentences, random.Random(seed))


# --- one system -------------------------------------------------------------------------------------------


@dataclass
class Server:
    url: str
    model: str
    texts: Texts

    async def ask(self, ids: Sequence[int], tokens: int) -> Stream:
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": True,
        }
        seen = await stream(self.url, "/v1/completions", "none", body)
        if seen.error or seen.tokens != tokens:
            raise RuntimeError(f"{seen.tokens} tokens instead of {tokens}: {seen.error}")
        return seen

    async def batch(self, count: int) -> float:
        head = self.texts.take(SHARED)
        prompts = [head + self.texts.take(OWN) for _ in range(count)]
        began = time.time()
        seen = await asyncio.gather(*(self.ask(prompt, OUT) for prompt in prompts))
        return count * OUT / (max(one.ended_s for one in seen) - began)

    async def single(self) -> float:
        seen = await self.ask(self.texts.take(SHARED + OWN), OUT)
        return (OUT - 1) / (seen.deltas[-1][0] - seen.deltas[0][0])

    async def prefill(self) -> tuple[float, float]:
        """(tokens/s of a long prompt, seconds to the first token when it comes again)."""
        prompt = self.texts.take(LONG)
        first = await self.ask(prompt, 1)
        again = await self.ask(prompt, 1)
        return LONG / first.ttft_s, again.ttft_s

    async def conversation(self) -> float:
        history: list[int] = []
        worst = 0.0
        for turn in range(TURNS):
            history += self.texts.take(TURN_IN)
            seen = await self.ask(history, TURN_OUT)
            history += self.texts.take(TURN_OUT)  # ids are not in the stream; a reply of its length stands for it
            worst = max(worst, seen.ttft_s) if turn else 0.0
        return worst

    async def beside(self) -> float:
        decodes = [asyncio.create_task(self.ask(self.texts.take(32), OUT)) for _ in range(BESIDE)]
        await asyncio.sleep(1.0)
        await self.ask(self.texts.take(LONG), 1)
        streams = await asyncio.gather(*decodes)
        gaps = [b[0] - a[0] for seen in streams for a, b in zip(seen.deltas, seen.deltas[1:], strict=False)]
        return statistics.quantiles(gaps, n=20)[-1]

    async def long_prompt(self) -> tuple[float, float]:
        """(how much longer the gaps of the decodes are while a long prompt is computed, its own TTFT)."""
        decodes = [asyncio.create_task(self.ask(self.texts.take(32), LONG_OUT)) for _ in range(BESIDE)]
        await asyncio.sleep(3.0)
        began = time.time()
        long = await self.ask(self.texts.take(LONG_BESIDE), 1)
        over = began + long.ttft_s
        streams = await asyncio.gather(*decodes)
        if min(seen.deltas[-1][0] for seen in streams) < over:
            raise RuntimeError("a decode was over before the long prompt was")
        settled = began - 2.0  # their own prompts are computed by then
        return _gaps_p95(streams, began, over) / _gaps_p95(streams, settled, began), long.ttft_s


def _gaps_p95(streams: Sequence[Stream], since_s: float, until_s: float) -> float:
    """Of the gaps between tokens that came in a span of time."""
    gaps = [
        after[0] - before[0]
        for seen in streams
        for before, after in itertools.pairwise(seen.deltas)
        if since_s <= after[0] < until_s
    ]
    return statistics.quantiles(gaps, n=20)[-1]


async def trial(server: Server, batches: Sequence[int], context: int) -> dict[str, float]:
    found = {"single": await server.single()}
    found["prefill"], found["repeat_ttft"] = await server.prefill()
    for count in batches:
        found[f"batch{count}"] = await server.batch(count)
    found["turn_ttft"] = await server.conversation()
    found["itl_beside"] = await server.beside()
    if context >= LONG_CONTEXT:
        found["long_prompt"], found["long_ttft"] = await server.long_prompt()
    return found


@contextmanager
def running(peer: Peer, threads: int, log: Path):
    """The peer's server on a free port, ready; gone afterwards."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with log.open("ab") as out:
        command = peer.command(port, threads)
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **peer.environment})
        try:
            _until_ready(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def printed(peer: Peer, threads: int) -> dict[str, float]:
    """The figures of a peer that has no server."""
    done = subprocess.run(
        peer.command(0, threads),
        cwd=ROOT,
        env={**os.environ, **peer.environment},
        capture_output=True,
        text=True,
        timeout=PRINTED_S,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.time() + START_S
    while time.time() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if b" 200 " in sock.recv(64):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {START_S:.0f} s")


# --- all of Chorus ----------------------------------------------------------------------------------------


async def whole(texts: Texts, threads: int) -> dict[str, float]:
    """The batch as messages: a template's tokens come on top, and each reply is stored, logged and watched over."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        flags = ("--replicas", "1", "--threads", str(threads), "--model-file", str(MODEL_FILE))
        with region(Path(folder) / "data", *flags) as ready:
            head = texts.take(SHARED)
            await _messages(ready, [texts.tokenizer.decode(texts.take(SHARED))])  # warm
            prompts = [head + texts.take(OWN) for _ in range(COMPARED)]
            began = time.time()
            seen = await _messages(ready, [texts.tokenizer.decode(prompt) for prompt in prompts])
            return {f"batch{COMPARED}": sum(one.tokens for one in seen) / (max(one.ended_s for one in seen) - began)}


async def _messages(ready: dict[str, Any], texts: Sequence[str]) -> list[Stream]:
    """One stream for each, over both gateways in turn."""

    def asked(text: str) -> dict[str, object]:
        fixed = {"temperature": 0.0, "ignore_eos": True, "stream": True, "max_output_tokens": OUT}
        return {"input": text, **fixed}

    gateways, key = itertools.cycle(ready["gateways"]), ready["keys"]["paid"]
    seen = await asyncio.gather(*(stream(next(gateways), "/v1/responses", key, asked(text)) for text in texts))
    for one in seen:
        if one.error or one.tokens != OUT:
            raise RuntimeError(f"{one.tokens} tokens instead of {OUT}: {one.error}")
    return seen


# --- all of them ------------------------------------------------------------------------------------------

BETTER: dict[str, Callable[[float, float], float]] = {
    "repeat_ttft": lambda ours, best: best / ours,
    "turn_ttft": lambda ours, best: best / ours,
    "itl_beside": lambda ours, best: best / ours,
    "long_prompt": lambda ours, best: best / ours,
    "long_ttft": lambda ours, best: best / ours,
}


def ratios(figures: dict[str, dict[str, float]], *, rounded: bool) -> dict[str, float]:
    """Ours to the best peer of each figure, and `torch_*`, the torch path's to transformers; above 1 is better.

    `rounded`: also peers that compute with rounded weights count; else those on the same weights.
    """

    def of_peers(name: str) -> list[float]:
        others = [who for who in figures if not who.startswith("chorus") and (rounded or not PEERS[who].rounds)]
        return [figures[who][name] for who in others if name in figures[who]]

    ours = figures.get("chorus", {})
    found: dict[str, float] = {}
    for name, value in ours.items():
        if others := of_peers(name):
            less_is_better = name in BETTER
            best = min(others) if less_is_better else max(others)
            found[name] = round(best / value if less_is_better else value / best, 2)
    key = f"batch{COMPARED}"
    if WHOLE in figures and (others := of_peers(key)):
        found["whole"] = round(figures[WHOLE][key] / max(others), 2)
    bar, torch = figures.get("transformers", {}), figures.get("chorus-torch", {})
    found |= {f"torch_{name}": round(torch[name] / value, 2) for name, value in bar.items() if name in torch}
    return found


async def measure(args: argparse.Namespace) -> dict[str, object]:
    wanted = args.only.split(",") if args.only else list(PEERS)
    there = {name: peer for name, peer in PEERS.items() if name in wanted and peer.missing() is None}
    absent = {name: PEERS[name].missing() for name in wanted if name not in there}
    texts = read_texts(MODEL_FILE, args.seed)
    trials: dict[str, list[dict[str, float]]] = {name: [] for name in there}
    for number in range(args.trials):
        for name, peer in there.items():
            if not peer.serves:
                trials[name].append(printed(peer, args.threads))
                print(f"trial {number + 1} {name}: {trials[name][-1]}", flush=True)
                continue
            with running(peer, args.threads, args.out.with_suffix(f".{name}.log.tmp")) as url:
                server = Server(url, peer.model, texts)
                await server.ask(texts.take(40), 8)  # warm
                found = await trial(server, [n for n in BATCHES if n <= args.batch_max], peer.context)
                trials[name].append(found)
            print(f"trial {number + 1} {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
        if "chorus" in there:
            trials.setdefault(WHOLE, []).append(await whole(texts, args.threads))
            print(f"trial {number + 1} {WHOLE}: {trials[WHOLE][-1]}", flush=True)
    figures = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        for name, runs in trials.items()
        if runs
    }
    return {
        "ratios": ratios(figures, rounded=False),
        "ratios_rounded": ratios(figures, rounded=True),
        "figures": figures,
        "trials": trials,
        "missing": absent,
        "settings": {
            name: {"command": [_relative(part) for part in peer.command(0, args.threads)], "version": peer.version}
            for name, peer in there.items()
        },
        "threads": args.threads,
        "load_average": os.getloadavg(),
        "hardware": describe(("numpy", "torch")),
    }


def _relative(part: str) -> str:
    """Paths from here, so that a result says nothing of the machine's folders."""
    return part.replace(f"{ROOT}/", "")


def table(result: dict[str, object]) -> str:
    figures = result["figures"]
    names = list(dict.fromkeys(name for found in figures.values() for name in found))
    rows = [
        ["", *names],
        *([who, *(f"{found.get(name, float('nan')):.4g}" for name in names)] for who, found in figures.items()),
    ]
    for label, kind, prefix in (
        ("ours / best", "ratios", ""),
        ("or on rounded weights", "ratios_rounded", ""),
        ("torch / transformers", "ratios", "torch_"),
    ):
        rows.append([label, *(f"{result[kind].get(prefix + name, float('nan')):.2f}" for name in names)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"missing: {who}: {why}" for who, why in result["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-max", type=int, default=max(BATCHES))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/engine.json")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    from bench.plots import draw  # noqa: PLC0415 - matplotlib comes with `make bench-*` only

    draw("engine", result, args.out.with_suffix(".svg"))
    print(table(result))


if __name__ == "__main__":
    main()
