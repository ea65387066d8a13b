"""Reading a log on from what is known of it gives what reading it whole gives."""

from shared.log_store import LogStore
from shared.messages import encode
from tests.contract.test_log_store import DONE, Log


async def test_reading_on_equals_reading_whole(world):
    """At any point, and nothing is read twice but the last known entry."""
    log = Log(world)
    store, writer = await log.opened()
    counting = await log.store()
    reads = count_reads(counting)
    known = await store.read(log.reply)
    for first in (0, 3, 4):
        await log.write(store, writer, 3, first=first)
        reads.clear()
        known_before, known = known, await counting.read(log.reply, known)
        assert known == await store.read(log.reply)
        assert reads == [known_before.last_seq]
    await store.append(log.reply, known.last_seq, encode(DONE))
    assert (await store.read(log.reply, known)).ended == DONE
    assert known.ended is None, "what was known before is not touched"


async def test_a_log_that_was_lost_is_read_whole(world):
    """When the last known entry is gone, nothing that is known counts."""
    log = Log(world)
    store, writer = await log.opened()
    await log.write(store, writer, 3)
    known = await store.read(log.reply)
    await store.purge(log.reply)
    assert (await store.read(log.reply, known)).accepted is None


def count_reads(store: LogStore) -> list[int]:
    """The sequences from which a store reads, from now on."""
    asked: list[int] = []
    real = store._bus.read

    async def read(stream: str, subject: str, *, from_seq: int, most: int):
        asked.append(from_seq)
        return await real(stream, subject, from_seq=from_seq, most=most)

    store._bus.read = read
    return asked
