"""Valkey for limits, quotas and caches: calls with a deadline, on connections that are never handed on half used.

borrow ──> send ──> read ──> give back
             └──────┴─ cancelled, late, broken: the connection is closed. Its answer would be the next caller's.

All of it may be lost at any time, so whoever calls goes on without: ValkeyAwayError is an answer, not a failure. While
nobody answers, calls fail at once, and one in VALKEY_AWAY_S tries again.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from shared import clock
from shared.errors import ConfigError, ValkeyAwayError
from shared.limits import VALKEY_AWAY_S, VALKEY_CALL_S, VALKEY_CONNECTIONS_MAX, VALKEY_PROBE_S

_SILENT_MAX = 2  # calls in a row without an answer in time; then it is away. One alone may have been our own lateness

Command = Sequence[str | bytes | int]
Changed = Callable[[bool, str], None]


class Script:
    """A Lua script: sent once, named by its digest afterwards."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - the name the server gives it, no secret


class Valkey:
    """`changed(away, why)` is told once when it goes and once when it is back. Raises ConfigError for a bad address."""

    def __init__(self, url: str, *, changed: Changed | None = None, call_s: float = VALKEY_CALL_S) -> None:
        try:
            self._factory = ConnectionPool.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=call_s,
                driver_info=None,  # two round trips less for each connection
            )
        except ValueError as error:
            raise ConfigError(f"the Valkey address cannot be read: {error}. Check CHORUS_REDIS_URL.") from error
        self._changed, self._call_s = changed, call_s
        self._idle: list[AbstractConnection] = []
        self._room = asyncio.Semaphore(VALKEY_CONNECTIONS_MAX)
        self._silent = 0
        self._try_again_s = 0.0
        self._closed = False
        self.away = False

    async def call(self, *command: str | bytes | int) -> Any:
        """The answer of one command; raises ValkeyAwayError."""
        return (await self.many([command]))[0]

    async def many(self, commands: Sequence[Command]) -> list[Any]:
        """The answers of several commands in one round trip; raises ValkeyAwayError when one of them fails."""
        answers = await self._round_trip(commands)
        for answer in answers:
            if isinstance(answer, RedisError):
                raise await self._failed(answer)
        self._answered()
        return answers

    async def run(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str | int | bytes]]]
    ) -> list[Any]:
        """One answer per (keys, arguments); a server that knows no such script is sent it. Raises ValkeyAwayError."""
        by_digest = [("EVALSHA", script.digest, len(keys), *keys, *arguments) for keys, arguments in calls]
        answers = await self._round_trip(by_digest)
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            self._answered()  # it is there: the second try must not be held back
            whole = [("EVAL", script.text, *by_digest[at][2:]) for at in unknown]
            for at, answer in zip(unknown, await self._round_trip(whole), strict=True):
                answers[at] = answer
        for answer in answers:
            if isinstance(answer, RedisError):
                raise await self._failed(answer)
        self._answered()
        return answers

    async def close(self) -> None:
        """Calls in flight still get their answers; new ones are away."""
        self._closed = True
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    # --- one round trip --------------------------------------------------------------------------------------

    async def _round_trip(self, commands: Sequence[Command]) -> list[Any]:
        if self._closed:
            raise ValkeyAwayError("closed")
        if self.away:
            if clock.now_s() < self._try_again_s:
                raise ValkeyAwayError("Valkey was away a moment ago")
            self._try_again_s = clock.now_s() + VALKEY_AWAY_S  # this call finds out, the others do not wait for it
        try:
            async with asyncio.timeout(min(self._call_s, VALKEY_PROBE_S) if self.away else self._call_s), self._room:
                return await self._exchange(commands)
        except TimeoutError as error:
            self._silent += 1
            if self._silent >= _SILENT_MAX:
                raise await self._failed(error) from error
            raise ValkeyAwayError("Valkey did not answer in time") from error
        except (OSError, RedisError) as error:
            raise await self._failed(error) from error

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Errors that are answers are returned; what leaves answers unread closes the connection."""
        connection = self._idle.pop() if self._idle else self._make()
        answers: list[Any] = []
        try:
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    answers.append(await connection.read_response(disconnect_on_error=False))
                except ResponseError as error:  # an answer that says no; the next one follows it
                    answers.append(error)
        finally:
            if len(answers) == len(commands) and not self._closed:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)
        return answers

    def _make(self) -> AbstractConnection:
        made: AbstractConnection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        return made

    # --- whether it is there ---------------------------------------------------------------------------------

    async def _failed(self, error: Exception) -> ValkeyAwayError:
        """The other idle connections are most likely of the same server that is gone."""
        why = f"{type(error).__name__}: {error}"
        self._try_again_s = clock.now_s() + VALKEY_AWAY_S
        if not self.away:
            self.away = True
            self._tell(why)
        await self._drop_idle()
        return ValkeyAwayError(why)

    def _answered(self) -> None:
        self._silent = 0
        if self.away:
            self.away = False
            self._tell("")

    def _tell(self, why: str) -> None:
        if self._changed is not None:
            self._changed(self.away, why)
