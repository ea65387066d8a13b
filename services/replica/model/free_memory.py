"""How much memory a process may still take: the machine's, or what its container is allowed if that is less."""

from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """None where the system does not say. What caches hold and would give back counts as free."""
    found = [free for free in (_machine(), _container()) if free is not None]
    return min(found, default=None)


def _machine() -> int | None:
    for line in _words(MEMINFO):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container() -> int | None:
    most, used = _words(CGROUP / "memory.max"), _words(CGROUP / "memory.current")
    if not (most and used and most[0].isdigit()):  # "max": no limit
        return None
    held = (line.split() for line in _words(CGROUP / "memory.stat"))
    cached = next((int(words[1]) for words in held if words[0] == "inactive_file"), 0)
    return max(int(most[0]) - int(used[0]) + cached, 0)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
