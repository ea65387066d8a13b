"""The whole of Chorus as a user starts it (`chorus up`), for tests that look at it only from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from bench.region import free_port_pair

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
STOP_S = 60.0


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = 15.0) -> Any:
    """The first true value of `condition`, or an AssertionError that names what did not come."""
    until = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(0.02)


@dataclass
class System:
    """A running `chorus up`. `ready` is re-read, because pids change when the supervisor restarts something."""

    data: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> dict[str, Any]:
        return json.loads((self.data / "ready.json").read_text())

    @property
    def gateways(self) -> list[str]:
        return self.ready["gateways"]

    def key(self, tier: str = "paid") -> str:
        return self.ready["keys"][tier]

    def pid(self, name: str) -> int:
        """The process of a service or an embedded server, as the supervisor notes it; 0 while there is none."""
        processes = json.loads((self.data / "processes.json").read_text())
        return next((one["pid"] for one in processes if one["name"] == name), 0)

    def kill(self, name: str, sign: int = signal.SIGKILL) -> int:
        pid = self.pid(name)
        assert pid, f"{name} is not there to be killed"  # 0 would be all of us
        os.kill(pid, sign)
        return pid

    def metrics(self, name: str) -> dict[str, float]:
        """Every sample of a service's metrics page, by its whole name with labels."""
        url = next(service["http"] for service in self.ready["services"] if service["name"] == name)
        page = httpx.get(f"{url}/metrics", timeout=5, verify=False).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def restarted(self, name: str, old_pid: int, deadline_s: float = 30.0) -> None:
        """Wait until the supervisor has another process under this name, and it is ready."""

        def again() -> bool:
            with contextlib.suppress(OSError, ValueError, StopIteration, httpx.HTTPError):
                entry = next(service for service in self.ready["services"] if service["name"] == name)
                return (
                    entry["pid"] != old_pid
                    and httpx.get(f"{entry['http']}/readyz", timeout=1, verify=False).status_code == 200
                )
            return False

        eventually(again, f"{name} is back", deadline_s)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One `chorus ...` of an operator against the running system."""
        line = [sys.executable, "-m", "ops.main", *arguments, "--data", str(self.data)]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def running(data: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[System]:
    """`chorus up` with a data folder of its own, on free ports, until the block ends."""
    data.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ops.main", "up", "--port", str(free_port_pair()), "--data", str(data), *flags]
    with (data / "up.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    system = System(data, process)
    try:

        def answers() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"`chorus up` ended with {process.returncode}:\n{(data / 'up.log').read_text()}")
            return (data / "ready.json").exists()

        eventually(answers, f"`chorus up` is ready; see {data / 'up.log'}", START_S)
        yield system
    finally:
        if process.poll() is None:
            system.stop()
