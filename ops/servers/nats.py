"""An embedded nats-server: JetStream on file, one user per service with its own inbox and subjects."""

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path

from ops.credentials import Credentials
from ops.files import LOOPBACK, write_private
from ops.permissions import OPERATOR, inbox_prefix, permissions
from ops.processes import Command
from ops.servers.probes import conversing
from ops.servers.wheels import nats_program
from shared.subjects import Names

# Streams reserve their bound when they are declared. What the disk really lacks shows as a failed write, so the
# reservation is not also a guess about the disk.
_STORE_BYTES = 64 * 1024**3
_MEMORY_BYTES = 256 * 1024**2


def settings(
    names: Names, shards: int, passwords: Mapping[str, str], *, host: str, port: int, store: Path
) -> dict[str, object]:
    """What a server reads, as JSON: the permission table, a password per user, JetStream on file."""
    users = [
        {
            "user": user,
            "password": passwords[user],
            "permissions": {
                "publish": {"allow": list(allowed.publish)},
                "subscribe": {"allow": list(allowed.subscribe)},
                **({"allow_responses": True} if allowed.responds else {}),
            },
        }
        for user, allowed in permissions(names, shards).items()
    ]
    return {
        "server_name": f"chorus-{names.region}",
        "host": host,
        "port": port,
        "jetstream": {
            "store_dir": str(store),
            "max_file_store": _STORE_BYTES,
            "max_memory_store": _MEMORY_BYTES,
        },
        "authorization": {"users": users},
        # Whoever does not answer leaves his queue groups after 15 s; the server's own 2 minutes would lose every
        # other request to one of two that sleep or cannot be reached.
        "ping_interval": "5s",
        "ping_max": 2,
    }


class NatsServer:
    name = "nats"
    start_s = 30.0  # a store of gigabytes is read again after a kill
    stop_s = 10.0

    def __init__(
        self, folder: Path, log: Path, port: int, credentials: Credentials, *, names: Names, shards: int
    ) -> None:
        self._folder, self._log, self._port = folder, log, port
        self._credentials, self._names, self._shards = credentials, names, shards

    @property
    def url(self) -> str:
        """The address alone; users and passwords are in the credentials."""
        return f"nats://{LOOPBACK}:{self._port}"

    def url_of(self, user: str) -> str:
        """The address with a user's password in it: for files that only the owner reads."""
        return f"nats://{user}:{self._credentials.nats[user]}@{LOOPBACK}:{self._port}"

    @property
    def _config(self) -> Path:
        return self._folder / "nats.conf"

    async def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_private(self._config, json.dumps(self._settings(), indent=1).encode())

    def _settings(self) -> dict[str, object]:
        return settings(
            self._names,
            self._shards,
            self._credentials.nats,
            host=LOOPBACK,
            port=self._port,
            store=self._folder.resolve(),
        )

    def command(self) -> Command:
        return Command(
            name=self.name,
            argv=(str(nats_program()), "-c", str(self._config)),
            log=self._log,
            env={},
            stop_signal=signal.SIGTERM,
            death_signal=signal.SIGTERM,
        )

    async def probe(self) -> str | None:
        return await conversing(LOOPBACK, self._port, self._ask)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Log in as the operator and ask for the account's JetStream state."""
        inbox = f"{inbox_prefix(OPERATOR)}.ready"
        login = {"user": OPERATOR, "pass": self._credentials.nats[OPERATOR], "verbose": False, "pedantic": False}
        await reader.readline()  # the server introduces itself
        writer.write(
            b"CONNECT " + json.dumps(login).encode() + b"\r\n"
            b"SUB " + inbox.encode() + b" 1\r\n"
            b"PUB $JS.API.INFO " + inbox.encode() + b" 0\r\n\r\n"
        )
        while line := await reader.readline():
            if line.startswith(b"-ERR"):
                return line.decode(errors="replace").strip()
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            if line.startswith(b"MSG"):
                answer = json.loads(await reader.readline())
                return str(answer["error"]) if "error" in answer else None
        return "it hung up"
