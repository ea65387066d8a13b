"""Single items of a conversation on a real PostgreSQL: put in, read, and taken out of every later context."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared import clock
from shared.ids import output_item_id
from shared.messages import (
    ROOT,
    AddItems,
    ConversationItem,
    ConversationRef,
    CreateConversation,
    InputItem,
    ItemRef,
    ListItems,
    Principal,
    RegenerateReply,
    unpack_ids,
)
from shared.outcomes import EndReason, RefusalKind
from shared.settings import Secret
from tests.service.conversation_world import ANN, BOB, NAMES, STUB, World, a_world, ref, until


@pytest.fixture
async def world(postgres_url: str, valkey_url: str) -> AsyncIterator[World]:
    """With the cache of histories, which must forget what is deleted."""
    async with a_world(postgres_url) as made:
        await made.service(redis_url=Secret(valkey_url))
        yield made


async def begun(world: World, **more: Any) -> str:
    order = CreateConversation(principal=ANN, request_id="r", **more)
    return str((await world.ask("conversation_create", order)).id)


async def added(world: World, conversation: str, *texts: str, who: Principal = ANN, role: str = "user") -> Any:
    said = tuple(InputItem(role=role, text=text) for text in texts)
    order = AddItems(principal=who, request_id="r", conversation_id=conversation, items=said)
    return await world.ask("conversation_items_add", order)


def item(conversation: str, item_id: str, who: Principal = ANN) -> ItemRef:
    return ItemRef(principal=who, request_id="r", conversation_id=conversation, item_id=item_id)


async def every(world: World, conversation: str, **more: Any) -> list[ConversationItem]:
    order = ListItems(principal=ANN, request_id="r", conversation_id=conversation, limit=100, ascending=True, **more)
    return list((await world.ask("conversation_items", order)).items)


async def texts(world: World, conversation: str) -> list[str]:
    return [one.item.text for one in await every(world, conversation)]


async def view(world: World, conversation: str) -> Any:
    order = ConversationRef(principal=ANN, request_id="r", conversation_id=conversation)
    return await world.ask("conversation_get", order)


async def again(world: World, conversation: str, **more: Any) -> Any:
    order = RegenerateReply(principal=ANN, request_id="r", conversation_id=conversation, **more)
    return await world.ask("regenerate", order)


async def turn(world: World, conversation: str, text: str, reply: str, **more: Any) -> str:
    sent = await world.send(text, conversation_id=conversation, **more)
    await world.write(sent.reply_id, [reply])
    await world.archived(sent.reply_id)
    return str(sent.reply_id)


async def prompt(world: World, conversation: str, text: str = "next", **more: Any) -> str:
    """What a model would read of a message sent now."""
    sent = await world.send(text, conversation_id=conversation, **more)
    return STUB.decode(unpack_ids((await world.queued(sent.reply_id)).prompt))


# --- put in ---------------------------------------------------------------------------------------------------


async def test_added_items_are_part_of_the_next_context(world: World) -> None:
    """They stand behind the head in the order given, with ids of their own, and the next message follows them."""
    conversation = await begun(world)
    await turn(world, conversation, "one", "first")
    made = (await added(world, conversation, "two", "three")).items
    await added(world, conversation, "noted", role="assistant")
    assert [one.item.text for one in made] == ["two", "three"]
    assert all(one.active and one.item.id.startswith("msg_") for one in made)
    assert await texts(world, conversation) == ["one", "first", "two", "three", "noted"]
    read = await prompt(world, conversation)
    places = [read.index(text) for text in ("one", "first", "two", "three", "noted", "next")]
    assert places == sorted(places)
    found = await every(world, conversation)
    assert [one.parent_id for one in found] == [None, *(one.item.id for one in found[:-1])]


async def test_items_may_be_added_while_a_reply_runs(world: World) -> None:
    """The running reply is left alone; the next message ends it and follows what it had written and what was added."""
    conversation = await begun(world)
    running = (await world.send("one", conversation_id=conversation)).reply_id
    await world.write(running, ["half"], reason=None)
    await added(world, conversation, "meanwhile")
    assert (await world.logs.read(running)).ended is None
    read = await prompt(world, conversation)
    assert read.index("half") < read.index("meanwhile") < read.index("next")
    ended = (await world.logs.read(running)).ended
    assert ended is not None
    assert ended.reason is EndReason.SUPERSEDED


async def test_the_first_added_message_names_the_conversation(world: World) -> None:
    """A conversation without a title gets one, and there is no reply to write anew."""
    conversation = await begun(world)
    await added(world, conversation, "How thick are walls?")
    assert (await view(world, conversation)).title == "How thick are walls?"
    assert (await again(world, conversation)).refusal.kind is RefusalKind.BAD_REQUEST


async def test_an_item_is_read_by_its_id_on_any_branch(world: World) -> None:
    """Messages and replies, active or not, are what the list says they are."""
    conversation = await begun(world)
    await turn(world, conversation, "one", "first")
    await turn(world, conversation, "anew", "second", branch_from=ROOT)
    listed = await every(world, conversation, branches=True)
    assert len(listed) == 4
    for one in listed:
        assert (await world.ask("conversation_item", item(conversation, one.item.id))).items == (one,)


# --- taken out ------------------------------------------------------------------------------------------------


async def test_a_deleted_message_is_out_of_every_branch_and_context(world: World) -> None:
    """It is neither listed nor read by a model any more, under the replies that share it, and no row holds it."""
    conversation = await begun(world)
    first = await turn(world, conversation, "canary", "first")
    await world.write((await again(world, conversation)).reply_id, ["other"])
    await turn(world, conversation, "two", "second")
    assert "canary" in await prompt(world, conversation)  # and is remembered
    assert (await view(world, conversation)).title == "canary"
    gone = (await every(world, conversation))[0].item.id
    left = await world.ask("conversation_item_delete", item(conversation, gone))
    assert left.title == ""
    assert "canary" not in await prompt(world, conversation, "after")
    assert "canary" not in await prompt(world, conversation, "elsewhere", branch_from=first)
    tree = await every(world, conversation, branches=True)
    assert {"first", "other", "two", "second"} <= {one.item.text for one in tree}
    assert {one.parent_id for one in tree if one.item.text in ("first", "other")} == {None}
    for table in ("items", "conversations", "replies"):
        rows = await world.rows(f"SELECT t::text AS line FROM {table} t")
        assert not [row["line"] for row in rows if "canary" in row["line"]]
    refused = await again(world, conversation, reply_id=first)
    assert refused.refusal.kind is RefusalKind.BAD_REQUEST


async def test_a_deleted_reply_is_gone_everywhere_and_its_message_stays(world: World) -> None:
    """The reply cannot be read by any id, its log and ENDED record go, and the context holds its message alone."""
    conversation = await begun(world)
    reply = await turn(world, conversation, "one", "canary", key="k")
    await turn(world, conversation, "two", "second")
    assert "canary" in await prompt(world, conversation)
    await world.ask("conversation_item_delete", item(conversation, output_item_id(reply)))
    assert (await world.ask("get", ref(reply))).refusal.kind is RefusalKind.NOT_FOUND
    read = await prompt(world, conversation, "after")
    assert "canary" not in read
    assert read.index("one") < read.index("two") < read.index("second") < read.index("after")

    async def purged() -> bool:
        return await world.rows("SELECT * FROM purges") == []

    await until(purged, "its log is purged")
    rows = await world.rows("SELECT t::text AS line FROM replies t")
    assert not [row["line"] for row in rows if "canary" in row["line"]]
    kept = world.server.stream(NAMES.ended_stream).entries.values()
    assert not [entry for entry in kept if b"canary" in entry.data]
    assert (await world.send("one", conversation_id=conversation, key="k")).attached is False


async def test_a_running_reply_is_ended_before_it_is_deleted(world: World) -> None:
    """It ends as stopped, and the end that is archived afterwards brings none of its words back."""
    conversation = await begun(world)
    running = (await world.send("one", conversation_id=conversation)).reply_id
    await world.write(running, ["canary"], reason=None)
    await world.ask("conversation_item_delete", item(conversation, output_item_id(running)))
    ended = (await world.logs.read(running)).ended
    assert ended is not None
    assert ended.reason is EndReason.USER_STOP
    await world.publish_ended(running)

    async def settled() -> bool:
        return await world.rows("SELECT 1 FROM replies WHERE id = $1 AND status = 'ended'", running) != []

    await until(settled, "its end is archived")
    assert await texts(world, conversation) == ["one"]
    assert "canary" not in await prompt(world, conversation)


async def test_a_turn_of_which_nothing_is_left_leaves_the_tree_whole(world: World) -> None:
    """What followed it follows what was before it."""
    conversation = await begun(world)
    await turn(world, conversation, "one", "first")
    await added(world, conversation, "between")
    await turn(world, conversation, "two", "second")
    found = {one.item.text: one.item.id for one in await every(world, conversation)}
    await world.ask("conversation_item_delete", item(conversation, found["between"]))
    left = await every(world, conversation)
    assert [one.item.text for one in left] == ["one", "first", "two", "second"]
    assert [one.parent_id for one in left] == [None, *(one.item.id for one in left[:-1])]


async def test_foreign_items_are_unknown_ones(world: World) -> None:
    """Another user's item, one of another conversation, a deleted one and none at all: one answer, and nothing changes."""
    conversation, elsewhere = await begun(world), await begun(world)
    theirs = CreateConversation(principal=BOB, request_id="r", items=(InputItem(role="user", text="secret"),))
    foreign = await world.ask("conversation_create", theirs)
    seen = await world.ask(
        "conversation_items", ListItems(principal=BOB, request_id="r", conversation_id=foreign.id, limit=5)
    )
    other = (await added(world, elsewhere, "other")).items[0].item.id
    dead = (await added(world, conversation, "dead")).items[0].item.id
    await world.ask("conversation_item_delete", item(conversation, dead))
    said = set()
    for one in (
        seen.items[0].item.id,
        other,
        dead,
        clock.new_item_id(),
        output_item_id(clock.new_reply_id("local", 0)),
    ):
        for verb in ("conversation_item", "conversation_item_delete"):
            refusal = (await world.ask(verb, item(conversation, one))).refusal
            said.add((refusal.kind, refusal.message.replace(one, "ID")))
    assert said == {(RefusalKind.NOT_FOUND, "No item ID was found in this conversation.")}
    for verb in ("conversation_item", "conversation_item_delete"):
        refusal = (await world.ask(verb, item(foreign.id, seen.items[0].item.id))).refusal
        assert refusal.message == f"No conversation {foreign.id} was found."
    assert (await added(world, foreign.id, "mine")).refusal.message == f"No conversation {foreign.id} was found."
    assert await texts(world, elsewhere) == ["other"]
