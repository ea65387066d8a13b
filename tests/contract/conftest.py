"""Two worlds for one behaviour suite: a real nats-server on a free port, and the in-memory twin."""

import asyncio
import itertools
import json
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from shared.bus import Bus
from shared.bus.memory import MemoryServer
from shared.bus.nats import connect
from shared.subjects import Names

START_S = 10.0


class NatsServer:
    """A nats-server process with file storage in a folder; restartable on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.config = folder / "nats.conf"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.config.write_text(
            f"""
            listen: "127.0.0.1:{self.port}"
            jetstream {{ store_dir: "{self.folder}/data", max_file_store: 64GB, max_memory_store: 4GB }}
            no_auth_user: anyone
            accounts {{ $SYS {{}}
              A {{ jetstream: enabled
                   users: [
                     {{user: anyone, password: any}}
                     {{user: known, password: right-one}}
                     {{user: narrow, password: pw, permissions: {{
                       publish: ["allowed.>", "_INBOX_narrow.>"], subscribe: ["allowed.>", "_INBOX_narrow.>"] }} }}
                   ] }} }}
            """
        )
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        self.process = subprocess.Popen(
            [binary, "-c", self.config, "--ports_file_dir", self.folder, "-l", self.folder / "nats.log"]
        )
        ports = self.folder / f"nats-server_{self.process.pid}.ports"
        deadline = time.monotonic() + START_S
        while not ports.exists() or not ports.read_text().strip():
            assert self.process.poll() is None, (self.folder / "nats.log").read_text()
            assert time.monotonic() < deadline, "nats-server did not come up"
            time.sleep(0.005)
        self.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(START_S)


class World:
    """A server, its clients, and names of its own, so that tests do not meet in a stream."""

    kind: str

    def __init__(self, region: str) -> None:
        self.region = region
        self.names = Names(region)
        self._buses: list[Bus] = []

    async def bus(self) -> Bus:
        made = await self._connect()
        self._buses.append(made)
        return made

    async def _connect(self) -> Bus:
        raise NotImplementedError

    def down(self) -> None:
        """Kill the server."""
        raise NotImplementedError

    def up(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


class NatsWorld(World):
    kind = "nats"

    def __init__(self, region: str, server: NatsServer) -> None:
        super().__init__(region)
        self.server = server

    async def _connect(self) -> Bus:
        return await connect(self.server.url, name=self.region, inbox_prefix=f"_INBOX_{self.region}")

    def down(self) -> None:
        self.server.kill()

    def up(self) -> None:
        self.server.start()


class MemoryWorld(World):
    kind = "memory"

    def __init__(self, region: str) -> None:
        super().__init__(region)
        self.server = MemoryServer()

    async def _connect(self) -> Bus:
        return self.server.bus()

    def down(self) -> None:
        self.server.stop()

    def up(self) -> None:
        self.server.start()


_regions = itertools.count(1)


@pytest.fixture(scope="session")
def own_nats(tmp_path_factory):
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(params=["memory", "nats"])
async def world(request):
    region = f"t{next(_regions)}"
    made = MemoryWorld(region) if request.param == "memory" else NatsWorld(region, request.getfixturevalue("own_nats"))
    yield made
    await made.close()


@pytest_asyncio.fixture
async def nats_world(own_nats):
    made = NatsWorld(f"t{next(_regions)}", own_nats)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def memory_world():
    made = MemoryWorld(f"t{next(_regions)}")
    yield made
    await made.close()


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
