"""Chorus as `docker compose up` starts it, from a copy of this tree, for tests that look at it only from outside."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.integration.system import ROOT, System, eventually

PROJECT = "chorustest"
BUILD_S = 3600.0
UP_S = 600.0
ONCE = ("setup", "model", "model-stub", "keys")  # steps that end


def compose_program() -> list[str]:
    """`docker compose`, or the older `docker-compose`."""
    new = ["docker", "compose"]
    if subprocess.run([*new, "version"], capture_output=True, check=False).returncode == 0:
        return new
    return ["docker-compose"]


def copy_tree(to: Path, wheels: Path | None) -> None:
    """What git keeps or would keep, as it stands here; wheels where the build looks first."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for wheel in wheels.glob("*.whl") if wheels else ():
        shutil.copy2(wheel, to / "deploy" / "wheels")


@dataclass
class Stack(System):
    """A composed system; `data` is its project folder. Instances are named SERVICE-NUMBER, as in `chorus up`."""

    port: int = 0
    profile: str = "stub"
    process: Any = None  # no process of ours: the engine's
    settings: Mapping[str, str] = field(default_factory=dict)

    # --- the engine ---------------------------------------------------------------------------------------

    def compose(self, *arguments: str, timeout_s: float = UP_S, profiles: str = "") -> str:
        done = self.try_compose(*arguments, timeout_s=timeout_s, profiles=profiles)
        assert done.returncode == 0, f"{' '.join(done.args)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def try_compose(self, *arguments: str, timeout_s: float, profiles: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_PROFILES": profiles or self.profile,
            "CHORUS_PORT": str(self.port),
            **self.settings,
        }
        command = [*compose_program(), "-f", "compose.yaml", "-f", "tests/compose/published.yaml", *arguments]
        return subprocess.run(
            command, cwd=self.data, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def up(self) -> None:
        self.compose("build", timeout_s=BUILD_S)
        self.compose("up", "-d")
        self.until_ready()

    def down(self, *flags: str) -> None:
        """Of every profile: a run that was cut off may have left any."""
        self.compose("down", "--timeout", "30", *flags, profiles="cpu,stub")

    def until_ready(self) -> None:
        def all_there() -> bool:
            names = set(self.containers())
            return {"proxy-1", "gateway-2", "keys-1"} <= names and all(
                self.healthy(name) for name in names if name.rpartition("-")[0] not in ONCE
            )

        eventually(all_there, "every container is healthy", UP_S)
        eventually(lambda: httpx.get(f"{self.proxy}/readyz", timeout=2).status_code == 200, "the proxy answers", 60)

    def containers(self) -> dict[str, str]:
        """Every container of the project, running or not: name -> id."""
        label = "com.docker.compose"
        rows = docker(
            *("ps", "-a", "--no-trunc", "--filter", f"label={label}.project={PROJECT}", "--format"),
            f'{{{{.Label "{label}.service"}}}}-{{{{.Label "{label}.container-number"}}}} {{{{.ID}}}}',
        )
        return dict(line.split() for line in rows.splitlines())

    def inspect(self, name: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(name)))[0]

    def container(self, name: str) -> str:
        """The id; a bare service name means its first."""
        known = self.containers()
        return known.get(name) or known[f"{name}-1"]

    def healthy(self, name: str) -> bool:
        """Running, and healthy where it says how it is."""
        state = self.inspect(name)["State"]
        return bool(state["Running"]) and state.get("Health", {}).get("Status", "healthy") == "healthy"

    def execute(self, name: str, *command: str) -> str:
        return docker("exec", self.container(name), *command)

    def published(self, name: str, port: int) -> str:
        return docker("port", self.container(name), str(port)).split()[0]

    # --- what the tests of the whole path ask for ----------------------------------------------------------

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gateways(self) -> list[str]:
        return [f"http://{self.published(f'gateway-{number}', 8080)}" for number in (1, 2)]

    @property
    def ready(self) -> dict[str, Any]:
        keys = self.compose("logs", "--no-color", "keys")
        shown = [line.split() for line in keys.splitlines() if "sk-chorus-" in line]
        return {
            "gateways": self.gateways,
            "keys": {words[-3]: words[-1] for words in shown},
            "services": [{"name": name} for name in self.containers()],
        }

    def metrics(self, name: str) -> dict[str, float]:
        script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/metrics').read().decode())"
        page = self.execute(name, "python", "-S", "-c", script)
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
        return {sample: float(value) for sample, value in lines}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As README says that an operator does it."""
        return self.try_compose("run", "--rm", "-T", "chorus", *arguments, timeout_s=60)

    def pid(self, name: str) -> int:
        return int(self.inspect(name)["State"]["Pid"])

    def kill(self, name: str, sign: int = signal.SIGKILL) -> int:
        """A crash: the process dies by itself as far as the engine knows, which starts it again."""
        pid = self.pid(name)
        assert pid > 0, f"{name} does not run"  # 0 would be ourselves
        os.kill(pid, sign)
        return pid

    def restarted(self, name: str, old_pid: int, deadline_s: float = 60.0) -> None:
        eventually(lambda: self.pid(name) not in (0, old_pid) and self.healthy(name), f"{name} is back", deadline_s)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout
