"""What a drill looks at from behind the doors: token logs, rows, and figures of all processes of a kind."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import httpx2 as httpx
import msgspec

from ops.database import connected
from ops.reach import operator_bus, reach_of
from shared.bus import Bus
from shared.limits import CATCH_UP_BATCH
from shared.messages import End, Entry, Open, SequencedEntry, decoder
from shared.subjects import Names
from tests.integration.system import System, eventually

_entry: msgspec.msgpack.Decoder[Entry] = decoder(Entry)  # type: ignore[arg-type]  # msgspec reads unions
_NAMES = Names()


async def read_log(bus: Bus, reply_id: str) -> list[SequencedEntry]:
    entries: list[SequencedEntry] = []
    while True:
        after = entries[-1].seq if entries else 0
        batch = await bus.read(
            _NAMES.log_stream_of(reply_id), _NAMES.log_subject(reply_id), from_seq=after + 1, most=CATCH_UP_BATCH
        )
        entries += [SequencedEntry(seq=message.seq, entry=_entry.decode(message.data)) for message in batch]
        if len(batch) < CATCH_UP_BATCH:
            return entries


def read_logs(data: Path, reply_ids: Iterable[str]) -> dict[str, list[SequencedEntry]]:
    """The token logs as the bus holds them."""

    async def read() -> dict[str, list[SequencedEntry]]:
        async with operator_bus(reach_of(data, os.environ)) as bus:
            return {reply_id: await read_log(bus, reply_id) for reply_id in reply_ids}

    return asyncio.run(read())


def opens(log: Iterable[SequencedEntry]) -> list[Open]:
    return [item.entry for item in log if isinstance(item.entry, Open)]


def ends(log: Iterable[SequencedEntry]) -> list[End]:
    return [item.entry for item in log if isinstance(item.entry, End)]


def rows(data: Path, question: str, *arguments: object) -> list[Mapping[str, object]]:
    """What PostgreSQL holds."""

    async def ask() -> list[Mapping[str, object]]:
        connection = await connected(reach_of(data, os.environ).postgres.reveal())
        try:
            return [dict(row) for row in await connection.fetch(question, *arguments)]
        finally:
            await connection.close()

    return asyncio.run(ask())


# --- figures of several processes ----------------------------------------------------------------------------


def names_of(system: System, kind: str) -> list[str]:
    return [service["name"] for service in system.ready["services"] if service["name"].startswith(f"{kind}-")]


def total(system: System, kind: str, sample: str) -> float:
    """A counter or gauge without its labels, summed over the processes of a kind that answer."""
    found = 0.0
    for name in names_of(system, kind):
        try:
            page = system.metrics(name)
        except httpx.HTTPError:
            continue
        found += sum(value for each, value in page.items() if each.partition("{")[0] == sample)
    return found


def blocks_are_back(system: System, deadline_s: float = 10.0) -> None:
    """Nothing runs any more, and every KV block is free."""
    eventually(
        lambda: (
            total(system, "replica", "chorus_replica_blocks_free") == total(system, "replica", "chorus_replica_blocks")
            and total(system, "replica", "chorus_replica_attempts_held") == 0
        ),
        "all blocks are free again",
        deadline_s,
    )


def lanes_empty(system: System, deadline_s: float = 10.0) -> None:
    """No router holds a lease any more."""
    eventually(lambda: total(system, "router", "chorus_router_leases") == 0, "the routers hold nothing", deadline_s)


def all_ready(system: System, deadline_s: float = 60.0) -> None:
    """Every service answers that it is ready."""

    def ready() -> bool:
        try:
            return all(
                httpx.get(f"{service['http']}/readyz", timeout=1, verify=False).status_code == 200
                for service in system.ready["services"]
            )
        except httpx.HTTPError:
            return False

    eventually(ready, "every service is ready", deadline_s)


def tracebacks(data: Path) -> list[str]:
    """Lines of the services' logs that tell of a fault of ours, by file."""
    found = []
    for log in sorted((data / "logs").glob("*.log")):
        text = log.read_text(errors="replace")
        found += [f"{log.name}: {line[:300]}" for line in text.splitlines() if _is_fault(line)]
    return found


def _is_fault(line: str) -> bool:
    return "Traceback (most recent call last)" in line or '"exception"' in line or "never retrieved" in line


def poll(condition: Callable[[], object], what: str, deadline_s: float = 30.0) -> object:
    return eventually(condition, what, deadline_s)
