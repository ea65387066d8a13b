"""Conversation on the in-memory bus and a real PostgreSQL, asked as the gateway asks."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.conversation import key_store
from shared import clock
from shared.blocks import block_hashes
from shared.messages import (
    End,
    InputItem,
    KeyLookup,
    SafetyCheck,
    Sent,
    Verdict,
    WithdrawReply,
    decoder,
    encode,
    unpack_ids,
)
from shared.outcomes import EndReason, RefusalKind
from shared.storage import borrow
from shared.tiers import Tier
from tests.service.conversation_world import ANN, BOB, NAMES, STUB, World, a_message, a_world, ref, seen, until


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[World]:
    async with a_world(postgres_url) as made:
        await made.service()
        yield made


async def test_a_message_is_stored_accepted_and_queued(world: World) -> None:
    """A send leaves a row, an `accepted` entry and one lane request that agree with each other."""
    sent = await world.send("hello", service_tier="flex")
    log = await world.logs.read(sent.reply_id)
    request = await world.queued(sent.reply_id)
    prompt = unpack_ids(request.prompt)
    assert log.accepted == request.accepted
    assert log.accepted_seq == request.accepted_seq
    assert request.accepted.tier is Tier.BACKGROUND
    assert request.accepted.seed == request.sampling.seed
    assert request.accepted.input_tokens == len(prompt)
    assert request.block_hashes == b"".join(block_hashes(prompt, request.domain))
    assert STUB.decode(prompt).endswith("user\nhello\nassistant\n")
    await until(lambda: world.rows("SELECT 1 FROM replies WHERE status = 'queued'"), "it is known to be queued")
    assert await world.rows("SELECT * FROM outbox") == []


# --- whose it is ----------------------------------------------------------------------------------------------


async def test_foreign_and_unknown_ids_have_one_answer(world: World) -> None:
    """Every verb answers a foreign reply as it answers an unknown one, running, ended, and never stored."""
    running = (await world.send("one")).reply_id
    ended = (await world.send("two")).reply_id
    await world.write(ended, ["x"])
    await world.archived(ended)
    unstored = (await world.send("three", store=False)).reply_id
    unknown = clock.new_reply_id("local", 0)
    for verb in ("get", "cancel", "delete", "input_items"):
        answers = [
            (await world.ask(verb, ref(reply, BOB))).refusal for reply in (running, ended, unstored, unknown, "resp_x")
        ]
        assert {answer.kind for answer in answers} == {RefusalKind.NOT_FOUND}
        said = {
            answer.message.replace(reply, "ID")
            for answer, reply in zip(answers, (running, ended, unstored, unknown, "resp_x"), strict=True)
        }
        assert len(said) == 1
    refused = await world.send("four", who=BOB, previous_response_id=ended)
    assert refused.refusal.kind is RefusalKind.NOT_FOUND
    assert (await world.ask("get", ref(running))).reason is None
    assert (await world.ask("get", ref(ended))).text == "x"


async def test_a_key_is_known_by_its_digest_until_it_is_revoked(world: World) -> None:
    """A created key is found, listed without its secret, and gone once revoked."""
    async with borrow(world.pool) as conn:
        key, row = await key_store.create_key(conn, org="acme", user="ann", tier=Tier.PAID, label="laptop")
        listed = await key_store.list_keys(conn, org="acme")
    lookup = KeyLookup(digest=key_store.digest_of(key))
    found = await world.ask("key", lookup)
    assert (found.principal.user, found.principal.tier, found.principal.key_id) == ("ann", Tier.PAID, row.id)
    assert key not in str(listed)
    async with borrow(world.pool) as conn:
        await key_store.revoke_key(conn, row.id)
    assert (await world.ask("key", lookup)).refusal.kind is RefusalKind.NOT_FOUND


# --- idempotency ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [True, False])
async def test_fifty_parallel_sends_with_one_key_are_one_reply(world: World, store: bool) -> None:
    """Over two instances, 50 sends with one key and body make one generation, and all name it."""
    await world.service("conversation-2")
    answers = await asyncio.gather(*(world.send("hi", key="k", store=store) for _ in range(50)))
    assert len({answer.reply_id for answer in answers}) == 1
    assert [answer.attached for answer in answers].count(False) == 1
    assert len(await world.all_queued()) == 1


async def test_a_key_with_another_body_is_refused(world: World) -> None:
    """The same key with another body is KEY_REUSED; another user's same key is their own."""
    await world.send("hi", key="k", body=b"one")
    assert (await world.send("ho", key="k", body=b"two")).refusal.kind is RefusalKind.KEY_REUSED
    assert not (await world.send("ho", key="k", body=b"two", who=BOB)).attached


async def test_an_unstored_send_that_died_on_its_way_is_taken_over(world: World) -> None:
    """With store=false only the client has the words: its retry queues the reply under the id of the first try."""
    reply_id = clock.new_reply_id("local", 0)
    await world.rows(
        "INSERT INTO idempotency (org, usr, key, body_hash, reply_id, created_at) VALUES ($1, $2, 'k', $3, $4, now())",
        ANN.org, ANN.user, b"body", reply_id,
    )  # fmt: skip
    sent = await world.send("secret", key="k", store=False)
    assert sent.reply_id == reply_id
    assert (await world.queued(reply_id)).reply_id == reply_id
    assert (await world.send("secret", key="k", store=False)).attached


# --- store=false ----------------------------------------------------------------------------------------------


async def test_nothing_of_an_unstored_reply_is_in_the_database(world: World, postgres_url: str) -> None:
    """With store=false no table holds a word of message or reply, and the reply is still told once at its end."""
    sent = await world.send("canary-in", key="k", store=False, instructions="canary-sys", metadata={"a": "canary-meta"})
    await world.write(sent.reply_id, ["canary-out"])
    await until(lambda: seen(world.finished(sent.reply_id)), "it is told")
    tables = await world.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    for table in tables:
        rows = await world.rows(f"SELECT t::text AS line FROM {table['tablename']} t")
        assert not [row["line"] for row in rows if "canary" in row["line"] or b"canary".hex() in row["line"]]
    assert (await world.ask("get", ref(sent.reply_id))).text == "canary-out"


# --- refusals -------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_refused(world: World) -> None:
    """A model outside the catalog is UNKNOWN_MODEL and names the field."""
    refused = await world.ask("send", a_message(model="gpt-9"))
    assert (refused.refusal.kind, refused.refusal.param) == (RefusalKind.UNKNOWN_MODEL, "model")


async def test_a_full_lane_is_an_honest_refusal(world: World) -> None:
    """A full lane refuses; the reply that was begun ends as failed in log and rows; the key is free again."""
    lane = world.server.stream(NAMES.lane_stream(Tier.PAID))
    room = lane.spec
    lane.spec = dataclasses.replace(room, max_messages=1)
    await world.send("first")
    refused = await world.send("second", key="k")
    assert refused.refusal.kind is RefusalKind.LANE_FULL
    assert refused.refusal.retry_after_s
    rows = await world.rows("SELECT id, status, reason FROM replies ORDER BY created_at")
    assert (rows[1]["status"], rows[1]["reason"]) == ("ended", "failed")
    assert (await world.logs.read(rows[1]["id"])).ended.reason is EndReason.FAILED
    assert await world.rows("SELECT * FROM outbox WHERE reply_id = $1", rows[1]["id"]) == []
    lane.spec = room

    async def taken() -> Any:
        answer = await world.send("second", key="k")
        return answer if isinstance(answer, Sent) else None

    assert not (await until(taken, "there is room again")).attached


@pytest.mark.parametrize(("flagged", "fail_open", "kind"), [
    (True, True, RefusalKind.FLAGGED), (False, True, None), (None, True, None), (None, False, RefusalKind.UNAVAILABLE),
])  # fmt: skip
async def test_the_input_check_decides_before_anything_is_stored(
    postgres_url: str, flagged: bool | None, fail_open: bool, kind: RefusalKind | None
) -> None:
    """A flag refuses and stores nothing; no safety service at all passes or refuses as the setting says."""
    async with a_world(postgres_url) as world:
        await world.service(safety_fail_open=fail_open)
        if flagged is not None:
            subscription = await world.bus.subscribe(NAMES.safety_check)

            async def judge() -> None:
                async for message in subscription:
                    assert decoder(SafetyCheck).decode(message.data).text == "be kind\nhello"
                    await world.bus.publish(message.reply, encode(Verdict(flagged=flagged, category="violence")))

            task = asyncio.create_task(judge())
        answer = await world.send("hello", instructions="be kind")
        stored = await world.rows("SELECT * FROM replies")
        if kind is None:
            assert len(stored) == 1
        else:
            assert answer.refusal.kind is kind
            assert stored == []
        if flagged is not None:
            await subscription.close()
            await task


# --- verbs on a reply -----------------------------------------------------------------------------------------


async def test_a_running_reply_is_read_from_its_log(world: World) -> None:
    """Get shows what the log holds so far, and after the end the stored reply with its usage."""
    reply = (await world.send("one")).reply_id
    await world.write(reply, ["so far"], reason=None)
    view = await world.ask("get", ref(reply))
    assert (view.text, view.reason, view.log_alive) == ("so far", None, True)
    log = await world.logs.read(reply)
    await world.logs.append(reply, log.last_seq, encode(End(reason=EndReason.MAX_TOKENS, by="r1", ended_s=1.0)))
    await world.publish_ended(reply)
    await world.archived(reply)
    view = await world.ask("get", ref(reply))
    assert (view.text, view.reason, view.log_alive) == ("so far", EndReason.MAX_TOKENS, True)
    assert view.usage.output_tokens == len("so far")
    await world.logs.purge(reply)
    assert (await world.ask("get", ref(reply))) == msgspec.structs.replace(view, log_alive=False)


async def test_cancel_is_once_and_never_changes_an_end(world: World) -> None:
    """Stops end the log once, whoever sends them, before and after the archive; another end stays what it was."""
    reply = (await world.send("one")).reply_id
    heard = await world.bus.subscribe(NAMES.cancel(reply))
    await asyncio.gather(*(world.ask("cancel", ref(reply)) for _ in range(5)))
    assert await heard.next(5.0) is not None
    view = await world.ask("get", ref(reply))
    assert view.reason is EndReason.USER_STOP
    await world.publish_ended(reply)
    await world.archived(reply)
    await world.ask("cancel", ref(reply))
    again = await world.ask("get", ref(reply))
    assert (again.reason, again.ended_s) == (view.reason, pytest.approx(view.ended_s, abs=1e-5))
    complete = (await world.send("two")).reply_id
    await world.write(complete, ["x"])
    await world.ask("cancel", ref(complete))
    assert (await world.ask("get", ref(complete))).reason is EndReason.STOP_TOKEN


async def test_a_reply_stopped_while_it_is_in_the_outbox_is_never_queued(world: World) -> None:
    """A reply that is stored, without a log, stops without one."""
    reply = (await world.send("one")).reply_id
    await world.logs.purge(reply)
    await world.rows("UPDATE replies SET status = 'accepted'")
    await world.ask("cancel", ref(reply))
    assert (await world.ask("get", ref(reply))).reason is EndReason.USER_STOP


@pytest.mark.parametrize("store", [True, False])
async def test_a_deleted_reply_is_gone_everywhere(world: World, store: bool) -> None:
    """Deleting a running reply ends it, hides it at once, and removes rows, log and ENDED record once it is archived."""
    reply = (await world.send("one", key="k", store=store)).reply_id
    await world.write(reply, ["x"], reason=None)
    await world.ask("delete", ref(reply))
    assert (await world.logs.read(reply)).ended is not None
    assert (await world.ask("get", ref(reply))).refusal.kind is RefusalKind.NOT_FOUND
    await world.publish_ended(reply)

    async def purged() -> bool:
        ended = await world.bus.last(NAMES.ended_stream, NAMES.ended(reply))
        return ended is None and (await world.logs.read(reply)).accepted is None

    await until(purged, "log and ENDED record are removed")
    for table in ("replies", "items", "idempotency", "outbox"):
        assert await world.rows(f"SELECT * FROM {table}") == []
    assert (await world.ask("get", ref(reply))).refusal.kind is RefusalKind.NOT_FOUND
    assert len(world.finished(reply)) == 1


@pytest.mark.parametrize("archived_first", [True, False])
async def test_a_withdrawn_text_is_shown_no_more(world: World, archived_first: bool) -> None:
    """A late flag takes the text back, from the rows, from later contexts and from the log, before or after the archive."""
    reply = (await world.send("one")).reply_id
    await world.write(reply, ["bad"], reason=None)
    log = await world.logs.read(reply)
    await world.logs.append(reply, log.last_seq, encode(End(reason=EndReason.STOP_TOKEN, by="r1", ended_s=1.0)))
    order = WithdrawReply(reply_id=reply, category="x", shown_tokens=3)
    if archived_first:
        await world.publish_ended(reply)
        await world.archived(reply)
        await world.ask("withdraw", order)
    else:
        await world.ask("withdraw", order)
        assert (await world.ask("get", ref(reply))).text == ""
        await world.publish_ended(reply)
        await world.archived(reply)

    async def purged() -> bool:
        return (await world.logs.read(reply)).accepted is None

    await until(purged, "the log is removed")
    view = await world.ask("get", ref(reply))
    assert (view.text, view.ids, view.withdrawn, view.reason) == ("", b"", True, EndReason.STOP_TOKEN)
    nxt = await world.send("two", previous_response_id=reply)
    assert "bad" not in STUB.decode(unpack_ids((await world.queued(nxt.reply_id)).prompt))


async def test_input_items_come_back_typed_and_whole(world: World) -> None:
    """Input items are listed in order with ids, and a text with NUL and all of Unicode comes back as it was."""
    text = "a\0b \u2603 \U0001f600 \u200b"
    sent = await world.send(items=(InputItem(role="developer", text="d"), InputItem(role="user", text=text)))
    listed = (await world.ask("input_items", ref(sent.reply_id))).items
    assert [(item.role, item.text, item.kind) for item in listed] == [
        ("developer", "d", "text"),
        ("user", text, "text"),
    ]
    assert all(item.id.startswith("msg_") for item in listed)
