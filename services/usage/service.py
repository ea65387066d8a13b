"""The usage service: cost records from the USAGE stream into the ledger, each acknowledged after its commit.

    USAGE ──pull──> decode ──> one transaction per batch ──> ack
                      │           └── database away: the batch is kept and tried again, nothing is acked
                      └── unreadable, or not a cost: said, counted, acked (the stream keeps it for a week)

Dying anywhere costs a redelivery, and the primary key makes that harmless. Nobody on the serving path waits for this.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from services.usage.ledger import AttemptKey, core_seconds, fault, first_of_each
from services.usage.settings import UsageSettings
from services.usage.store import LedgerStore, RowRefusedError
from shared import clock
from shared.bus import Bus, Delivery, Puller
from shared.errors import BusClosedError, BusError
from shared.limits import USAGE_PULL_S, USAGE_RETRY_S_MAX, USAGE_RETRY_S_MIN
from shared.messages import UsageRecord, decoder
from shared.storage import UNAVAILABLE_ERRORS
from shared.subjects import Names
from shared.telemetry import Log, Metrics
from shared.topology import LEDGER_CONSUMER, topology

_record = decoder(UsageRecord)


class UsageService:
    """See `shared.service.Service` for the doors."""

    def __init__(self, settings: UsageSettings, *, bus: Bus, store: LedgerStore, metrics: Metrics, log: Log) -> None:
        self._names, self._batch_max = Names(settings.region), settings.batch_max
        self._bus, self._store, self._log = bus, store, log
        self._migrated = False
        self._away: str | None = None  # why nothing could be written lately
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._count = _Counts(metrics)

    # --- the doors --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Declares its stream and consumer. A database that is away is waited for in `run`: see `ready`."""
        streams, consumers = topology(self._names, ())
        name = self._names.usage_stream
        await self._bus.apply(
            [stream for stream in streams if stream.name == name],
            [consumer for consumer in consumers if consumer.stream == name],
        )
        try:
            await self._migrate()
        except UNAVAILABLE_ERRORS as error:
            self._store_away(error)

    async def run(self) -> None:
        puller = self._bus.puller(self._names.usage_stream, LEDGER_CONSUMER)
        try:
            while not self._draining.is_set():
                await self._write(await self._pull(puller))
        finally:
            self._idle.set()
            await puller.close()
        await asyncio.Event().wait()  # drained; whoever runs us ends us

    async def drain(self, deadline_s: float) -> None:
        """Finish the batch in hand; what is not acked comes again, to whoever pulls."""
        self._draining.set()
        async with asyncio.timeout(deadline_s):
            await self._idle.wait()

    def ready(self) -> str | None:
        return self._away if self._bus.connected else "the bus is away"

    # --- the loop ---------------------------------------------------------------------------------------------

    async def _pull(self, puller: Puller) -> list[Delivery]:
        try:
            return await puller.pull(self._batch_max, USAGE_PULL_S)
        except BusClosedError:
            raise
        except BusError as error:
            self._log.warning("usage_pull_failed", error=str(error))
            await self._pause(USAGE_RETRY_S_MIN)
            return []

    async def _write(self, deliveries: Sequence[Delivery]) -> None:
        """Commit a batch, then acknowledge it; a batch that a drain cut off is left as it is."""
        readable, unreadable = self._read(deliveries)
        if readable:
            records = [record for _, record in readable]
            added = await self._committed(records)
            if added is None:
                return
            self._charge(records, added)
            oldest_s = min(delivery.stored_s for delivery, _ in readable)
            self._count.lag_s.set(max(0.0, clock.wall_s() - oldest_s))
        await self._ack([*unreadable, *(delivery for delivery, _ in readable)])

    def _read(self, deliveries: Sequence[Delivery]) -> tuple[list[tuple[Delivery, UsageRecord]], list[Delivery]]:
        """What can stand in the ledger, and what cannot."""
        readable: list[tuple[Delivery, UsageRecord]] = []
        unreadable: list[Delivery] = []
        for delivery in deliveries:
            try:
                record = _record.decode(delivery.data)
                wrong = fault(record)
            except msgspec.DecodeError as error:
                wrong = str(error)
            if wrong is None:
                readable.append((delivery, record))
            else:
                unreadable.append(delivery)
                self._refused(wrong, seq=delivery.seq)
        return readable, unreadable

    async def _committed(self, records: Sequence[UsageRecord]) -> set[AttemptKey] | None:
        """The attempts that are new; None when a drain came before the database was back."""
        wait_s = USAGE_RETRY_S_MIN
        while True:
            try:
                started_s = clock.now_s()
                await self._migrate()
                added = await self._add(records)
            except UNAVAILABLE_ERRORS as error:
                self._store_away(error)
                await self._pause(wait_s)
                if self._draining.is_set():
                    return None
                wait_s = min(2 * wait_s, USAGE_RETRY_S_MAX)
            else:
                self._away = None
                self._count.commit_s.observe(clock.now_s() - started_s)
                return added

    async def _add(self, records: Sequence[UsageRecord]) -> set[AttemptKey]:
        """One transaction; when the table refuses a record, one each, so that only that record is left out."""
        try:
            return await self._store.add(records)
        except RowRefusedError as error:
            if len(records) == 1:
                self._refused(str(error), reply_id=records[0].reply_id)
                return set()
        added: set[AttemptKey] = set()
        for record in records:
            added |= await self._add([record])
        return added

    def _charge(self, records: Sequence[UsageRecord], added: set[AttemptKey]) -> None:
        """Count what is new, once; the rest was told before."""
        new = [record for key, record in first_of_each(records).items() if key in added]
        self._count.records.labels("new").inc(len(new))
        self._count.records.labels("repeated").inc(len(records) - len(new))
        for record in new:
            labels = (record.tier, record.model)
            self._count.tokens.labels("input", *labels).inc(record.input_tokens)
            self._count.tokens.labels("cached", *labels).inc(record.cached_tokens)
            self._count.tokens.labels("output", *labels).inc(record.output_tokens)
            self._count.engine_s.labels(*labels).inc(record.engine_s)
            self._count.core_s.labels(*labels).inc(core_seconds(record))

    async def _ack(self, deliveries: Sequence[Delivery]) -> None:
        """An ack that is lost costs a redelivery, which changes nothing."""
        results = await asyncio.gather(*(self._bus.ack(one.ack_subject) for one in deliveries), return_exceptions=True)
        lost = [result for result in results if isinstance(result, BaseException)]
        for error in lost:
            if not isinstance(error, BusError) or isinstance(error, BusClosedError):
                raise error
        if lost:
            self._log.warning("usage_acks_lost", count=len(lost), error=str(lost[0]))

    # --- the database -----------------------------------------------------------------------------------------

    async def _migrate(self) -> None:
        if not self._migrated:
            applied = await self._store.migrate()
            self._migrated = True
            self._log.info("ledger_ready", migrations=applied)

    def _store_away(self, error: Exception) -> None:
        self._away = f"the ledger cannot be written: {type(error).__name__}"
        self._count.failures.inc()
        self._log.warning("ledger_away", error=f"{type(error).__name__}: {error}")

    def _refused(self, why: str, **where: object) -> None:
        self._count.records.labels("refused").inc()
        self._log.error("usage_record_refused", why=why, **where)

    async def _pause(self, seconds: float) -> None:
        """So long, or until a drain; spread, so that many do not come back at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * (0.5 + clock.random_unit())):
                await self._draining.wait()


class _Counts:
    """The usage service's metrics; docs/metrics.md defines them."""

    def __init__(self, metrics: Metrics) -> None:
        self.records = metrics.counter("usage_records_total", "cost records, by what became of them", ("outcome",))
        self.tokens = metrics.counter("usage_tokens_total", "tokens charged", ("kind", "tier", "model"))
        self.engine_s = metrics.counter("usage_engine_seconds_total", "engine seconds charged", ("tier", "model"))
        self.core_s = metrics.counter("usage_core_seconds_total", "core or GPU seconds charged", ("tier", "model"))
        self.commit_s = metrics.histogram("usage_commit_seconds", "one batch into the ledger")
        self.lag_s = metrics.gauge("usage_lag_seconds", "age of the oldest record of the last batch committed")
        self.failures = metrics.counter("usage_ledger_away_total", "tries to write while the database was away")
