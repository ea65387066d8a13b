"""Malformed messages on every subject: counted and dropped, nobody dies, and replies go on meanwhile.

recipes   noise | nothing | a message cut off | bytes flipped | another kind of message | one field with a wild value
"""

import asyncio
import os
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ops.reach import operator_bus, reach_of
from shared.errors import BusError
from shared.subjects import Names
from shared.tiers import Tier
from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty, total, tracebacks
from tests.drill.report import Report
from tests.integration.system import ROOT, System

SAMPLES = ROOT / "tests" / "contract" / "samples" / "v1"
KINDS = ("gateway", "conversation", "router", "replica", "relay", "safety", "usage")
PER_S = 1500.0
_STRANGER = "resp_local00" + "0" * 26  # an id like ours that nobody was ever given
_WILD: tuple[Any, ...] = (
    *(None, -1, 1 << 40, 1e308, float("nan"), "", "a.b c", "*", ">", "\0", [], {}, b"", b"\xff" * 7, [[]], True),
    *("resp_elsewhere00" + "0" * 26, "resp_local" + "Z" * 28, "x" * 5000, {"type": "Open"}),
)


def _subjects(names: Names) -> Mapping[str, str]:
    """Every subject that a service listens to -> what is sent there in earnest."""
    verbs = {"send": "SendMessage", "key": "KeyLookup", "withdraw": "WithdrawReply"}
    verbs |= dict.fromkeys(("get", "cancel", "delete", "input_items"), "ReplyRef")
    one = {
        names.relay_open: "OpenStream",
        names.relay_alive: "RelayAlive",
        names.safety_check: "SafetyCheck",
        names.safety_watch: "SafetyWatch",
        names.keys: "KeyRevoked",
        names.ended(_STRANGER): "EndedReply",
        names.usage(_STRANGER): "UsageRecord",
        names.cancel(_STRANGER): "Cancel",
        names.presence(_STRANGER): "Presence",
        names.queue(Tier.PAID, "stub"): "QueueView",
        names.log_subject(_STRANGER): "Chunk",
        names.frames("gateway-1", "nobody"): "Frame",
        names.journal("router"): "JournalRecord",
    }
    one |= {names.conversation(verb): kind for verb, kind in verbs.items()}
    one |= {names.lane_subject(tier, "stub", bucket): "GenerateRequest" for tier in Tier for bucket in (0, 3)}
    for number in (1, 2):
        replica = f"replica-{number}"
        one |= {names.health(replica): "ReplicaHealth", names.blocks(replica): "BlocksChanged"}
        one |= {names.dispatch(replica): "Dispatch", names.ask(replica): "Ask", names.blocks_snapshot(replica): "Ask"}
        one |= {names.attempt_over(f"router-{number}"): "AttemptOver", names.credit(f"relay-{number}"): "Credit"}
    return one


class Mutator:
    """Makes broken messages out of the frozen samples of good ones."""

    def __init__(self, random_: random.Random) -> None:
        self._random = random_
        self._samples = {path.stem: self._at_home(path.read_bytes()) for path in sorted(SAMPLES.glob("*.msgpack"))}
        self._recipes: tuple[Callable[[bytes], bytes], ...] = (
            self._noise,
            lambda _: b"",
            self._cut,
            self._flipped,
            self._another,
            self._wild,
            self._wild,
        )

    def _at_home(self, sample: bytes) -> bytes:
        """The same message about a reply that could be ours: so it comes further before it is found out."""

        def ours(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: ours(key, inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [ours("", inner) for inner in value]
            if name in ("reply_id", "reply") and isinstance(value, str):
                return _STRANGER
            homely = {
                "model": "stub",
                "deadline_s": 3.0,
                "deadline_left_s": 3.0,
                "budget": 8,
                "prompt": b"\1\0\0\0" * 9,
            }
            return homely.get(name, value) if isinstance(value, str | int | float | bytes) else value

        return msgspec.msgpack.encode(ours("", msgspec.msgpack.decode(sample)))

    def make(self, kind: str) -> bytes:
        return self._random.choice(self._recipes)(self._samples[kind])

    def _noise(self, _: bytes) -> bytes:
        return self._random.randbytes(self._random.randint(1, 200))

    def _cut(self, good: bytes) -> bytes:
        return good[: self._random.randrange(len(good))]

    def _flipped(self, good: bytes) -> bytes:
        broken = bytearray(good)
        for _ in range(self._random.randint(1, 4)):
            broken[self._random.randrange(len(broken))] ^= 1 << self._random.randrange(8)
        return bytes(broken)

    def _another(self, _: bytes) -> bytes:
        return self._samples[self._random.choice(sorted(self._samples))]

    def _wild(self, good: bytes) -> bytes:
        """One field, at any depth, is something else or missing."""
        message = msgspec.msgpack.decode(good)
        place = message
        while True:
            key = self._random.choice(sorted(place))
            if isinstance(place[key], dict) and place[key] and self._random.random() < 0.7:
                place = place[key]
                continue
            if self._random.random() < 0.1:
                del place[key]
            else:
                place[key] = self._random.choice(_WILD)
            return msgspec.msgpack.encode(message)


async def _throw(data: Path, count: int, random_: random.Random) -> None:
    """Broken messages at every subject, and into the streams of frames that are open just then."""
    names, mutator = Names(), Mutator(random_)
    subjects = dict(_subjects(names))
    fixed, loop = sorted(subjects), asyncio.get_running_loop()
    async with operator_bus(reach_of(data, os.environ)) as bus:
        frames = await bus.subscribe(f"{names.region}.frames.>", inbox_max=64)
        live: list[str] = []
        began = loop.time()
        for number in range(count):
            live = [message.subject for message in frames.take_ready(8)] or live
            subject = random_.choice(live) if live and random_.random() < 0.01 else random_.choice(fixed)
            reply = "drill.nobody" if random_.random() < 0.5 else ""
            try:
                await bus.publish(subject, mutator.make(subjects.get(subject, "Frame")), reply=reply)
            except BusError:
                await asyncio.sleep(0.05)
            if (ahead := began + number / PER_S - loop.time()) > 0.01:
                await asyncio.sleep(ahead)


def malformed(system: System, *, count: int = 20_000, streams: int = 6) -> Report:
    report = Report("malformed_messages")
    all_ready(system)
    pids = {service["name"]: service["pid"] for service in system.ready["services"]}
    faults = len(tracebacks(system.data))
    before = {kind: _undecodable(system, kind) for kind in KINDS}
    with Load(system, streams=streams, tokens=(30, 60), seed=37) as load:
        load.until(lambda: load.writing > 0, "the replies are being written")
        asyncio.run(_throw(system.data, count, random.Random(41)))
        load.pass_time(1.0)
    after = {service["name"]: service["pid"] for service in system.ready["services"]}
    died = sorted(name for name, pid in pids.items() if after.get(name) != pid)
    report.figures |= {"messages": count, "died": died}
    report.figures["dropped"] = {kind: _undecodable(system, kind) - before[kind] for kind in KINDS}
    report.must(not died, f"processes died of a message: {died}")
    found = tracebacks(system.data)[faults:]
    report.must(not found, f"{len(found)} faults in the logs: {found[:3]}")
    report.must(sum(report.figures["dropped"].values()) > 0, "nothing was counted")
    report.stories(load.stories)
    all_ready(system)
    lanes_empty(system, 20.0)
    blocks_are_back(system)
    return report


_COUNTED = {  # where a message that makes no sense is counted, if not as undecodable
    "conversation": ("chorus_refusals_total", "chorus_archive_poison_total"),
    "usage": ("chorus_usage_records_total",),
}


def _undecodable(system: System, kind: str) -> float:
    names = _COUNTED.get(kind, (f"chorus_{kind}_undecodable_total",))
    return sum(total(system, kind, name) for name in names)


def last_fault(data: Path) -> str:
    """The newest traceback of any service, for a person."""
    texts = [log.read_text(errors="replace") for log in (data / "logs").glob("*.log")]
    found = [match for text in texts for match in re.findall(r"Traceback \(most recent.*?\n(?=\{|\Z)", text, re.DOTALL)]
    return found[-1] if found else ""
