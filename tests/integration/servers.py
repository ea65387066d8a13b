"""Real servers for tests: fresh, on free ports, in a temporary folder, ended with the test run.

Every test folder has them as fixtures, through `tests/conftest.py`:

    nats_server       one NATS for the whole run:  .url, .user("router") -> (name, password), .names, .credentials
    fresh_nats        the same for one test alone (starting one takes 30 ms): for kills, or for its own streams
    postgres_server   one PostgreSQL for the whole run: .url (give each test its own: postgres_url)
    postgres_url      the URL of an empty database, dropped after the test
    valkey_server     one Valkey for the whole run: .url
    valkey_url        its URL, emptied before the test

A running server takes `await server.kill()` (SIGKILL) and `await server.start()` (same port, same data).
Streams of a shared NATS survive a test: use `fresh_nats`, or names of your own as the user "ops".
"""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
import redis

from ops.credentials import load_credentials
from ops.files import free_port
from ops.permissions import USERS
from ops.processes import Child
from ops.servers import Unit
from ops.servers.nats import NatsServer
from ops.servers.postgres import PostgresServer
from ops.servers.valkey import ValkeyServer
from shared.limits import LOG_SHARDS
from shared.subjects import Names

_PROBE_EVERY_S = 0.02


class Running:
    """A started server; its process can be killed and started again."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.child: Child | None = None

    async def start(self) -> None:
        """Start and wait until it answers; raises with its last log lines when it does not."""
        await self.unit.prepare()
        self.child = Child(self.unit.command())
        missing: str | None = "not asked"
        try:
            async with asyncio.timeout(self.unit.start_s):
                while (missing := await self.unit.probe()) is not None and self.child.status is None:
                    await asyncio.sleep(_PROBE_EVERY_S)
        except TimeoutError:
            pass
        if missing is not None:
            self.child.kill_group()
            raise RuntimeError(f"{self.unit.name} did not come up: {missing}\n{self.child.tail()}")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.child is not None
        self.child.signal(signal.SIGKILL)
        await self.child.exited()
        self.child.kill_group()

    async def stop(self) -> None:
        if self.child is not None:
            await self.child.stop(self.unit.stop_s)


class RunningNats(Running):
    def __init__(self, folder: Path, *, region: str = "local", shards: int = LOG_SHARDS) -> None:
        self.names, self.shards = Names(region), shards
        self.credentials = load_credentials(folder / "credentials.json", USERS)
        self.server = NatsServer(
            folder / "nats", folder / "nats.log", free_port(), self.credentials, names=self.names, shards=shards
        )
        super().__init__(self.server)
        self.url = self.server.url

    def user(self, name: str = "ops") -> tuple[str, str]:
        """A user and its password: "ops" may do anything, a service only what `ops.permissions` says."""
        return name, self.credentials.nats[name]

    def url_of(self, name: str = "ops") -> str:
        return self.server.url_of(name)


class RunningPostgres(Running):
    def __init__(self, folder: Path) -> None:
        self.server = PostgresServer(
            folder / "postgres",
            folder / "postgres.log",
            free_port(),
            load_credentials(folder / "credentials.json", USERS),
            durable=False,
        )
        super().__init__(self.server)
        self.url = self.server.url

    def url_of(self, database: str) -> str:
        return self.server.url_of(database)


class RunningValkey(Running):
    def __init__(self, folder: Path) -> None:
        credentials = load_credentials(folder / "credentials.json", USERS)
        self.server = ValkeyServer(folder / "valkey", folder / "valkey.log", free_port(), credentials)
        super().__init__(self.server)
        self.url = self.server.url


def held(running: Running) -> Iterator[None]:
    """Start it, and stop it afterwards, on a loop of its own (the tests' loop is not running here)."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        try:
            runner.run(running.start())
            yield
        finally:
            runner.run(running.stop())


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNats]:
    running = RunningNats(tmp_path_factory.mktemp("nats"))
    for _ in held(running):
        yield running


@pytest.fixture
def fresh_nats(tmp_path: Path) -> Iterator[RunningNats]:
    running = RunningNats(tmp_path)
    for _ in held(running):
        yield running


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPostgres]:
    running = RunningPostgres(tmp_path_factory.mktemp("postgres"))
    for _ in held(running):
        yield running


_databases = itertools.count(1)


@pytest.fixture
def postgres_url(postgres_server: RunningPostgres) -> Iterator[str]:
    """An empty database; whoever still holds a connection to it at the end is disconnected."""
    name = f"test_{next(_databases)}"

    async def execute(statement: str) -> None:
        connection = await asyncpg.connect(postgres_server.url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(execute(f"CREATE DATABASE {name}"))
        try:
            yield postgres_server.url_of(name)
        finally:
            runner.run(execute(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningValkey]:
    running = RunningValkey(tmp_path_factory.mktemp("valkey"))
    for _ in held(running):
        yield running


@pytest.fixture
def valkey_url(valkey_server: RunningValkey) -> str:
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
    return valkey_server.url
