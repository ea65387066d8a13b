"""An embedded Valkey: limits, quotas and caches. All of it may be lost, so nothing is written at each change."""

import asyncio
import signal
from pathlib import Path

from ops.credentials import Credentials
from ops.files import LOOPBACK, write_private
from ops.processes import Command
from ops.servers.probes import conversing
from ops.servers.wheels import valkey_program

_MEMORY = "256mb"  # past it the least recently used keys that expire are dropped


class ValkeyServer:
    name = "valkey"
    start_s = 15.0
    stop_s = 5.0

    def __init__(self, folder: Path, log: Path, port: int, credentials: Credentials) -> None:
        self._folder, self._log, self._port, self._password = folder, log, port, credentials.valkey

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    @property
    def _config(self) -> Path:
        return self._folder / "valkey.conf"

    async def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = (
            f"bind {LOOPBACK}",
            f"port {self._port}",
            f"requirepass {self._password}",
            f'dir "{self._folder.resolve()}"',
            "appendonly no",
            'save ""',
            f"maxmemory {_MEMORY}",
            "maxmemory-policy volatile-lru",
            "daemonize no",
        )
        write_private(self._config, "\n".join(lines).encode() + b"\n")

    def command(self) -> Command:
        return Command(
            name=self.name,
            argv=(str(valkey_program()), str(self._config.resolve())),
            log=self._log,
            env={"LC_ALL": "C"},
            cwd=self._folder,
            death_signal=signal.SIGKILL,
        )

    async def probe(self) -> str | None:
        return await conversing(LOOPBACK, self._port, self._ask)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        writer.write(f"AUTH {self._password}\r\nPING\r\n".encode())
        for expected in (b"+OK", b"+PONG"):
            line = await reader.readline()
            if not line.startswith(expected):
                return line.decode(errors="replace").strip() or "it hung up"
        return None
