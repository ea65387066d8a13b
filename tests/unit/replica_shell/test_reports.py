"""What a replica tells the routers: its prefix blocks in numbered changes, its pace, its heartbeat."""

import asyncio
import dataclasses
import random

import msgspec
import pytest

from services.replica.engine_messages import EngineReady, EngineStats
from services.replica.heartbeat import Beat, heartbeat
from services.replica.pace import ChunkPace, goes_by, wakes_at
from services.replica.prefix_report import PrefixReport
from services.replica.settings import ReplicaSettings
from services.replica.writers import Writers
from services.router.fleet_view import FleetView
from shared import clock
from shared.limits import APPENDS_PER_S_MAX, APPENDS_PER_S_MAX_CPU, CHUNK_INTERVAL_S_MAX, CHUNK_INTERVAL_S_MIN
from shared.messages import StepModel
from shared.telemetry import Metrics
from tests.unit.replica_shell.health import health
from tests.unit.replica_shell.test_attempt import attempt


def block(n: int) -> bytes:
    return n.to_bytes(16, "big")


def blocks(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


def test_many_steps_make_one_change():
    """What came and went between two tellings is not told at all."""
    report = PrefixReport("r", "b")
    report.step(blocks(1, 2), b"")
    report.step(blocks(3), blocks(2))
    changed = report.changes()
    assert changed is not None
    assert (changed.number, changed.stored, changed.evicted) == (1, blocks(1, 3), b"")
    assert report.changes() is None
    report.step(blocks(9), b"")
    report.step(b"", blocks(9, 1))
    changed = report.changes()
    assert changed is not None
    assert (changed.number, changed.stored, changed.evicted) == (2, b"", blocks(1))


def test_a_block_evicted_and_stored_in_one_step_is_there():
    """The engine reuses a block and computes the same content again."""
    report = PrefixReport("r", "b")
    report.step(blocks(1), b"")
    report.changes()
    report.step(blocks(1), blocks(1))
    assert report.changes() is None
    assert report.snapshot().stored == blocks(1)


@pytest.mark.parametrize("seed", range(30))
def test_a_router_that_follows_or_asks_knows_what_was_told(seed: int):
    """Changes in order, or a snapshot at any point with the changes after it, give the same set."""
    rng = random.Random(seed)
    report, fleet, held = PrefixReport("r1", "b1"), FleetView(), set()
    fleet.on_health(health(), 0.0)
    fleet.on_blocks_snapshot(report.snapshot())
    for _ in range(60):
        stored, evicted = {rng.randrange(40) for _ in range(3)}, set(rng.sample(sorted(held), min(len(held), 2)))
        held = (held - evicted) | stored
        report.step(blocks(*stored), blocks(*evicted))
        if rng.random() < 0.5 and (changed := report.changes()) is not None and rng.random() < 0.9:
            fleet.on_blocks(changed)  # else it is lost
        if rng.random() < 0.1:
            fleet.on_blocks_snapshot(report.snapshot())
    if (changed := report.changes()) is not None and fleet.on_blocks(changed):
        fleet.on_blocks_snapshot(report.snapshot())
    view = fleet.get("r1")
    assert view is not None
    if view.blocks_number is None:
        fleet.on_blocks_snapshot(report.snapshot())
    if view.blocks_number == report.snapshot().number:
        assert view.prefix == {block(n) for n in held}


def test_the_pace_follows_load_and_latency():
    """Few logs on a fast bus: the shortest interval; many logs or a slow bus: longer, up to the bound."""
    pace = ChunkPace(APPENDS_PER_S_MAX)
    assert pace.interval_s(1) == CHUNK_INTERVAL_S_MIN
    assert pace.interval_s(100) == 100 / APPENDS_PER_S_MAX
    assert pace.interval_s(10_000) == CHUNK_INTERVAL_S_MAX
    for _ in range(100):
        pace.measured(0.02)
    assert CHUNK_INTERVAL_S_MIN < pace.interval_s(1) < CHUNK_INTERVAL_S_MAX


def test_a_cpu_replica_appends_less_often():
    """A GPU, and the stub that stands for one, computes elsewhere than the plane; a processor does both."""
    most = [
        ReplicaSettings(nats_url="nats://x", name="r", model="m", **kind).appends_per_s_max
        for kind in ({"stub": True}, {"device": "cuda"}, {})
    ]
    assert most == [APPENDS_PER_S_MAX, APPENDS_PER_S_MAX, APPENDS_PER_S_MAX_CPU]


def test_what_waits_for_a_step_goes_out_without_one():
    """The next step may bring another token until it is late; the longest interval is never exceeded."""
    assert wakes_at(10.0, 0.02, 0.05) == pytest.approx(10.05)
    assert wakes_at(10.0, 0.1, 0.5) == pytest.approx(10.0 + CHUNK_INTERVAL_S_MAX - 0.1)
    assert wakes_at(10.0, CHUNK_INTERVAL_S_MAX, 0.5) == pytest.approx(10.0)


def test_with_the_first_that_is_due_go_those_that_nearly_are():
    """One that is due takes along who is due within half an interval; what goes at once, and what is early, does not."""
    assert goes_by([10.0, 10.04], 10.0, 0.1) == pytest.approx(10.05)
    for others in ([], [0.0], [10.01, 10.04]):
        assert goes_by(others, 10.0, 0.1) == pytest.approx(10.001)
    assert goes_by([9.0], 10.0, 0.0) == pytest.approx(10.001), "never less than what a timer may be off"


def test_logs_that_began_apart_are_soon_written_together():
    """Whatever the moments of their first tokens: after a few intervals most appends share theirs with others."""
    rng, interval, tick = random.Random(3), 0.1, 0.002
    last = {log: rng.uniform(0.0, interval) for log in range(32)}
    rounds: list[int] = []
    for at in range(500):
        now = interval + at * tick
        dues = {log: appended + interval for log, appended in last.items()}
        going = goes_by(dues.values(), now, interval)
        sent = [log for log, due in dues.items() if due <= going]
        last |= dict.fromkeys(sent, now)
        rounds += [len(sent)] if sent else []
    assert sum(rounds) / len(rounds) > 10
    assert len(rounds) <= 2 * 500 * tick / interval, "and no log is written more often than twice an interval"


def test_a_heartbeat_covers_every_dispatch_it_names():
    """Sequences handed to the engine since its last report are counted on top of its figures."""
    step = StepModel(base_s=0.01, per_token_s=0.001)
    ready = EngineReady(
        model_name="m",
        model_version="v",
        tokenizer_revision="",
        vocab_size=10,
        blocks_total=64,
        context_max=512,
        running_max=4,
        step=step,
        phases_s={},
        step_tokens=80,
        mixed_tokens=48,
    )
    stats = EngineStats(
        blocks_total=64, blocks_free=60, running=1, waiting=1, waiting_tokens={"free": 7, "paid": 2}, step=step
    )
    beat = Beat(
        replica="r",
        boot_id="b",
        model="m",
        http="",
        ready=ready,
        stats=stats,
        unseen=(attempt(written=3),),
        dispatches=9,
        accepting=True,
        step_age_s=0.0,
        step_predicted_s=0.0,
        tokens_per_s=0.0,
    )
    said = heartbeat(beat)
    assert (said.waiting, said.waiting_tokens, said.dispatches) == (2, {"free": 7 + 5 + 3, "paid": 2}, 9)
    assert said.step_tokens == 49, "one that runs and the prompt tokens beside it"
    idle = msgspec.structs.replace(stats, running=0)
    assert heartbeat(dataclasses.replace(beat, stats=idle)).step_tokens == 80
    slow = msgspec.structs.replace(stats, running=5, waiting=0, step=StepModel(base_s=0.01, per_token_s=0.002))
    assert heartbeat(dataclasses.replace(beat, stats=slow)).step_tokens == 5 + 8, "0.02 s for who runs, and 0.9 of it"


class Log:
    """One log as `Writers` sees it: something to append, `interval` after what it appended before."""

    def __init__(self) -> None:
        self.last, self.sent = clock.now_s(), asyncio.Event()

    def due_at(self, interval_s: float) -> float | None:
        return None if self.sent.is_set() else self.last + interval_s

    def next_append(self, now: float) -> None:
        self.sent_s = now
        self.sent.set()


async def test_a_chunk_waits_for_the_next_step_and_goes_without_it():
    """Not when it is due, as a step may bring another token then; a step's length later at last, though nobody pumps."""
    writers = Writers(None, Metrics(), perform=None, spawn=None, writing=lambda: 1, appends_per_s_max=APPENDS_PER_S_MAX)
    alone, stepped = Log(), Log()
    writers.touch(alone)
    writers.pump(0.06)
    async with asyncio.timeout(2):
        await alone.sent.wait()
    assert alone.sent_s - alone.last > CHUNK_INTERVAL_S_MIN + 0.05
    stepped.last = clock.now_s()
    writers.touch(stepped)
    writers.pump(1.0)
    assert not stepped.sent.is_set()
    await asyncio.sleep(CHUNK_INTERVAL_S_MIN + 0.005)
    writers.pump(1.0)
    assert stepped.sent.is_set(), "what waits goes with the next step, touched or not"
    writers.close()
