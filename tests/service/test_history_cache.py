"""The cache of histories: what it saves, and that nothing taken back, foreign or old ever comes out of it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.conversation.figures import Figures
from services.conversation.history_cache import HistoryCache, name_of
from shared.messages import (
    ConversationRef,
    CreateConversation,
    RegenerateReply,
    WithdrawReply,
    unpack_ids,
)
from shared.settings import Secret
from shared.telemetry import Metrics
from shared.valkey import Valkey
from tests.service.conversation_world import ANN, BOB, STUB, World, a_world, ref


@pytest.fixture
async def world(postgres_url: str, valkey_url: str) -> AsyncIterator[World]:
    async with a_world(postgres_url) as made:
        await made.service(redis_url=Secret(valkey_url))
        yield made


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[Valkey]:
    made = Valkey(valkey_url, call_s=10.0)
    yield made
    await made.close()


async def begun(world: World) -> str:
    view = await world.ask("conversation_create", CreateConversation(principal=ANN, request_id="r"))
    return str(view.id)


async def turn(world: World, conversation: str, text: str, reply: str, **more: Any) -> str:
    sent = await world.send(text, conversation_id=conversation, **more)
    await world.write(sent.reply_id, [reply])
    await world.archived(sent.reply_id)
    return str(sent.reply_id)


async def prompt(world: World, reply_id: str) -> str:
    return STUB.decode(unpack_ids((await world.queued(reply_id)).prompt))


def asked(world: World, outcome: str) -> float:
    return world.metrics.registry.get_sample_value("chorus_history_cache_total", {"outcome": outcome}) or 0


async def words(valkey: Valkey) -> bytes:
    """Every value that holds a history."""
    keys = await valkey.call("KEYS", "local:history:*")
    return b"".join([await valkey.call("GET", key) for key in keys])


async def test_a_remembered_history_makes_the_same_prompt(world: World, valkey: Valkey) -> None:
    """Turn by turn, regenerated and edited, each prompt equals the one that is made from the rows alone."""
    conversation = await begun(world)
    replies = [await turn(world, conversation, f"question {number}", f"answer {number}") for number in range(5)]
    again = RegenerateReply(principal=ANN, request_id="r", conversation_id=conversation)
    replies.append((await world.ask("regenerate", again)).reply_id)
    await world.write(replies[-1], ["other"])
    await world.archived(replies[-1])
    replies.append(await turn(world, conversation, "edited", "so", branch_from=replies[1]))
    assert asked(world, "hit") >= 5
    assert asked(world, "foreign") == 0
    for reply in replies:
        row = (await world.rows("SELECT parent_id, accepted FROM replies WHERE id = $1", reply))[0]
        items = (await world.ask("input_items", ref(reply))).items
        plain = await world.send("x", items=items, previous_response_id=row["parent_id"])
        assert await prompt(world, plain.reply_id) == await prompt(world, reply)


async def test_what_is_taken_back_is_in_no_prompt_and_in_no_cache(world: World, valkey: Valkey) -> None:
    """A deleted reply, a withdrawn text and a deleted conversation leave no word in Valkey, nor in the next prompt."""
    conversation = await begun(world)
    await turn(world, conversation, "one", "alpha")
    deleted = await turn(world, conversation, "canary-a", "canary-b")
    withdrawn = await turn(world, conversation, "two", "canary-c")
    await turn(world, conversation, "three", "beta")
    assert b"canary-a" in await words(valkey)
    await world.ask("delete", ref(deleted))
    assert b"canary" not in await words(valkey)
    await world.ask("withdraw", WithdrawReply(reply_id=withdrawn, category="x", shown_tokens=1))
    after = await turn(world, conversation, "four", "gamma")
    assert "canary" not in await prompt(world, after)
    assert "alpha" in await prompt(world, after)
    await turn(world, conversation, "canary-d", "delta")
    await turn(world, conversation, "five", "epsilon")
    assert b"canary-d" in await words(valkey)
    await world.ask("conversation_delete", ConversationRef(principal=ANN, request_id="r", conversation_id=conversation))
    assert b"canary" not in await words(valkey)


async def test_a_history_that_was_read_before_is_not_put_back(valkey: Valkey) -> None:
    """Whoever read a history before something in it was taken back cannot store it afterwards; a newer one can."""
    cache = HistoryCache(valkey, "local", Figures(Metrics()))
    for epoch, kept in ((3, False), (4, True)):
        await cache.forget("conv_1", 4)
        name = name_of(ANN, "conv_1", epoch)
        await cache.remember(name, "resp_1", 100, [])
        assert (await cache.get(name, 100) is not None) == kept
    await cache.forget("conv_1")
    await cache.remember(name_of(ANN, "conv_1", 9), "resp_1", 100, [])
    assert await cache.get(name_of(ANN, "conv_1", 9), 100) is None


async def test_an_entry_that_is_anothers_is_never_used(valkey: Valkey) -> None:
    """An entry under our key that names another owner, another epoch or too short a reading is none."""
    figures = Figures(Metrics())
    cache = HistoryCache(valkey, "local", figures)
    await cache.remember(name_of(BOB, "conv_1", 0), "resp_1", 100, [])
    assert await cache.get(name_of(ANN, "conv_1", 0), 100) is None
    assert figures.histories.labels("foreign")._value.get() == 1
    assert await cache.get(name_of(BOB, "conv_1", 1), 100) is None
    assert await cache.get(name_of(BOB, "conv_1", 0), 101) is None
    assert await cache.get(name_of(BOB, "conv_1", 0), 100) is not None
    await valkey.call("SET", "local:history:conv_1", b"\x93nonsense")
    assert await cache.get(name_of(BOB, "conv_1", 0), 100) is None
