"""The usage service on a real PostgreSQL: every cost is charged once, and none is acknowledged before it stands."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest
import structlog

from services.usage.ledger import Account, Ledger
from services.usage.service import UsageService
from services.usage.settings import UsageSettings
from services.usage.store import LedgerStore
from shared import clock
from shared.bus.memory import MemoryServer
from shared.errors import ConfigError
from shared.messages import UsageRecord, encode
from shared.settings import Secret
from shared.storage import UNAVAILABLE_ERRORS, Pool, borrow, migrate, open_pool
from shared.subjects import Names
from shared.telemetry import Metrics
from shared.tiers import Tier
from shared.topology import LEDGER_CONSUMER, topology

NAMES = Names("local")
PATIENCE_S = 20.0
FOREVER = (0.0, 4_000_000_000.0)


def record(reply: int, attempt: int = 1, **changes) -> UsageRecord:
    fields = {
        "reply_id": f"resp_{reply}",
        "attempt": attempt,
        "org": "o",
        "user": "u",
        "tier": Tier.PAID if reply % 2 else Tier.FREE,
        "model": "m",
        "replica": "r1",
        "input_tokens": 100,
        "cached_tokens": 32,
        "output_tokens": reply,
        "engine_s": 0.25,
        "core_s": reply / 4 if reply % 2 else None,  # an earlier version does not tell
        "at_s": clock.wall_s(),
    }
    return UsageRecord(**(fields | changes))


class FlakyStore(LedgerStore):
    """The real store, which can be told to fail as a lost database does."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.away = False
        self.die_after_commit = False
        self.tries = 0

    async def add(self, records):
        self.tries += 1
        if self.away:
            raise ConnectionRefusedError("no database")
        added = await super().add(records)
        if self.die_after_commit:
            raise asyncpg.ConnectionDoesNotExistError("gone after the commit")
        return added


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        yield await open_pool(postgres_url, name="test", stack=stack)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@asynccontextmanager
async def running(server: MemoryServer, store: LedgerStore, **settings) -> AsyncIterator[UsageService]:
    bus = server.bus()
    service = UsageService(
        UsageSettings(name="usage-1", postgres_url=Secret("unused"), **settings),
        bus=bus,
        store=store,
        metrics=Metrics(),
        log=structlog.get_logger(),
    )
    await service.start()
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task
        await bus.close()


async def publish(server: MemoryServer, records: list[UsageRecord]) -> None:
    bus = server.bus()
    await bus.apply(*topology(NAMES, []))
    for one in records:
        await bus.append(NAMES.usage(one.reply_id), encode(one), timeout_s=5.0)
    await bus.close()


async def eventually(holds: Callable[[], object], what: str) -> None:
    """Wait for a condition, plain or awaitable, with a deadline."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                got = holds()
                if await got if asyncio.iscoroutine(got) else got:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


def unacked(server: MemoryServer) -> int:
    """Records that were never delivered or not acknowledged."""
    stream = server.stream(NAMES.usage_stream)
    consumer = stream.consumers[LEDGER_CONSUMER]
    return len(consumer.pending) + stream._last_seq - (consumer.next_seq - 1)


async def test_every_cost_is_charged_once(server, pool):
    """Records told several times and in several batches sum up as the pure ledger says."""
    records = [record(reply, attempt) for reply in range(40) for attempt in (1, 2)]
    told = [*records, *records[::3], record(7, 1, output_tokens=9999)]
    ledger = Ledger()
    for one in told:
        ledger.add(one)
    await publish(server, told)
    store = LedgerStore(pool)
    async with running(server, store, batch_max=16):
        await eventually(lambda: unacked(server) == 0, "all is acknowledged")
    assert await store.sums(*FOREVER) == dict(ledger.sums())


async def test_nothing_is_acknowledged_while_the_database_is_away(server, pool):
    """The batch is kept and tried again, un-acked; when the database is back it is charged."""
    store = FlakyStore(pool)
    store.away = True
    await publish(server, [record(1), record(2)])
    async with running(server, store) as service:
        await eventually(lambda: store.tries >= 2, "it is tried again")
        assert unacked(server) == 2
        assert service.ready() == "the ledger cannot be written: ConnectionRefusedError"
        store.away = False
        await eventually(lambda: unacked(server) == 0, "it is charged")
        assert service.ready() is None
    assert sum(sums.attempts for sums in (await store.sums(*FOREVER)).values()) == 2


async def test_dying_between_commit_and_ack_charges_nothing_twice(server, pool):
    """A commit whose outcome was lost is tried again, and the primary key makes that harmless."""
    store = FlakyStore(pool)
    store.die_after_commit = True
    await publish(server, [record(1), record(3)])
    async with running(server, store):
        await eventually(lambda: store.tries >= 1, "it is written")
        store.die_after_commit = False
        await eventually(lambda: unacked(server) == 0, "it is acknowledged")
    sums = (await store.sums(*FOREVER))[Account(Tier.PAID, "m")]
    assert (sums.attempts, sums.output_tokens) == (2, 4)


async def test_what_is_no_cost_is_left_out_and_does_not_block(server, pool):
    """Garbage and impossible records are counted and acknowledged; their neighbours are charged."""
    bus = server.bus()
    await bus.apply(*topology(NAMES, []))
    await bus.append(NAMES.usage("resp_x"), b"\xc1", timeout_s=5.0)
    await bus.close()
    too_large = record(6, input_tokens=2**63)  # only the table can tell
    await publish(server, [record(2), record(4, output_tokens=-1), too_large, record(8)])
    store = LedgerStore(pool)
    async with running(server, store):
        await eventually(lambda: unacked(server) == 0, "all is acknowledged")
    assert (await store.sums(*FOREVER))[Account(Tier.FREE, "m")].output_tokens == 2 + 8


async def test_a_database_that_is_away_at_the_start_is_waited_for(server, pool, postgres_url):
    """The service starts without its database, says what is missing, and charges what waits once it is there."""
    async with AsyncExitStack() as stack:
        nowhere = await open_pool("postgresql://u@127.0.0.1:1/none", name="test", stack=stack)
        async with running(server, LedgerStore(nowhere)) as service:
            assert "the ledger cannot be written" in (service.ready() or "")
    await publish(server, [record(1)])
    store = LedgerStore(pool)
    async with running(server, store):
        await eventually(lambda: unacked(server) == 0, "it is charged")


async def test_a_drain_finishes_the_batch_in_hand(server, pool):
    """What was taken is charged and acknowledged before the service leaves; afterwards it takes nothing."""
    await publish(server, [record(1)])
    store = LedgerStore(pool)
    async with running(server, store) as service:
        await eventually(lambda: unacked(server) == 0, "it is charged")
        await service.drain(PATIENCE_S)
        await publish(server, [record(2)])
        assert unacked(server) == 1


async def test_sums_are_of_a_time_and_of_an_org(pool):
    """Half-open times, and one org's own sums."""
    store = LedgerStore(pool)
    await store.migrate()
    await store.add([record(1, at_s=100.0), record(3, at_s=200.0, org="p"), record(5, at_s=300.0)])
    assert (await store.sums(100.0, 300.0))[Account(Tier.PAID, "m")].output_tokens == 4
    assert (await store.sums(*FOREVER, org="p"))[Account(Tier.PAID, "m")].output_tokens == 3


async def test_migrations_run_once_however_many_start(pool):
    """Services that start together apply each migration once."""
    store = LedgerStore(pool)
    applied = await asyncio.gather(*(store.migrate() for _ in range(5)))
    assert sorted(applied, key=len, reverse=True) == [["0001_start.sql", "0002_core_seconds.sql"], [], [], [], []]


async def test_a_changed_migration_is_refused(pool, tmp_path):
    """An applied file with other content is an error with a sentence; a failed file leaves nothing behind."""
    async with borrow(pool) as conn:
        (tmp_path / "0001_one.sql").write_text("CREATE TABLE one (a int)")
        assert await migrate(conn, "test", tmp_path) == ["0001_one.sql"]
        (tmp_path / "0002_two.sql").write_text("CREATE TABLE two (a int); SELECT 1/0")
        with pytest.raises(asyncpg.DivisionByZeroError):
            await migrate(conn, "test", tmp_path)
        assert await conn.fetchval("SELECT to_regclass('two')") is None
        (tmp_path / "0002_two.sql").unlink()
        (tmp_path / "0001_one.sql").write_text("CREATE TABLE one (b int)")
        with pytest.raises(ConfigError, match="other content"):
            await migrate(conn, "test", tmp_path)
        (tmp_path / "1.sql").write_text("")
        with pytest.raises(ConfigError, match="NNNN_words"):
            await migrate(conn, "test", tmp_path)


async def test_a_connection_cut_off_in_flight_is_not_used_again(pool):
    """After a cancelled call the next user gets another connection, never somebody else's answer."""

    seen: list[int] = []

    async def process(then: str = "SELECT 1") -> None:
        async with borrow(pool) as conn:
            seen.append(await conn.fetchval("SELECT pg_backend_pid()"))
            await conn.fetchval(then)

    async def sleeping() -> bool:
        async with borrow(pool) as conn:
            return await conn.fetchval("SELECT count(*) > 0 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)'")

    task = asyncio.create_task(process("SELECT pg_sleep(60)"))
    await eventually(sleeping, "the call is in flight")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.gather(*(process() for _ in range(20)))
    assert seen[0] not in seen[1:]


async def test_a_database_that_is_away_is_one_of_the_errors_said():
    """No connection shows as one of UNAVAILABLE_ERRORS; an address that cannot be read is a ConfigError."""
    async with AsyncExitStack() as stack:
        nowhere = await open_pool("postgresql://u@127.0.0.1:1/none", name="test", stack=stack)
        with pytest.raises(UNAVAILABLE_ERRORS):
            async with borrow(nowhere):
                pass
        with pytest.raises(ConfigError, match="PostgreSQL"):
            await open_pool("not an address", name="test", stack=stack)
