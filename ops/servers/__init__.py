"""Real servers from wheels, as child processes in a data folder: NATS, PostgreSQL, Valkey."""

from typing import Protocol

from ops.processes import Command


class Unit(Protocol):
    """Something the supervisor keeps running: an embedded server or a service of ours."""

    @property
    def name(self) -> str: ...

    @property
    def start_s(self) -> float:
        """Longest time from its start until it is ready."""
        ...

    @property
    def stop_s(self) -> float:
        """Longest time it is given to leave by itself."""
        ...

    async def prepare(self) -> None:
        """Lay out its folder and files; again before each start, quick when all is there. Raises ConfigError."""
        ...

    def command(self) -> Command: ...

    async def probe(self) -> str | None:
        """None when it does its work, else what is missing, as a phrase."""
        ...
