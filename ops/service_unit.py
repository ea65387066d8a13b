"""One of our services as a unit of the supervisor: `python -m services.<name>`, ready when its `/readyz` says so."""

import sys
from collections.abc import Mapping
from pathlib import Path

import ops
from ops.files import LOOPBACK
from ops.plan import ServicePlan
from ops.processes import Command
from ops.servers.probes import http_ready
from shared.limits import DRAIN_S

_ROOT = Path(ops.__file__).resolve().parents[1]  # services come from where we come from


class ServiceUnit:
    start_s = 120.0  # a cold disk, a loaded laptop, the first compilation of every module
    stop_s = DRAIN_S + 3.0  # what it gives its own work to end, and a moment to leave

    def __init__(self, plan: ServicePlan, logs: Path, env: Mapping[str, str]) -> None:
        self.plan, self.name = plan, plan.name
        self._log, self._env = logs / f"{plan.name}.log", env

    @property
    def http(self) -> str:
        return f"http://{LOOPBACK}:{self.plan.http_port}"

    async def prepare(self) -> None:
        """Nothing to lay out."""

    def command(self) -> Command:
        path = [str(_ROOT), self._env.get("PYTHONPATH", "")]
        threads = self.plan.settings.get("CHORUS_THREADS", "1")
        environment = {
            **self._env,
            "PYTHONPATH": ":".join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            **self.plan.settings,
        }
        return Command(
            name=self.name,
            argv=(sys.executable, "-P", "-m", f"services.{self.plan.service}"),
            log=self._log,
            env=environment,
        )

    async def probe(self) -> str | None:
        return await http_ready(LOOPBACK, self.plan.http_port)
