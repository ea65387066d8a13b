"""The serving plane's cost: token sampled -> bytes at the client, and how many tokens a second pass through it.

    make bench-plane            all of Chorus with scripted replicas, beside proxies in front of a scripted source

One machine, client included, one system at a time, in turns: a round runs every system once, and the medians of the
rounds are compared. Peers are installed by `make bench-peers`; one that is missing is named as missing.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench import hardware
from bench.client import Stream, stream
from bench.engine_peers import PROXIES
from bench.region import READY_S, free_port, region
from shared.bus.nats import connect
from shared.messages import Chunk, Entry, decoder
from shared.subjects import Names

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "plane.json"
STREAMS, TOKENS = 32, 128  # the shape that the peers are compared at
FULL_STREAMS, FULL_TOKENS = 128, 512  # the shape that fills the plane
PACED_SHARE = 0.3
IDLE_STREAMS = 500
SAMPLED_AT = "Chorus-Sampled-At"


@dataclass(frozen=True)
class Target:
    """Where a load goes. `bodies` makes the body of one stream of so many tokens."""

    name: str
    urls: tuple[str, ...]
    path: str
    key: str
    body: Callable[[int], dict[str, object]]


# --- starting things -------------------------------------------------------------------------------------


def wait_for(url: str, process: subprocess.Popen[bytes], what: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{what} ended with {process.returncode} while starting")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{what} did not answer at {url} within {READY_S:.0f} s")


@contextlib.contextmanager
def process(command: list[str], what: str, url: str, env: dict[str, str] | None = None) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **(env or {})})
        try:
            wait_for(url, started, what)
            yield
        finally:
            started.terminate()
            try:
                started.wait(15)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def chorus(data: Path, tps: float) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """All of Chorus with scripted replicas."""
    return region(data, "--stub", "--stub-tps", str(tps))


def chorus_target(ready: dict[str, Any]) -> Target:
    def body(tokens: int) -> dict[str, object]:
        return {
            "model": "stub",
            "input": "Plan a day in Hampi",
            "max_output_tokens": tokens,
            "stream": True,
            "store": True,
        }

    return Target("chorus", tuple(ready["gateways"]), "/v1/responses", ready["keys"]["paid"], body)


def chat_target(name: str, port: int, key: str) -> Target:
    def body(tokens: int) -> dict[str, object]:
        messages = [{"role": "user", "content": "Plan a day in Hampi"}]
        return {"model": "scripted", "messages": messages, "max_tokens": tokens, "stream": True}

    return Target(name, (f"http://127.0.0.1:{port}",), "/v1/chat/completions", key, body)


@contextlib.contextmanager
def peer(name: str, folder: Path, source: int, work: Path) -> Iterator[Target | None]:
    """A proxy in front of the scripted source; None when it is not installed."""
    port, key = free_port(), "sk-" + secrets.token_hex(24)
    if name == "source":
        yield chat_target(name, source, "none")
        return
    program = folder / "bin" / name
    if not program.exists():
        yield None
        return
    if name == "vllm-router":
        command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        command += ["--worker-urls", f"http://127.0.0.1:{source}"]
        url, env = f"http://127.0.0.1:{port}/health", {}
    else:
        config = work / "litellm.yaml"
        place = {"model": "openai/scripted", "api_base": f"http://127.0.0.1:{source}/v1", "api_key": "none"}
        config.write_text(json.dumps({"model_list": [{"model_name": "scripted", "litellm_params": place}]}))
        command = [
            str(program),
            "--config",
            str(config),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--num_workers",
            "1",
        ]
        url, env = f"http://127.0.0.1:{port}/health/liveliness", {"LITELLM_MASTER_KEY": key, "LITELLM_LOG": "ERROR"}
    with process(command, name, url, env):
        yield chat_target(name, port, key)


# --- loads ------------------------------------------------------------------------------------------------


async def saturate(target: Target, streams: int, tokens: int) -> dict[str, float]:
    """All streams at once, as fast as the tokens come."""
    started = time.time()
    seen = await asyncio.gather(
        *(
            stream(target.urls[index % len(target.urls)], target.path, target.key, target.body(tokens))
            for index in range(streams)
        )
    )
    failed = [one for one in seen if one.error or not one.deltas]
    if failed:
        raise SystemExit(f"{target.name}: {len(failed)} of {streams} streams failed: {failed[0].error}")
    took = max(one.ended_s for one in seen) - started
    return {
        "tokens_per_s": streams * tokens / took,
        "events_per_s": sum(one.events for one in seen) / took,
        "ttft_s_p50": statistics.median(one.ttft_s for one in seen),
    }


async def paced(target: Target, streams: int, tokens: int, over_s: float) -> list[Stream]:
    """Open loop: starts are spread evenly, whatever the system does with the ones before."""

    async def one(index: int) -> Stream:
        await asyncio.sleep(index * over_s / streams)
        return await stream(target.urls[index % len(target.urls)], target.path, target.key, target.body(tokens))

    return list(await asyncio.gather(*(one(index) for index in range(streams))))


async def sampled_to_client(ready: dict[str, Any], data: Path, seen: list[Stream]) -> dict[str, float]:
    """Per event: the arrival, less the time when its last token was sampled (kept beside each chunk in the log)."""
    names = Names()
    credentials = json.loads((data / "credentials.json").read_text())
    bus = await connect(
        ready["nats"], user="ops", password=credentials["nats"]["ops"], name="bench", inbox_prefix="_INBOX_ops"
    )
    entry: msgspec.msgpack.Decoder[Entry] = decoder(Entry)  # type: ignore[arg-type]  # msgspec reads unions
    last_token: list[float] = []
    first_token: list[float] = []
    try:
        for one in seen:
            sampled: dict[int, tuple[float, float]] = {}
            for message in await bus.read(
                names.log_stream_of(one.reply_id), names.log_subject(one.reply_id), from_seq=1, most=8192
            ):
                chunk = entry.decode(message.data)
                if isinstance(chunk, Chunk) and SAMPLED_AT in message.headers:
                    first, last = (float(part) for part in message.headers[SAMPLED_AT].split(","))
                    sampled[chunk.first_index + chunk.count - 1] = (first, last)
            for arrived, number in one.deltas:
                if (times := sampled.get((number - 1000) // 16)) is not None:
                    first_token.append(arrived - times[0])
                    last_token.append(arrived - times[1])
    finally:
        await bus.close()
    return {
        "events": len(last_token),
        "plane_ms_p50": 1000 * quantile(last_token, 0.5),
        "plane_ms_p95": 1000 * quantile(last_token, 0.95),
        "with_coalescing_ms_p50": 1000 * quantile(first_token, 0.5),
        "with_coalescing_ms_p95": 1000 * quantile(first_token, 0.95),
        "ttft_ms_p50": 1000 * quantile([one.ttft_s for one in seen], 0.5),
        "ttft_ms_p95": 1000 * quantile([one.ttft_s for one in seen], 0.95),
    }


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def resident_bytes(ready: dict[str, Any], kinds: tuple[str, ...]) -> int:
    """Resident memory of the services whose name begins with one of `kinds`."""
    total = 0
    for service in ready["services"]:
        if service["name"].startswith(kinds):
            pages = int(Path(f"/proc/{service['pid']}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


async def idle_memory(target: Target, ready: dict[str, Any], streams: int) -> dict[str, float]:
    """Resident bytes that one open, waiting stream adds to the gateways and relays."""
    kinds = ("gateway", "relay")
    before = resident_bytes(ready, kinds)
    tasks = [
        asyncio.create_task(stream(target.urls[i % len(target.urls)], target.path, target.key, target.body(64)))
        for i in range(streams)
    ]
    await asyncio.sleep(8)
    open_now = sum(not task.done() for task in tasks)
    after = resident_bytes(ready, kinds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"open_streams": open_now, "kib_per_stream": (after - before) / 1024 / max(open_now, 1)}


# --- the run ----------------------------------------------------------------------------------------------


def chorus_round(work: Path, full: bool) -> dict[str, dict[str, float]]:
    data = work / "chorus"
    with chorus(data, 0) as ready:
        target = chorus_target(ready)
        uvloop.run(saturate(target, 8, 32))  # warm
        figures = {"peer_shape": uvloop.run(saturate(target, STREAMS, TOKENS))}
        if full:
            figures["full"] = uvloop.run(saturate(target, FULL_STREAMS, FULL_TOKENS))
    return figures


def peer_round(name: str, folder: Path, source: int, work: Path) -> dict[str, float] | None:
    with peer(name, folder, source, work) as target:
        if target is None:
            return None
        uvloop.run(saturate(target, 4, 16))
        return uvloop.run(saturate(target, STREAMS, TOKENS))


def chorus_paced(work: Path, rate: float) -> dict[str, float]:
    """Latency at a share of the maximum: more or fewer streams, each at 40 tokens a second."""
    tps, tokens = 40.0, 200
    streams = max(4, int(rate / tps))
    data = work / "chorus"
    with chorus(data, tps) as ready:
        target = chorus_target(ready)
        uvloop.run(saturate(target, 4, 16))
        seen = uvloop.run(paced(target, streams, tokens, over_s=tokens / tps))
        good = [one for one in seen if not one.error]
        figures = uvloop.run(sampled_to_client(ready, data, good))
    return {"streams": streams, "tokens_per_s_offered": streams * tps, "failed": len(seen) - len(good), **figures}


def chorus_idle(work: Path) -> dict[str, float]:
    with chorus(work / "chorus", 0.01) as ready:
        target = chorus_target(ready)
        return uvloop.run(idle_memory(target, ready, IDLE_STREAMS))


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def measure(rounds: int, peers: Path) -> dict[str, Any]:
    names = ("source", "vllm-router", "litellm")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ("chorus", "full", *names)}
    with tempfile.TemporaryDirectory(prefix="plane-") as folder:
        work, port = Path(folder), free_port()
        with process([sys.executable, "-m", "bench.source", str(port)], "source", f"http://127.0.0.1:{port}/health"):
            for turn in range(rounds):
                ours = chorus_round(work, full=True)
                results["chorus"].append(ours["peer_shape"])
                results["full"].append(ours["full"])
                print(
                    f"round {turn + 1}: chorus {ours['peer_shape']['tokens_per_s']:.0f} tokens/s, "
                    f"full {ours['full']['tokens_per_s']:.0f}",
                    flush=True,
                )
                for name in names:
                    figures = peer_round(name, peers, port, work)
                    if figures is not None:
                        results[name].append(figures)
                        print(f"round {turn + 1}: {name} {figures['tokens_per_s']:.0f} tokens/s", flush=True)
        medians = {name: median_of(found) if found else None for name, found in results.items()}
        most = max(one["tokens_per_s"] for one in (medians["chorus"], medians["full"]) if one)
        latency = chorus_paced(work, PACED_SHARE * most)
        print(f"at {PACED_SHARE:.0%}: {latency}", flush=True)
        idle = chorus_idle(work)
    ratios = {}
    for name in names:
        mine, theirs = medians["chorus"], medians[name]
        if mine is not None and theirs is not None:
            ratios[f"chorus / {name}"] = mine["tokens_per_s"] / theirs["tokens_per_s"]
    return {"systems": medians, "ratios": ratios, "paced": latency, "idle": idle}


def table(figures: dict[str, Any]) -> str:
    rows = ["| system | tokens/s | events/s | first token p50, ms |", "|---|---|---|---|"]
    shapes = {"full": f"chorus, {FULL_STREAMS} x {FULL_TOKENS}", "chorus": f"chorus, {STREAMS} x {TOKENS}"}
    for name, one in figures["systems"].items():
        label = shapes.get(name, f"{name}, {STREAMS} x {TOKENS}")
        row = (
            "missing | | "
            if one is None
            else (f"{one['tokens_per_s']:.0f} | {one['events_per_s']:.0f} | {1000 * one['ttft_s_p50']:.0f}")
        )
        rows.append(f"| {label} | {row} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=PROXIES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = measure(options.rounds, options.peers)
    figures["hardware"] = hardware.describe(("nats-py", "aiohttp", "uvloop", "msgspec"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    from bench.plots import draw  # noqa: PLC0415 - matplotlib comes with `make bench-*` only

    draw("plane", figures, options.out.with_suffix(".svg"))
    print(table(figures))
    print("ratios:", {name: round(ratio, 2) for name, ratio in figures["ratios"].items()})
    print("at 30 % of the maximum:", {key: round(value, 2) for key, value in figures["paced"].items()})
    print("idle streams:", {key: round(value, 1) for key, value in figures["idle"].items()})


if __name__ == "__main__":
    main()
