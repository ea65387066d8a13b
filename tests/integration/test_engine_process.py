"""The engine in its own process, scripted: what the replica's shell relies on."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.replica import engine_process
from services.replica.engine_messages import EngineConfig, EngineStarting, StepReport, SubmitSequence
from services.replica.engine_process import EngineHandle
from services.replica.stub_runner import scripted_token
from shared.errors import ConfigError, EngineError
from shared.messages import Sampling, pack_ids
from shared.tiers import Tier

DEADLINE_S = 20.0


def submit(name: str, length: int = 40, budget: int = 5, seed: int = 3) -> SubmitSequence:
    prompt = pack_ids(33 + at % 90 for at in range(length))
    return SubmitSequence(sequence_id=name, tier=Tier.PAID, prompt=prompt, budget=budget, sampling=Sampling(seed=seed))


@pytest.fixture
async def engine() -> AsyncIterator[EngineHandle]:
    handle = EngineHandle()
    await handle.start(EngineConfig(model_file="stub", running_max=8, waiting_max=8))
    yield handle
    await handle.stop()


async def until(handle: EngineHandle, enough: Callable[[list[StepReport]], bool]) -> list[StepReport]:
    """All reports up to the one that is enough."""
    reports: list[StepReport] = []
    async with asyncio.timeout(DEADLINE_S):
        while not enough(reports):
            reports += await handle.reports(timeout_s=1.0)
    return reports


def tokens_of(reports: list[StepReport], name: str) -> list[int]:
    return [token for report in reports for said in report.tokens if said.sequence_id == name for token in said.ids]


def ended(name: str) -> Callable[[list[StepReport]], bool]:
    return lambda reports: any(said.sequence_id == name and said.finish for report in reports for said in report.tokens)


async def test_a_sequence_comes_back_token_by_token(engine: EngineHandle):
    """Submitted sequences run side by side in the other process; ids, texts and reasons come back in step reports."""
    assert engine.submit(submit("a", budget=30))
    assert engine.submit(submit("b", budget=4, seed=9))
    reports = await until(engine, ended("a"))
    assert tokens_of(reports, "a") == [scripted_token(3, at) for at in range(30)]
    assert tokens_of(reports, "b") == [scripted_token(9, at) for at in range(4)]
    assert [report.number for report in reports] == list(range(1, len(reports) + 1))
    assert engine.stats.blocks_free == engine.ready.blocks_total
    assert engine.unended == 0


async def test_a_cancel_frees_the_blocks_and_is_confirmed():
    """While a paced reply runs, a cancel is answered by the next step, and nothing of the reply comes after that."""
    handle = EngineHandle()
    await handle.start(EngineConfig(model_file="stub", stub_tps=50.0))
    try:
        handle.submit(submit("a", budget=4_000))
        await until(handle, lambda reports: len(tokens_of(reports, "a")) >= 3)
        assert handle.stats.running == 1
        handle.cancel("a")
        reports = await until(handle, lambda reports: any(report.freed for report in reports))
        last = next(place for place, report in enumerate(reports) if report.freed)
        assert tokens_of(reports[last:], "a") == []
        assert last <= 2, "later than the step that was running"
        assert handle.stats.blocks_free == handle.ready.blocks_total
        handle.cancel("a")
        await until(handle, lambda reports: any(report.freed for report in reports))
        assert handle.alive
    finally:
        await handle.stop()


async def test_the_engine_is_ready_only_after_its_phases(tmp_path: Path):
    """Start-up is told phase by phase, and the ready word carries versions, sizes and a step model."""
    heard: list[EngineStarting] = []
    handle = EngineHandle()
    ready = await handle.start(EngineConfig(model_file="stub", context_max=512, blocks=77), on_progress=heard.append)
    await handle.stop()
    assert [one.phase for one in heard if one.share == 1.0] == ["read", "build", "warm_up"]
    assert set(ready.phases_s) == {"read", "build", "warm_up"}
    assert (ready.model_version, ready.blocks_total, ready.context_max) == ("stub-1", 77, 512)
    assert ready.step.base_s > 0


async def test_a_broken_model_file_is_a_configuration_error(tmp_path: Path):
    """The sentence of the reader reaches whoever started the engine, and no process is left."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    handle = EngineHandle()
    with pytest.raises(ConfigError, match=r"broken\.gguf.*GGUF"):
        await handle.start(EngineConfig(model_file=str(path)))
    assert handle.pid is None
    await handle.stop()


async def test_more_than_it_may_hold_is_said_without_asking(engine: EngineHandle):
    """Past its places the handle says no at once, and yes again when some have ended."""
    assert all(engine.submit(submit(f"s{number}", budget=3_000)) for number in range(16))
    assert not engine.submit(submit("one more"))
    for number in range(16):
        engine.cancel(f"s{number}")
    await until(engine, lambda _: engine.unended == 0)
    assert engine.submit(submit("later"))


async def test_an_engine_that_is_held_back_can_be_stopped(monkeypatch: pytest.MonkeyPatch):
    """Reports that nobody takes hold the engine back; told to stop it ends by itself all the same, unkilled."""
    monkeypatch.setattr(engine_process, "ENGINE_REPORTS_MAX", 4)
    handle = EngineHandle()
    await handle.start(EngineConfig(model_file="stub"))
    for number in range(32):
        handle.submit(submit(f"s{number}", budget=4_000))
    steps = -1
    async with asyncio.timeout(DEADLINE_S):
        while handle.stats.steps != steps:  # it goes on until the socket is full
            steps = handle.stats.steps
            await asyncio.sleep(0.2)
    assert 0 < steps < 4_000
    assert handle.pid is not None
    await handle.stop()
    assert handle.exit_status == 0


async def test_a_cancelled_start_leaves_no_process():
    """Ctrl-C while the engine starts: whoever started it leaves, and so does the process."""
    handle = EngineHandle()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await handle.start(EngineConfig(model_file="stub", stub_tps=0.5))
    assert handle.pid is None
    assert not handle.alive


async def test_a_killed_engine_is_noticed(engine: EngineHandle):
    """Whoever waits for reports hears that it is gone, every time; a submit says no; stopping is still fine."""
    engine.submit(submit("a", budget=3_000))
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="exit status -9"):
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await engine.reports(timeout_s=1.0)
    with pytest.raises(EngineError):
        await engine.reports(timeout_s=1.0)
    assert not engine.alive
    assert not engine.submit(submit("b"))
    engine.cancel("a")


async def test_a_stuck_step_shows_without_asking():
    """A step that goes on for far longer than predicted is seen from outside while it runs."""
    handle = EngineHandle()
    await handle.start(EngineConfig(model_file="stub", stub_tps=50.0))
    try:
        handle.submit(submit("a", budget=4_000))
        await until(handle, lambda reports: len(reports) > 2)
        assert not handle.stuck
        pid = handle.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        while handle.step_age_s() == 0.0:  # stopped between two steps: try again
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.005)
            os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: handle.stuck, DEADLINE_S)
        os.kill(pid, signal.SIGCONT)
        await eventually(lambda: not handle.stuck, DEADLINE_S)
    finally:
        await handle.stop()


async def test_the_engine_dies_with_its_parent(tmp_path: Path):
    """A replica that is killed leaves no engine behind, even one in the middle of a step."""
    code = (
        "import asyncio, sys\n"
        "from services.replica.engine_process import EngineHandle\n"
        "from services.replica.engine_messages import EngineConfig\n"
        "from tests.integration.test_engine_process import submit\n"
        "async def main():\n"
        "    engine = EngineHandle()\n"
        "    await engine.start(EngineConfig(model_file='stub', stub_tps=0.01))\n"
        "    engine.submit(submit('a', budget=100))\n"
        "    while not engine.step_age_s():\n"
        "        await asyncio.sleep(0.02)\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdout=asyncio.subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        child = int(await parent.stdout.readline())
    parent.kill()
    try:
        await eventually(lambda: not running(child), DEADLINE_S)
    finally:
        if running(child):
            os.kill(child, signal.SIGKILL)
        await parent.wait()


def running(pid: int) -> bool:
    """A process that is there and no zombie (its new parent may be slow to collect it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def eventually(holds: Callable[[], bool], deadline_s: float) -> None:
    async with asyncio.timeout(deadline_s):
        while not holds():
            await asyncio.sleep(0.02)
