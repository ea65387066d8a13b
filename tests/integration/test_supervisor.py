"""The supervisor, with small shell scripts in place of servers."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ops import supervisor
from ops.processes import Command
from ops.restarts import EXIT_CONFIG, FIRST_TRIES
from ops.supervisor import StartError, Supervisor
from tests.integration.process_table import alive, group_members

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0
PATIENT = 'trap "echo $NAME >> $ORDER; exit 0" TERM; touch $READY; while :; do sleep 0.02; done'
STUBBORN = 'trap "" TERM; touch $READY; while :; do sleep 0.02; done'


class Script:
    """A unit that runs a shell script; it is ready once the script has made its file $READY."""

    def __init__(self, name: str, folder: Path, script: str, *, start_s: float = 10.0, stop_s: float = 5.0) -> None:
        self.name, self.start_s, self.stop_s = name, start_s, stop_s
        self._folder, self._script = folder, script
        self._file = folder / f"{name}.ready"

    async def prepare(self) -> None:
        self._file.unlink(missing_ok=True)

    def command(self) -> Command:
        environment = {
            **os.environ,
            "READY": str(self._file),
            "NAME": self.name,
            "ORDER": str(self._folder / "order"),
            "FOLDER": str(self._folder),
        }
        return Command(
            name=self.name, argv=("/bin/sh", "-c", self._script), log=self._folder / f"{self.name}.log", env=environment
        )

    async def probe(self) -> str | None:
        return None if self._file.exists() else "no file yet"


async def until(condition, what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


class Stage:
    """A supervisor inside its group, with what it said."""

    def __init__(self, supervisor: Supervisor, said: list[str]) -> None:
        self.supervisor, self.said = supervisor, said
        self.now = asyncio.Event()

    def pid(self, name: str) -> int | None:
        return next(kept.pid for kept in self.supervisor.kept if kept.unit.name == name)


@asynccontextmanager
async def supervised() -> AsyncIterator[Stage]:
    said: list[str] = []
    stage: Stage | None = None
    try:
        async with asyncio.TaskGroup() as group:
            stage = Stage(Supervisor(group, said.append, lambda: None), said)
            yield stage
            stage.supervisor.leave()
    finally:
        assert stage is not None
        await stage.supervisor.stop(stage.now)
        await until(lambda: not any(group_members(pid) for pid in pids_of(stage)), "nothing is left running")


def pids_of(stage: Stage) -> list[int]:
    return [kept.child.pid for kept in stage.supervisor.kept if kept.child is not None]


async def test_what_dies_is_started_again_and_said(tmp_path: Path):
    """A unit that was ready and is killed comes back as another process, and the death is reported."""
    async with supervised() as stage:
        stage.supervisor.launch([Script("a", tmp_path, PATIENT)])
        await stage.supervisor.all_ready()
        first = stage.pid("a")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: stage.pid("a") not in (first, None), "another process runs")
        await stage.supervisor.all_ready()
        assert any("a died (killed by SIGKILL)" in line for line in stage.said)


async def test_stages_stop_in_reverse_order(tmp_path: Path):
    """What was launched last leaves first."""
    async with supervised() as stage:
        for name in ("first", "second", "third"):
            stage.supervisor.launch([Script(name, tmp_path, PATIENT)])
        await stage.supervisor.all_ready()
    assert (tmp_path / "order").read_text().split() == ["third", "second", "first"]


async def test_what_does_not_leave_is_killed(tmp_path: Path):
    """A unit that ignores the request to leave is killed past its deadline, with the children it has."""
    async with supervised() as stage:
        stage.supervisor.launch([Script("deaf", tmp_path, f"sleep 1000 & {STUBBORN}", stop_s=0.2)])
        await stage.supervisor.all_ready()
    assert any("deaf did not leave" in line for line in stage.said)


async def test_a_long_stop_says_what_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Who pressed Ctrl-C once learns which unit is not done, how long it may take, and that Ctrl-C ends it."""
    monkeypatch.setattr(supervisor, "SAY_STOP_S", 0.2)
    async with supervised() as stage:
        stage.supervisor.launch([Script("deaf", tmp_path, STUBBORN, stop_s=0.5), Script("quick", tmp_path, PATIENT)])
        await stage.supervisor.all_ready()
    (said,) = (line for line in stage.said if "still has something to finish" in line)
    assert said.startswith("deaf")
    assert "after 0.5 s" in said


async def test_now_means_now(tmp_path: Path):
    """Once `now` is set, deadlines do not matter any more."""
    async with supervised() as stage:
        stage.supervisor.launch([Script("deaf", tmp_path, STUBBORN, stop_s=1000.0)])
        await stage.supervisor.all_ready()
        stage.now.set()


async def test_what_never_comes_up_is_given_up_with_its_last_words(tmp_path: Path):
    """After a few tries the start fails with what the program said last."""
    script = "echo again >> $FOLDER/tries; echo the disk is made of cheese; exit 1"
    with pytest.raises(ExceptionGroup) as caught:
        async with supervised() as stage:
            stage.supervisor.launch([Script("good", tmp_path, PATIENT), Script("bad", tmp_path, script)])
            await stage.supervisor.all_ready()
    (error,) = caught.value.exceptions
    assert isinstance(error, StartError)
    assert "bad did not come up" in str(error)
    assert "made of cheese" in str(error)
    assert len((tmp_path / "tries").read_text().split()) == FIRST_TRIES


async def test_a_program_s_own_sentence_is_passed_on(tmp_path: Path):
    """A program that exits with the status of bad settings is not tried again, and its sentence is the error's."""
    script = f"echo again >> $FOLDER/tries; echo 'cannot start: no cheese here'; exit {EXIT_CONFIG}"
    with pytest.raises(ExceptionGroup) as caught:
        async with supervised() as stage:
            stage.supervisor.launch([Script("bad", tmp_path, script)])
            await stage.supervisor.all_ready()
    assert str(caught.value.exceptions[0]) == "bad did not come up: no cheese here"
    assert len((tmp_path / "tries").read_text().split()) == 1


async def test_a_start_has_a_deadline(tmp_path: Path):
    """A unit that runs and is never ready is ended, and the start fails naming what was missing."""
    with pytest.raises(ExceptionGroup) as caught:
        async with supervised() as stage:
            stage.supervisor.launch([Script("slow", tmp_path, "exec sleep 1000", start_s=0.2)])
            await stage.supervisor.all_ready()
    assert "not ready within 0.2 s (no file yet)" in str(caught.value.exceptions[0])


DRIVER = """
import asyncio, sys
from pathlib import Path
from ops.supervisor import Supervisor
from tests.integration.test_supervisor import PATIENT, Script

async def main():
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, lambda text: None, lambda: None)
        supervisor.launch([Script(name, Path(sys.argv[1]), PATIENT) for name in "ab"])
        await supervisor.all_ready()
        print(*[kept.pid for kept in supervisor.kept], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_children_end_when_their_parent_is_killed(tmp_path: Path):
    """SIGKILL of the supervising process ends every child: the kernel tells them."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, str(tmp_path), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    process.kill()
    await process.wait()
    await until(lambda: not any(alive(pid) for pid in pids), "the children are gone")
