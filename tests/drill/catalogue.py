"""Every drill by name, in the order they are held: its full form, and the short one that the tests run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.drill.before_first_token import before_first_token
from tests.drill.bus_kill import bus_kill
from tests.drill.cut_off import cut_off
from tests.drill.cuttable_bus import Cut
from tests.drill.malformed import malformed
from tests.drill.pairs import pairs
from tests.drill.plant import cuttable_plant, model_plant, stub_plant
from tests.drill.real_model import real_model
from tests.drill.replica_kill import replica_kill
from tests.drill.replica_pause import replica_pause
from tests.drill.report import Report
from tests.drill.rolling import rolling_restart
from tests.drill.stopping import stopping
from tests.drill.stores import postgres_stop, valkey

Plant = Callable[[Path], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Drill:
    """`run` takes what `plant` yields; `short` are the arguments of the shortened form."""

    name: str
    run: Callable[..., Report]
    short: Mapping[str, Any] = field(default_factory=dict)
    plant: Plant = stub_plant

    def hold(self, planted: Any, *, short: bool) -> Report:
        report = self.run(planted, **(self.short if short else {}))
        report.name = self.name
        return report


_ALL = (
    Drill("stop", stopping, {"count": 40}),
    Drill("replica_sigkill", replica_kill, {"streams": 32, "kills": 2, "replies_min": 0}),
    Drill("kill_before_first_token", before_first_token, {"hits": 6, "rounds_max": 30}),
    Drill("replica_sigstop", replica_pause, {"streams": 16, "times": 2, "asleep_s": 2.5}),
    Drill("rolling_restart", rolling_restart, {"streams": 12, "kinds": ("conversation-1", "router-1", "relay-1")}),
    Drill("nats_sigkill", bus_kill, {"streams": 16, "kills": 2}),
    Drill("pairs_sigkill", pairs, {"streams": 12, "most": 2}),
    Drill("postgres_immediate_stop", postgres_stop, {"streams": 12, "times": 2}),
    Drill("valkey_kill_pause_flush", valkey, {"streams": 12, "asleep_s": 2.0}),
    Drill("malformed_messages", malformed, {"count": 3_000}),
    Drill(
        "cut_off",
        cut_off,
        {"streams": 12, "names": ("replica-1", "router-1"), "kinds": (Cut.SILENT,), "times": 1, "away_s": 4.0},
        plant=cuttable_plant,
    ),
    Drill("real_model_sigkill", real_model, {"count": 4, "kills": 1}, plant=model_plant),
)
DRILLS: Mapping[str, Drill] = {drill.name: drill for drill in _ALL}
