"""An embedded PostgreSQL: its cluster is made once, whole or not at all; it listens on loopback only, by password.

The database's superuser can log in from nowhere. `chorus` owns its databases and is no superuser.
"""

import asyncio
import os
import shutil
import signal
import struct
from contextlib import suppress
from pathlib import Path

from ops.credentials import Credentials
from ops.files import LOOPBACK
from ops.identity import Identity, unprivileged
from ops.processes import Child, Command, describe_exit
from ops.servers.probes import conversing
from ops.servers.wheels import postgres_programs
from shared.errors import ConfigError

USER = "chorus"
DATABASE = "chorus"
_SUPERUSER = "postgres"
_INIT_S = 120.0  # making the cluster on a slow disk
_ORPHANS_S = 10.0  # the workers of a killed server notice its death at their next wait
_POLL_S = 0.02
_PROTOCOL_3 = 196608
_ACCESS = f"""\
# Passwords only, from this machine only; the superuser from nowhere.
host all {USER} {LOOPBACK}/32 scram-sha-256
"""


class PostgresServer:
    """`durable=False` is for tests: what was committed survives a kill of the server, not one of the machine."""

    name = "postgres"
    start_s = 60.0  # recovery after a kill reads the log again
    stop_s = 15.0

    def __init__(self, folder: Path, log: Path, port: int, credentials: Credentials, *, durable: bool = True) -> None:
        self._folder, self._log, self._port = folder.absolute(), log, port
        self._password, self._durable = credentials.postgres, durable

    @property
    def url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgresql://{USER}:{self._password}@{LOOPBACK}:{self._port}/{database}"

    @property
    def _cluster(self) -> Path:
        return self._folder / "cluster"

    def _identity(self) -> Identity | None:
        return unprivileged((postgres_programs(), self._folder), owner_of=self._cluster)

    async def prepare(self) -> None:
        """Make the cluster beside its place and move it there when it is complete.

        One that is there is left alone until the workers of a killed server are out of it; those that stay are
        PostgreSQL's own to name: it refuses to start then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._cluster.exists():
            with suppress(TimeoutError):
                async with asyncio.timeout(_ORPHANS_S):
                    while _is_attached(self._cluster / "postmaster.pid"):  # noqa: ASYNC110 - nothing else tells
                        await asyncio.sleep(_POLL_S)
            return
        identity = self._identity()
        unfinished = self._folder / "cluster.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if identity is not None:
            os.chown(unfinished, identity.uid, identity.gid)
        await self._run_tool(
            "initdb",
            f"--pgdata={unfinished}",
            f"--username={_SUPERUSER}",
            "--encoding=UTF8",
            "--locale=C",  # no locale of the machine is needed; text is compared by code point
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--auth=reject",
            *(() if self._durable else ("--no-sync",)),
            identity=identity,
        )
        await self._run_tool(
            "postgres",
            "--single",
            "-D",
            str(unfinished),
            _SUPERUSER,
            identity=identity,
            stdin=(
                f"CREATE ROLE {USER} LOGIN CREATEDB PASSWORD '{self._password}'\n"
                f"CREATE DATABASE {DATABASE} OWNER {USER}\n"
            ).encode(),
        )
        (unfinished / "pg_hba.conf").write_text(_ACCESS)
        unfinished.rename(self._cluster)

    async def _run_tool(self, tool: str, *args: str, identity: Identity | None, stdin: bytes | None = None) -> None:
        command = Command(
            name=tool,
            argv=(str(postgres_programs() / tool), *args),
            log=self._log,
            env=_ENVIRONMENT,
            cwd=Path("/"),
            run_as=identity,
            stdin=stdin,
        )
        child = Child(command)
        try:
            status = await asyncio.wait_for(child.exited(), _INIT_S)
        finally:
            child.kill_group()
        if status != 0:
            raise ConfigError(f"PostgreSQL's {tool} failed ({describe_exit(status)}):\n{child.tail()}")

    def command(self) -> Command:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self._port),
            "unix_socket_directories": "",  # a long data path would not fit into a socket's name
            "max_connections": "100",
            "max_parallel_workers_per_gather": "0",  # small queries; and a container's /dev/shm may be tiny
            "logging_collector": "off",
            **({} if self._durable else {"fsync": "off", "full_page_writes": "off"}),
        }
        return Command(
            name=self.name,
            argv=(
                str(postgres_programs() / "postgres"),
                "-D",
                str(self._cluster),
                *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
            ),
            log=self._log,
            env=_ENVIRONMENT,
            cwd=Path("/"),
            run_as=self._identity(),
            stop_signal=signal.SIGINT,  # "fast": clients are disconnected, not waited for
            death_signal=signal.SIGINT,
        )

    async def probe(self) -> str | None:
        return await conversing(LOOPBACK, self._port, self._ask)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Begin a session: it asks for a password when it takes connections, and says an error when not."""
        wish = b"".join(word.encode() + b"\0" for word in ("user", USER, "database", DATABASE)) + b"\0"
        writer.write(struct.pack("!ii", len(wish) + 8, _PROTOCOL_3) + wish)
        kind, length = struct.unpack("!ci", await reader.readexactly(5))
        if kind == b"R":
            return None
        fields = (await reader.readexactly(length - 4)).split(b"\0")
        return next(
            (field[1:].decode(errors="replace") for field in fields if field[:1] == b"M"), "it refuses sessions"
        )


_ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PGTZ": "UTC"}


def _is_attached(lock: Path) -> bool:
    """Whether a process still holds the shared memory that a server named in its lock file.

    A killed server's workers lead sessions of their own, so no kill of its group reaches them. Linux tells who is
    attached; where that cannot be read the answer is no, and the next start finds out.
    """
    try:
        named = lock.read_bytes().splitlines()[6].split()[1].decode(errors="replace")  # its seventh line: "key id"
        segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    except (OSError, IndexError):
        return False
    if not segments or segments[0][:2] != ["key", "shmid"]:
        return False
    attached = segments[0].index("nattch")  # the id alone tells: of the key's sign the two have different opinions
    return any(segment[1] == named and segment[attached] != "0" for segment in segments[1:])
