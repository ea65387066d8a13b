"""Users' tokens through the whole of conversation, with a real PostgreSQL and a real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from services.conversation.quota_store import BucketName, QuotaStore
from services.conversation.quotas import Quotas
from shared.limits import MINI_TOKENS_FACTOR
from shared.messages import ConversationRef, CreateConversation, Sent, unpack_ids
from shared.outcomes import EndReason, RefusalKind
from shared.quota import Totals
from shared.settings import Secret
from shared.storage import UNAVAILABLE_ERRORS
from shared.tiers import Tier
from shared.valkey import Valkey
from tests.service.conversation_world import ANN, BOB, STUB, World, a_world, ref, until

BUCKET = BucketName(ANN.org, ANN.user, "stub", Tier.PAID)
MINI = BUCKET._replace(model="stub-mini")


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[World]:
    async with a_world(postgres_url) as made:
        yield made


@pytest.fixture
async def quotas(valkey_url: str) -> AsyncIterator[QuotaStore]:
    valkey = Valkey(valkey_url, call_s=10.0)
    yield QuotaStore(valkey, "local")
    await valkey.close()


async def settled(quotas: QuotaStore, bucket: BucketName = BUCKET) -> Totals:
    """The totals once nothing is leased any more."""

    async def balanced() -> Totals | None:
        totals = await quotas.totals(bucket)
        return totals if totals.reserved == totals.settled + totals.refunded else None

    return await until(balanced, "every reserved token is settled or refunded")


def asking(limit: int, valkey_url: str) -> dict[str, Any]:
    return {"redis_url": Secret(valkey_url), "tokens_per_min_paid": limit}


async def test_of_fifty_at_once_one_is_let_in(world: World, valkey_url: str, quotas: QuotaStore) -> None:
    """50 parallel messages over two instances with tokens for one: the model takes one, the mini model what it may."""
    await world.service("conversation-1", **asking(60, valkey_url))
    await world.service("conversation-2", **asking(60, valkey_url))
    sent = await asyncio.gather(*(world.send(f"m{n}", max_output_tokens=24) for n in range(50)))
    let_in = [one for one in sent if isinstance(one, Sent)]
    models = [(await world.queued(one.reply_id)).accepted.model for one in let_in]
    assert models.count("stub") == 1
    assert 0 < models.count("stub-mini") < 49
    assert {one.refusal.kind for one in sent if not isinstance(one, Sent)} == {RefusalKind.QUOTA}
    totals = await quotas.totals(BUCKET)
    assert (totals.settled, totals.refunded) == (0, 0)


async def test_past_the_limit_the_mini_model_answers_and_says_so(world: World, valkey_url: str) -> None:
    """The reply of another model names itself, what was asked for, and why; past its limit too comes a clear refusal."""
    await world.service(**asking(50, valkey_url))
    first = await world.send("one", max_output_tokens=30)
    assert first.allowance.limit == 50
    second = await world.send("two", max_output_tokens=24)
    accepted = (await world.queued(second.reply_id)).accepted
    assert (accepted.model, accepted.echo.requested_model) == ("stub-mini", "stub")
    assert "You have reached your limit for stub, so stub-mini answers." in (accepted.echo.notice or "")
    assert second.allowance.limit == 50 * MINI_TOKENS_FACTOR
    answers = [await world.send("more", max_output_tokens=24) for _ in range(6)]
    refused = next(one for one in answers if not isinstance(one, Sent))
    assert refused.refusal.kind is RefusalKind.QUOTA
    assert refused.refusal.retry_after_s > 0
    assert refused.allowance.limit == 50
    assert isinstance(await world.send("theirs", who=BOB, max_output_tokens=24), Sent)


async def test_a_context_that_the_mini_model_cannot_take_is_refused_for_the_limit(
    world: World, valkey_url: str
) -> None:
    """The refusal speaks of the limit, not of a model that nobody asked for."""
    await world.service(**asking(300, valkey_url))
    long = "word " * 60
    assert isinstance(await world.send(long, max_output_tokens=16), Sent)
    refused = await world.send(long, max_output_tokens=16)
    assert refused.refusal.kind is RefusalKind.QUOTA
    assert "stub:" in refused.refusal.message


async def test_what_was_used_stays_charged_and_the_rest_comes_back(
    world: World, valkey_url: str, quotas: QuotaStore
) -> None:
    """A reply is charged its context and what it wrote; the same end told twice charges once."""
    await world.service(**asking(10_000, valkey_url))
    sent = await world.send("hello", max_output_tokens=100)
    reserved = (await quotas.totals(BUCKET)).reserved
    accepted = (await world.queued(sent.reply_id)).accepted
    assert reserved == accepted.input_tokens + accepted.budget
    await world.write(sent.reply_id, ["abc"])
    view = await world.archived(sent.reply_id)
    assert view.usage is not None
    used = view.usage.input_tokens + view.usage.output_tokens
    assert await settled(quotas) == Totals(reserved, used, reserved - used)
    await world.bus.append(
        "local.ended." + sent.reply_id,
        next(iter(world.server.stream("local_ENDED").entries.values())).data,
        message_id="again",
        timeout_s=1.0,
    )

    async def told_again() -> bool:
        return bool(world.metrics.registry.get_sample_value("chorus_quota_settled_total", {"outcome": "unknown"}))

    await until(told_again, "the second telling came")
    assert (await quotas.totals(BUCKET)).settled == used


async def test_every_token_is_accounted_for_after_many_endings(
    world: World, valkey_url: str, quotas: QuotaStore
) -> None:
    """After 200 replies that were written, stopped, superseded, refused, deleted or never queued: settled + refunded."""
    await world.service(**asking(1_000_000, valkey_url))

    async def one(number: int) -> int:
        sent = await world.send(f"m{number}", key=f"k{number}", store=number % 3 != 0)
        kind, used = number % 5, 0
        if kind == 0:
            await world.write(sent.reply_id, ["abc"])
        elif kind == 1:
            await world.ask("cancel", ref(sent.reply_id))
            await world.publish_ended(sent.reply_id)
        elif kind == 2:
            await world.write(sent.reply_id, ["ab"], reason=None)
            await world.ask("cancel", ref(sent.reply_id))
            await world.publish_ended(sent.reply_id)
        elif kind == 3:
            await world.ask("delete", ref(sent.reply_id))
            await world.publish_ended(sent.reply_id)
        else:
            await world.write(sent.reply_id, ["abcd"], reason=EndReason.MAX_TOKENS)
        view = await world.logs.read(sent.reply_id)
        if view.opened is not None and view.accepted is not None:
            used = view.accepted.input_tokens + len(view.ids)
        return used

    room = asyncio.Semaphore(16)

    async def bounded(number: int) -> int:
        async with room:
            return await one(number)

    used = await asyncio.gather(*(bounded(number) for number in range(200)))
    totals = await settled(quotas)
    assert totals.settled == sum(used)
    assert totals.reserved > totals.settled > 0


async def test_a_send_that_does_not_begin_gives_all_back(world: World, valkey_url: str, quotas: QuotaStore) -> None:
    """Fifty sends with one key reserve once in the end; what the others had reserved is refunded."""
    await world.service("conversation-1", **asking(1_000_000, valkey_url))
    await world.service("conversation-2", **asking(1_000_000, valkey_url))
    await asyncio.gather(*(world.send("hi", key="k") for _ in range(50)))
    (request,) = await world.all_queued()
    totals = await quotas.totals(BUCKET)
    leased = totals.reserved - totals.settled - totals.refunded
    assert leased == request.accepted.input_tokens + request.accepted.budget
    assert totals.settled == 0


async def test_without_valkey_nobody_is_metered_and_nothing_fails(world: World) -> None:
    """While Valkey is not there messages pass; the journal says so once, and the metric counts each."""
    await world.service(**asking(1, "redis://127.0.0.1:1/0"))
    for number in range(5):
        sent = await world.send(f"m{number}")
        assert sent.allowance is None
        await world.write(sent.reply_id, ["x"])
        await world.archived(sent.reply_id)
    count = world.metrics.registry.get_sample_value
    assert count("chorus_quota_reserved_total", {"outcome": "unmetered"}) == 5
    assert count("chorus_conversation_valkey_away") == 1
    notes = [entry.data for entry in world.server.stream("local_JOURNAL").entries.values()]
    assert sum(b"valkey_away" in note for note in notes) == 1


async def test_a_refused_message_leaves_the_running_reply_alone(world: World, valkey_url: str) -> None:
    """Past its user's limit a message ends nothing in its conversation; within it the newest is the one in flight."""
    await world.service(**asking(60, valkey_url))
    made = await world.ask("conversation_create", CreateConversation(principal=ANN, request_id="r"))
    running = (await world.send("one", conversation_id=made.id, max_output_tokens=24)).reply_id
    await world.write(running, ["half"], reason=None)
    while isinstance(await world.send("elsewhere", max_output_tokens=24), Sent):
        pass  # until the mini model has nothing left either
    refused = await world.send("two", conversation_id=made.id, max_output_tokens=24)
    assert refused.refusal.kind is RefusalKind.QUOTA
    too_long = await world.send("word " * 600, conversation_id=made.id)
    assert too_long.refusal.kind is RefusalKind.PROMPT_TOO_LONG
    assert (await world.logs.read(running)).ended is None
    named = ConversationRef(principal=ANN, request_id="r", conversation_id=made.id)
    view = await world.ask("conversation_get", named)
    assert (view.head, view.in_flight) == (running, running)


async def test_what_is_written_until_it_is_superseded_is_read(
    world: World, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply goes on while tokens are reserved for the next message, whose context holds it to its end."""
    await world.service(**asking(10_000, valkey_url))
    made = await world.ask("conversation_create", CreateConversation(principal=ANN, request_id="r"))
    running = (await world.send("one", conversation_id=made.id)).reply_id
    reserve = Quotas.reserve

    async def while_it_writes(*asked: Any) -> Any:
        view = await world.logs.read(running)
        if view.opened is None:
            await world.write(running, ["late"], reason=None)
        return await reserve(*asked)

    monkeypatch.setattr(Quotas, "reserve", while_it_writes)
    sent = await world.send("two", conversation_id=made.id)
    prompt = STUB.decode(unpack_ids((await world.queued(sent.reply_id)).prompt))
    assert prompt.index("one") < prompt.index("late") < prompt.index("two")
    ended = (await world.logs.read(running)).ended
    assert ended is not None
    assert ended.reason is EndReason.SUPERSEDED


async def test_what_the_database_took_back_is_tried_again() -> None:
    """A deadlock's victim is told as a database that is away for a moment: background tasks go on, doors say when."""
    assert issubclass(asyncpg.DeadlockDetectedError, UNAVAILABLE_ERRORS)
    assert issubclass(asyncpg.SerializationError, UNAVAILABLE_ERRORS)
