"""All of Chorus as a user starts it, for benches that look at it from outside."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
READY_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_port_pair() -> int:
    """A port that is free together with the next one (the two gateways').

    Below the ports that the system hands out by itself: one of those may be taken by any connection in the moment
    between our look and the gateway's listening.
    """
    for _ in range(200):
        port = random.SystemRandom().randrange(12_000, 30_000, 2)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise RuntimeError("no two neighbouring free ports")


@contextlib.contextmanager
def region(data: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """`chorus up` with these flags; yields its ready.json. What it says goes to up.log beside `data`."""
    said = data.parent / "up.log"
    command = [sys.executable, "-m", "ops.main", "up", *flags, "--port", str(free_port_pair()), "--data", str(data)]
    with said.open("ab") as log:
        started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until = time.monotonic() + READY_S
        while not (data / "ready.json").exists():
            if started.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"`chorus up {' '.join(flags)}` did not come up; see {said}")
            time.sleep(0.1)
        yield json.loads((data / "ready.json").read_text())
    finally:
        started.terminate()
        started.wait(60)
