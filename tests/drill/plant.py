"""The Chorus that drills are held on: two of each service, scripted replicas with room for one another's replies."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.drill.cuttable_bus import Cut, CuttableBus
from tests.drill.load import Clients
from tests.integration.servers import RunningNats, held
from tests.integration.system import System, running

TPS = 10.0  # of each reply
ROOM = 160  # sequences a replica may run: when one dies, the others take its replies at once


@contextlib.contextmanager
def stub_plant(
    data: Path, *, tps: float = TPS, replicas: int = 2, instances: int = 2, nats_url: str = ""
) -> Iterator[System]:
    flags = ["--stub", "--stub-tps", f"{tps:g}", "--replicas", str(replicas), "--instances", str(instances)]
    environment = {"CHORUS_RUNNING_MAX": str(ROOM)} | ({"CHORUS_NATS_URL": nats_url} if nats_url else {})
    with running(data, *flags, environment=environment) as system:
        yield system


@contextlib.contextmanager
def model_plant(data: Path, *, replicas: int = 2) -> Iterator[System]:
    with running(data, "--replicas", str(replicas)) as system:
        yield system


@dataclass
class CuttablePlant:
    """A system that reaches its bus by a way that can be cut."""

    system: System
    _bus: CuttableBus
    _loop: Clients

    @contextlib.contextmanager
    def cut_off(self, name: str, kind: Cut) -> Iterator[int]:
        """For as long as the block lasts. How many connections were cut."""
        cut = self._loop.do(self._bus.cut(name, kind), 5.0)
        try:
            yield cut
        finally:
            self._loop.do(self._bus.heal(name), 5.0)


@contextlib.contextmanager
def cuttable_plant(data: Path) -> Iterator[CuttablePlant]:
    (data / "bus").mkdir(parents=True, exist_ok=True)
    nats = RunningNats(data / "bus")
    with contextlib.contextmanager(held)(nats), Clients() as loop:
        far = urlsplit(nats.url_of())
        assert far.hostname is not None
        assert far.port is not None
        bus = CuttableBus(far.hostname, far.port)
        login, _, _ = far.netloc.rpartition("@")
        near = f"nats://{login}@{far.hostname}:{loop.do(bus.start(), 5.0)}"
        try:
            with stub_plant(data / "chorus", nats_url=near) as system:
                yield CuttablePlant(system, bus, loop)
        finally:
            loop.do(bus.stop(), 5.0)
