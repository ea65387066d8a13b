"""PostgreSQL for the services that keep rows: a pool with deadlines, and one small migration runner.

    pool = await open_pool(dsn, name="usage", stack=stack)     no connection is made yet: the database may be away
    async with borrow(pool) as conn:                           raises one of UNAVAILABLE_ERRORS while it is
        await migrate(conn, "usage", Path(__file__).parent / "migrations")

Migrations are files `NNNN_words.sql`, applied once each in the order of their names; an applied file never changes.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import asyncpg

from shared.errors import ConfigError
from shared.limits import STORE_ACQUIRE_S, STORE_COMMAND_S, STORE_CONNECT_S, STORE_MIGRATE_S, STORE_POOL_MAX

Pool: TypeAlias = asyncpg.Pool
Connection: TypeAlias = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

# The database is away, starting, stopping or out of room: the same call may succeed later.
UNAVAILABLE_ERRORS: tuple[type[Exception], ...] = (
    OSError,  # refused, reset, no route; TimeoutError is one
    asyncpg.InterfaceError,  # the connection was closed under us (its DataError is our own fault: catch that before)
    asyncpg.InternalClientError,  # it broke in the middle of a call, and the driver lost count
    asyncpg.PostgresConnectionError,  # class 08
    asyncpg.exceptions.OperatorInterventionError,  # class 57: shutting down, starting up
    asyncpg.exceptions.InsufficientResourcesError,  # class 53: connections, memory, disk
    asyncpg.exceptions.TransactionRollbackError,  # class 40: a deadlock, and it took ours back
)
_CUT_OFF: tuple[type[BaseException], ...] = (asyncio.CancelledError, *UNAVAILABLE_ERRORS)

_MIGRATION = re.compile(r"^\d{4}_[a-z0-9_]+\.sql$")
_LOCK_KEY = 0x43484F52  # "CHOR": one migrator at a time in a database, whichever service
_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    component  text        NOT NULL,
    name       text        NOT NULL,
    digest     bytea       NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (component, name)
)
"""


async def open_pool(dsn: str, *, name: str, stack: AsyncExitStack, size_max: int = STORE_POOL_MAX) -> Pool:
    """A pool whose every wait has a deadline; closed with `stack`. Raises ConfigError when `dsn` cannot be read.

    It connects when first used, so that a service starts while the database is away. `name` is shown in
    pg_stat_activity.
    """
    if not dsn.startswith(("postgresql://", "postgres://")):
        raise ConfigError("the PostgreSQL address must begin with postgresql://")
    try:
        pool = await asyncpg.create_pool(
            dsn,
            min_size=0,
            max_size=size_max,
            timeout=STORE_CONNECT_S,
            command_timeout=STORE_COMMAND_S,
            reset=_keep_session,
            server_settings={"application_name": f"chorus-{name}"},
        )
    except (ValueError, asyncpg.InterfaceError) as error:
        raise ConfigError(f"the PostgreSQL address cannot be read: {type(error).__name__}. Check it.") from error
    stack.push_async_callback(_close, pool)
    return pool


async def _keep_session(_: Connection) -> None:
    """Nothing to undo: no caller changes its session, and the driver rolls an open transaction back by itself.

    The default asks the server to reset everything each time: a round trip for every call.
    """


async def _close(pool: Pool) -> None:
    """Close, but never hang on a connection that does not answer."""
    try:
        await asyncio.wait_for(pool.close(), STORE_COMMAND_S)
    except TimeoutError:
        pool.terminate()


@asynccontextmanager
async def borrow(pool: Pool) -> AsyncIterator[Connection]:
    """One connection for the block. One whose call was cut off or broke in flight is closed, never handed on."""
    async with pool.acquire(timeout=STORE_ACQUIRE_S) as conn:
        try:
            yield conn
        except _CUT_OFF:
            conn.terminate()
            raise


async def migrate(conn: Connection, component: str, folder: Path) -> list[str]:
    """Apply what is missing of `folder`, all or nothing, one migrator at a time; returns the names applied.

    Raises ConfigError when an applied file has changed or a name is not NNNN_words.sql.
    """
    files = _read(folder)
    applied: list[str] = []
    async with conn.transaction():
        await conn.execute("SELECT pg_advisory_xact_lock($1)", _LOCK_KEY, timeout=STORE_MIGRATE_S)
        await conn.execute(_TABLE)
        rows = await conn.fetch("SELECT name, digest FROM schema_migrations WHERE component = $1", component)
        standing: dict[str, bytes] = {row["name"]: row["digest"] for row in rows}
        for name, sql in files:
            digest = hashlib.sha256(sql.encode()).digest()
            if name not in standing:
                await conn.execute(sql, timeout=STORE_MIGRATE_S)
                await conn.execute("INSERT INTO schema_migrations VALUES ($1, $2, $3)", component, name, digest)
                applied.append(name)
            elif standing[name] != digest:
                raise ConfigError(
                    f"migration {component}/{name} was applied with other content: add a new file instead"
                )
    return applied


def _read(folder: Path) -> list[tuple[str, str]]:
    """(name, SQL) in order. Small files, read once at start."""
    files = sorted(folder.glob("*.sql"))
    wrong = [file.name for file in files if _MIGRATION.match(file.name) is None]
    if wrong or not files:
        raise ConfigError(
            f"migrations in {folder.name} must be named NNNN_words.sql: {', '.join(wrong) or 'none found'}"
        )
    return [(file.name, file.read_text(encoding="utf-8")) for file in files]
