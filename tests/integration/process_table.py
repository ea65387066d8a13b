"""Looking at the machine's processes from outside, for tests that say what is left running. Linux only."""

from pathlib import Path


def _status(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None when there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def alive(pid: int) -> bool:
    return _status(pid) is not None


def group_members(leader: int) -> list[int]:
    """Living processes of the group that `leader` led."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _status(pid)) is not None and int(fields[2]) == leader]
