"""Child processes: whom they run as, what they leave, how their ends are told."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ops.identity import Identity, unprivileged
from ops.processes import LOG_BYTES_MAX, Child, Command, describe_exit

NOBODY = 65534
DEADLINE_S = 20.0
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def script(folder: Path, text: str, **fields) -> Command:
    return Command(name="script", argv=("/bin/sh", "-c", text), log=folder / "script.log", env=os.environ, **fields)


async def words(command: Command) -> tuple[int, str]:
    """Exit status and what the script printed."""
    child = Child(command)
    status = await asyncio.wait_for(child.exited(), DEADLINE_S)
    return status, child.tail()


async def test_an_exit_status_is_told(tmp_path: Path):
    """The status of a script that ends by itself, and the signal of one that was killed."""
    assert await words(script(tmp_path, "echo gone; exit 7")) == (7, "gone")
    status, _ = await words(script(tmp_path, "kill -KILL $$"))
    assert describe_exit(status) == "killed by SIGKILL"


async def test_the_tail_is_of_this_run_alone(tmp_path: Path):
    """An earlier run's lines stay in the log and out of the tail."""
    await words(script(tmp_path, "echo first"))
    assert await words(script(tmp_path, "echo second")) == (0, "second")
    assert (tmp_path / "script.log").read_text() == "first\nsecond\n"


async def test_a_long_log_is_set_aside(tmp_path: Path):
    """A log past its bound moves to .log.1 when its process starts, so that logs do not grow for ever."""
    log = tmp_path / "script.log"
    log.write_bytes(b"x" * (LOG_BYTES_MAX + 1))
    assert await words(script(tmp_path, "echo new")) == (0, "new")
    assert log.read_text() == "new\n"
    assert (tmp_path / "script.log.1").stat().st_size == LOG_BYTES_MAX + 1


async def test_a_program_that_is_not_there_is_an_error_of_the_system(tmp_path: Path):
    """Starting what does not exist raises OSError, in the parent."""
    with pytest.raises(FileNotFoundError):
        Child(Command(name="x", argv=(str(tmp_path / "none"),), log=tmp_path / "x.log", env={}))


async def test_stopping_is_asking_first(tmp_path: Path):
    """The stop signal of the command is sent, and leaving in time is told."""
    ready = tmp_path / "ready"
    child = Child(
        script(tmp_path, f'trap "exit 0" USR1; touch {ready}; while :; do sleep 0.02; done', stop_signal=signal.SIGUSR1)
    )
    async with asyncio.timeout(DEADLINE_S):
        while not ready.exists():
            await asyncio.sleep(0.01)
    assert await child.stop(DEADLINE_S)
    assert child.status == 0


def secret(folder: Path) -> Path:
    """A file that only its owner may read, in a folder that only its owner may enter."""
    locked = folder / "locked"
    locked.mkdir(mode=0o700)
    file = locked / "secret"
    file.write_text("told\n")
    file.chmod(0o600)
    return file


@as_root
async def test_who_dropped_to_another_user_has_his_rights(tmp_path: Path):
    """The child is that user in every respect: root's files are closed to it."""
    text = f"id -u; id -g; id -G; cat {secret(tmp_path)}"
    ours = os.getgroups()
    os.setgroups([*ours, 4])  # one more, to be left behind
    try:
        status, said = await words(script(tmp_path, text, run_as=Identity(NOBODY, NOBODY)))
    finally:
        os.setgroups(ours)
    assert status != 0
    assert said.splitlines()[:3] == [str(NOBODY)] * 3
    assert "told" not in said


@as_root
async def test_permissions_can_be_passed_without_being_root(tmp_path: Path):
    """With one capability kept, root-only places can be reached; the child is still not root, and has no other."""
    text = f"id -u; cat {secret(tmp_path)}; grep CapEff /proc/self/status"
    status, said = await words(script(tmp_path, text, run_as=Identity(NOBODY, NOBODY, pass_permissions=True)))
    assert (status, said.splitlines()) == (0, [str(NOBODY), "told", "CapEff:\t0000000000000002"])


@as_root
def test_the_capability_is_kept_only_where_it_is_needed(tmp_path: Path):
    """Reachable files need none; a folder closed to others does. The owner of what is there already is kept."""
    tmp = Path("/usr/bin")
    assert unprivileged([tmp], owner_of=tmp_path / "none") == Identity(NOBODY, NOBODY)
    assert unprivileged([tmp, secret(tmp_path)], owner_of=tmp_path / "none") == Identity(NOBODY, NOBODY, True)
    os.chown(tmp_path, 1, 1)
    assert unprivileged([tmp], owner_of=tmp_path) == Identity(1, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root drops to another user")
def test_an_ordinary_user_stays_who_he_is(tmp_path: Path):
    """Nobody but root drops anything."""
    assert unprivileged([tmp_path], owner_of=tmp_path) is None
