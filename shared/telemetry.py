"""Log lines, metrics and the journal: one library for every service. Never prompts, never keys.

The serving path must not wait for it: log lines go to stderr, metrics are counted in memory, and a journal
record that finds its bounded queue full is dropped and counted.
"""

import asyncio
import logging
import sys
from collections import deque
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared import clock
from shared.bus import Bus
from shared.errors import BusError
from shared.messages import JournalRecord, encode
from shared.subjects import Names

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0)
JOURNAL_QUEUE_MAX = 4096

Log = structlog.stdlib.BoundLogger


def configure_logging(service: str, name: str, level: str = "info") -> Log:
    """JSON lines on stderr, one per event, each with service and instance."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger(service=service, instance=name)
    return log


class Metrics:
    """A service's own registry; every name begins with `chorus_` and is defined in docs/metrics.md."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"chorus_{name}", help_text, labels, registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"chorus_{name}", help_text, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        help_text: str,
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        return Histogram(f"chorus_{name}", help_text, labels, buckets=buckets, registry=self.registry)

    def page(self) -> bytes:
        """The exposition text of `/metrics`."""
        return generate_latest(self.registry)


class Journal:
    """Decisions and state changes to the JOURNAL stream, off the serving path."""

    def __init__(self, bus: Bus, names: Names, service: str, metrics: Metrics) -> None:
        self._bus, self._service = bus, service
        self._subject = names.journal(service)
        self._queue: deque[JournalRecord] = deque()
        self._wake = asyncio.Event()
        self._dropped = metrics.counter("journal_dropped_total", "journal records dropped: queue full or bus away")

    def note(self, kind: str, reply_id: str | None = None, **data: Any) -> None:
        """Record what was decided and on what inputs (counts, hashes, reasons)."""
        if len(self._queue) >= JOURNAL_QUEUE_MAX:
            self._dropped.inc()
            return
        self._queue.append(
            JournalRecord(at_s=clock.wall_s(), service=self._service, kind=kind, reply_id=reply_id, data=data)
        )
        self._wake.set()

    async def run(self) -> None:
        """Send what was noted, for as long as the service lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                record = self._queue.popleft()
                try:
                    await self._bus.publish(self._subject, encode(record))
                except BusError:
                    self._dropped.inc()
