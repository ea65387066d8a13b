"""One child process: started with its log file, waited for without threads, stopped with a deadline.

Each child leads its own process group, so that a Ctrl-C on the terminal reaches only us, and so that what it
leaves behind can be ended with it. A child is signalled by the kernel when we die, whatever killed us.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ops.identity import Identity, before_exec

LOG_BYTES_MAX = 16 * 1024 * 1024  # a longer log is set aside as <name>.log.1 when its process starts
_TAIL_BYTES = 8192
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run. `stop_signal` asks it to leave; `death_signal` comes from the kernel when we die."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    run_as: Identity | None = None
    stdin: bytes | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL


class Child:
    """A running child. Raises OSError when it cannot be started at all."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._group_ended = False
        self._log_start = _rotate(command.log)
        with command.log.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv,
                env=dict(command.env),
                cwd=command.cwd,
                stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=before_exec(command.run_as, command.death_signal),  # noqa: PLW1509 - we have no threads
            )
        self.pid = self._process.pid
        if command.stdin is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its exit status tells
                self._process.stdin.write(command.stdin)
                self._process.stdin.close()

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    async def exited(self) -> int:
        """Wait for its end; returns the exit status."""
        if self.status is None and hasattr(os, "pidfd_open"):  # Linux
            await _readable(os.pidfd_open(self.pid))
        while (status := self.status) is None:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(_POLL_S)
        return status

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            self._process.send_signal(number)

    def kill_group(self) -> None:
        """End it and whatever it started, now. Once it has ended this works once: its number may be another's later."""
        if self._group_ended:
            return
        self._group_ended = self.status is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, deadline_s: float) -> bool:
        """Ask, wait, then kill; True when it left by itself. Nothing of its group is left afterwards."""
        self.signal(self.command.stop_signal)
        in_time = True
        try:
            await asyncio.wait_for(self.exited(), deadline_s)
        except TimeoutError:
            in_time = False
        finally:
            self.kill_group()
        await self.exited()
        return in_time

    def tail(self, lines: int = 12) -> str:
        """The last lines this run wrote to its log."""
        with self.command.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])


def describe_exit(status: int) -> str:
    """An exit status for a person."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _rotate(log: Path) -> int:
    """Set a long log aside; returns where this run's lines will begin."""
    log.parent.mkdir(parents=True, exist_ok=True)
    size = log.stat().st_size if log.exists() else 0
    if size <= LOG_BYTES_MAX:
        return size
    log.replace(log.with_name(log.name + ".1"))
    return 0


async def _readable(descriptor: int) -> None:
    """Wait until `descriptor` is readable (a pidfd: its process has ended), then close it."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
