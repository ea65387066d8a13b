"""The archive stores each end once; the guards finish what a crash left half done."""

from collections.abc import AsyncIterator

import pytest

from shared.limits import DEDUPLICATION_S
from shared.messages import (
    encode,
)
from shared.outcomes import EndReason
from shared.tiers import Tier
from tests.service.conversation_world import NAMES, World, a_world, ref, seen, until


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[World]:
    async with a_world(postgres_url) as made:
        await made.service()
        yield made


# --- the archive ----------------------------------------------------------------------------------------------


async def test_the_archive_stores_an_end_once(world: World) -> None:
    """The same ENDED record twice, past deduplication, is one stored end and one line."""
    reply = (await world.send("one")).reply_id
    await world.write(reply, ["x"])
    await world.archived(reply)
    record = await world.bus.last(NAMES.ended_stream, NAMES.ended(reply))
    seq = await world.bus.append(NAMES.ended(reply), record.data, timeout_s=1.0)
    await until(lambda: seen(_acked(world, seq)), "the second is acknowledged")
    assert len(world.finished(reply)) == 1
    line = world.finished(reply)[0]
    assert (line["reason"], line["output_tokens"], line["user"]) == ("stop_token", 2, "ann")
    page = world.metrics.page().decode()
    assert 'chorus_replies_ended_total{model="stub",reason="stop_token",tier="paid"} 1.0' in page


def _acked(world: World, seq: int) -> bool:
    consumer = world.server.stream(NAMES.ended_stream).consumers["conversation_archive"]
    return consumer.next_seq > seq and seq not in consumer.pending


async def test_a_record_nobody_can_read_does_not_stop_the_archive(world: World) -> None:
    """An unreadable ENDED record is tried several times and given up, while others are stored."""
    reply = (await world.send("one")).reply_id
    seq = await world.bus.append(NAMES.ended("resp_bad"), b"\x00rubbish", timeout_s=1.0)
    await world.write(reply, ["x"])
    await world.archived(reply)
    await until(lambda: seen(_acked(world, seq)), "it is given up", 30.0)
    assert [line for line in world.lines if line["event"] == "archive_gave_up"]


async def test_a_reply_with_any_text_is_archived(world: World) -> None:
    """NUL in a reply's text is stored and read back."""
    reply = (await world.send("one")).reply_id
    await world.write(reply, ["a\0b"])
    assert (await world.archived(reply)).text == "a\0b"


# --- guards ---------------------------------------------------------------------------------------------------


async def test_what_was_stored_and_not_queued_is_queued(world: World) -> None:
    """After a crash between the rows and the lane, before or after `accepted`, the outbox queues the request once."""
    for crash_after_accepted in (False, True):
        reply = (await world.send("one")).reply_id
        request = await world.queued(reply)
        await until(lambda: _empty(world, "outbox"), "its own row is gone")
        await world.bus.purge(NAMES.lane_stream(Tier.PAID), NAMES.lane_filter(Tier.PAID))
        if not crash_after_accepted:
            await world.logs.purge(reply)
        world.skipped_s += 2 * DEDUPLICATION_S
        await world.rows("UPDATE replies SET status = 'accepted' WHERE id = $1", reply)
        subject = NAMES.lane_subject(Tier.PAID, "stub", 0)
        await world.rows(
            "INSERT INTO outbox VALUES ($1, 'acme', 'ann', $2, $3, now() - interval '5 seconds')",
            reply, subject, encode(request),
        )  # fmt: skip

        async def queued(reply: str = reply) -> bool:
            return reply in [found.reply_id for found in await world.all_queued()]

        await until(queued, "the outbox queues it")
        await until(lambda: _empty(world, "outbox"), "the outbox is empty")
        log = await world.logs.read(reply)
        again = await world.queued(reply)
        assert (again.accepted, again.accepted_seq) == (log.accepted, log.accepted_seq)


async def _empty(world: World, table: str) -> bool:
    return await world.rows(f"SELECT * FROM {table}") == []


async def test_a_row_nobody_can_read_does_not_stop_the_outbox(world: World) -> None:
    """An unreadable request is given up and ends as failed; the one behind it is queued."""
    bad, good = (await world.send("one")).reply_id, (await world.send("two")).reply_id
    await until(lambda: _empty(world, "outbox"), "both are queued")
    requests = {reply: await world.queued(reply) for reply in (bad, good)}
    await world.bus.purge(NAMES.lane_stream(Tier.PAID), NAMES.lane_filter(Tier.PAID))
    world.skipped_s += 2 * DEDUPLICATION_S
    for reply, payload, age in ((bad, b"rubbish", 9), (good, encode(requests[good]), 8)):
        await world.rows(
            f"INSERT INTO outbox VALUES ($1, 'acme', 'ann', $2, $3, now() - interval '{age} seconds')",
            reply, NAMES.lane_subject(Tier.PAID, "stub", 0), payload,
        )  # fmt: skip
    assert (await world.archived(bad)).reason is EndReason.FAILED
    assert [request.reply_id for request in await world.all_queued()] == [good]


async def test_a_reply_stopped_before_it_was_queued_is_archived(world: World) -> None:
    """When the log ended before the lane took the request, no router will archive it: the outbox does."""
    reply = (await world.send("one")).reply_id
    request = await world.queued(reply)
    await until(lambda: _empty(world, "outbox"), "its own row is gone")
    await world.ask("cancel", ref(reply))
    await world.bus.purge(NAMES.lane_stream(Tier.PAID), NAMES.lane_filter(Tier.PAID))
    await world.rows(
        "INSERT INTO outbox VALUES ($1, 'acme', 'ann', 'x', $2, now() - interval '5 seconds')", reply, encode(request)
    )
    assert (await world.archived(reply)).reason is EndReason.USER_STOP
    assert await world.all_queued() == []


async def test_the_last_guard_ends_what_nobody_ended(world: World) -> None:
    """A reply past its deadline ends as expired in log and rows, with the text it had; so does one without a log."""
    with_log = (await world.send("one")).reply_id
    without = (await world.send("two")).reply_id
    await world.write(with_log, ["partial"], reason=None)
    await world.logs.purge(without)
    heard = await world.bus.subscribe(NAMES.cancel(with_log))
    await world.rows("UPDATE replies SET deadline_at = now() - interval '31 seconds'")
    view = await world.archived(with_log)
    assert (view.reason, view.text) == (EndReason.EXPIRED, "partial")
    assert (await world.logs.read(with_log)).ended.reason is EndReason.EXPIRED
    assert await heard.next(5.0) is not None
    assert (await world.archived(without)).reason is EndReason.EXPIRED
    await world.publish_ended(with_log)
    assert len(world.finished(with_log)) == 1
