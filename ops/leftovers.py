"""Processes a killed `chorus up` may have left behind: the kernel signals them, but they may need a moment to end.

Each is known by its pid and the moment it started, so that a pid which now is somebody else's is left alone.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from ops.files import write_private
from shared.errors import ConfigError

LEAVE_S = 10.0  # they were asked already; then they are killed
_KILLED_S = 5.0
_POLL_S = 0.05


class Remembered(msgspec.Struct, frozen=True):
    name: str
    pid: int
    born: str


def born(pid: int) -> str | None:
    """What tells this process from any other with its pid, in this boot or another; None when it is not there."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"


def remember(path: Path, processes: Iterable[tuple[str, int]]) -> None:
    """Write down what runs now."""
    known = [Remembered(name, pid, started) for name, pid in processes if (started := born(pid)) is not None]
    write_private(path, msgspec.json.encode(known))


def end_leftovers(path: Path, leave_s: float = LEAVE_S) -> list[str]:
    """Wait for what still runs from an earlier start, kill what does not leave; returns its names."""
    if not path.exists():
        return []
    with suppress(msgspec.DecodeError):  # half a file of an older kind tells nothing
        known = msgspec.json.decode(path.read_bytes(), type=list[Remembered])
        alive = [process for process in known if born(process.pid) == process.born]
        late = _wait(alive, leave_s)
        for process in late:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if stuck := _wait(late, _KILLED_S):
            names = ", ".join(f"{process.name} (pid {process.pid})" for process in stuck)
            raise ConfigError(f"{names} of an earlier start cannot be ended: end it, then start again")
        path.unlink()
        return [process.name for process in alive]
    return []


def _wait(processes: list[Remembered], most_s: float) -> list[Remembered]:
    """Those still there after at most `most_s` seconds."""
    until = time.monotonic() + most_s
    while alive := [process for process in processes if born(process.pid) == process.born]:
        if time.monotonic() >= until:
            return alive
        time.sleep(_POLL_S)
    return []
