"""Every drill by name, in the order they are held: its full form, and the short one that the tests run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.drill.replica_kill import replica_kill
from tests.drill.report import Report
from tests.drill.rolling import rolling_restart
from tests.drill.stopping import stopping
from tests.integration.system import System


@dataclass(frozen=True)
class Drill:
    """`short` are the arguments of the shortened form; without any it runs as it is."""

    name: str
    run: Callable[..., Report]
    short: Mapping[str, Any] = field(default_factory=dict)
    real_model: bool = False

    def hold(self, system: System, *, short: bool) -> Report:
        report = self.run(system, **(self.short if short else {}))
        report.name = self.name
        return report


_ALL = (
    Drill("stop", stopping, {"count": 40}),
    Drill("replica_sigkill", replica_kill, {"streams": 32, "kills": 2, "replies_min": 0}),
    Drill("rolling_restart", rolling_restart, {"streams": 16, "kinds": ("conversation", "router-1", "gateway-1")}),
)
DRILLS: Mapping[str, Drill] = {drill.name: drill for drill in _ALL}
