"""Conversation objects on a real PostgreSQL: titles, order, search, branches, one reply in flight, deletion."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared import clock
from shared.messages import (
    ROOT,
    ConversationItem,
    ConversationRef,
    CreateConversation,
    Done,
    InputItem,
    ListConversations,
    ListItems,
    Principal,
    RegenerateReply,
    UpdateConversation,
    unpack_ids,
)
from shared.outcomes import EndReason, RefusalKind
from tests.service.conversation_world import ANN, BOB, NAMES, STUB, World, a_world, ref, until


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[World]:
    async with a_world(postgres_url) as made:
        await made.service()
        yield made


async def made(world: World, who: Principal = ANN, **more: Any) -> Any:
    return await world.ask("conversation_create", CreateConversation(principal=who, request_id="r", **more))


async def view(world: World, conversation_id: str, who: Principal = ANN) -> Any:
    return await world.ask("conversation_get", named(conversation_id, who))


def named(conversation_id: str, who: Principal = ANN) -> ConversationRef:
    return ConversationRef(principal=who, request_id="r", conversation_id=conversation_id)


async def listed(world: World, who: Principal = ANN, limit: int = 20, **more: Any) -> Any:
    return await world.ask("conversation_list", ListConversations(principal=who, request_id="r", limit=limit, **more))


async def items(world: World, conversation_id: str, limit: int = 100, **more: Any) -> list[ConversationItem]:
    order = ListItems(principal=ANN, request_id="r", conversation_id=conversation_id, limit=limit, **more)
    return list((await world.ask("conversation_items", order)).items)


async def again(world: World, conversation_id: str, who: Principal = ANN, **more: Any) -> Any:
    order = RegenerateReply(principal=who, request_id="r", conversation_id=conversation_id, **more)
    return await world.ask("regenerate", order)


async def update(world: World, conversation_id: str, who: Principal = ANN, **more: Any) -> Any:
    order = UpdateConversation(principal=who, request_id="r", conversation_id=conversation_id, **more)
    return await world.ask("conversation_update", order)


async def turn(world: World, conversation_id: str, text: str, reply: str, **more: Any) -> str:
    sent = await world.send(text, conversation_id=conversation_id, **more)
    await world.write(sent.reply_id, [reply])
    await world.archived(sent.reply_id)
    return str(sent.reply_id)


def texts(found: list[ConversationItem]) -> list[str]:
    return [one.item.text for one in found]


# --- the object -----------------------------------------------------------------------------------------------


async def test_a_title_comes_from_the_first_message_until_it_is_set(world: World) -> None:
    """The first message names the conversation, a person may name it otherwise, and an empty name brings the first back."""
    conversation = (await made(world, metadata={"topic": "x"})).id
    assert (await view(world, conversation)).title == ""
    await turn(world, conversation, "  How do\nI boil an egg? " + "word " * 40, "slowly")
    titled = await view(world, conversation)
    assert titled.title.startswith("How do I boil an egg? word")
    assert len(titled.title) <= 80
    await turn(world, conversation, "and then", "eat it")
    assert (await view(world, conversation)).title == titled.title
    assert (await update(world, conversation, title="Eggs")).title == "Eggs"
    assert (await update(world, conversation, metadata={"title": "Eggs 2"})).title == "Eggs 2"
    assert (await update(world, conversation, title="")).title == titled.title
    assert (await view(world, conversation)).metadata == {"title": "Eggs 2"}


async def test_conversations_are_listed_last_changed_first(world: World) -> None:
    """A list is one user's, newest change first, in pages that neither repeat nor leave out."""
    every = [(await made(world, title=f"t{number}")).id for number in range(5)]
    foreign = (await made(world, BOB, title="theirs")).id
    await turn(world, every[1], "hello", "world")
    order = [every[1], every[4], every[3], every[2], every[0]]
    assert [one.id for one in (await listed(world)).conversations] == order
    seen: list[str] = []
    while True:
        found = await listed(world, limit=2, after=seen[-1] if seen else None)
        seen += [one.id for one in found.conversations]
        if not found.has_more:
            break
    assert seen == order
    assert [one.id for one in (await listed(world, BOB)).conversations] == [foreign]
    assert (await listed(world, after=foreign)).refusal.kind is RefusalKind.NOT_FOUND


@pytest.mark.parametrize("said", ["100% of _it", 'a "quoted" \\ word', "日本語", "line\nbreak"])
async def test_search_finds_words_in_titles_messages_and_replies(world: World, said: str) -> None:
    """What was said is found wherever it stands, as it was written, and nothing else is.

    (The scripted model writes bytes, so only ASCII can be looked for in its replies.)
    """
    by_title = (await made(world, title=f"about {said} x")).id
    by_message, by_reply, other = [(await made(world)).id for _ in range(3)]
    await turn(world, by_message, f"and {said}?", "no")
    await turn(world, by_reply, "what", f"so {said}.")
    await turn(world, other, "text kind", "100x of wit")
    found = {one.id for one in (await listed(world, search=said)).conversations}
    one_line = "\n" not in said  # as a title is
    assert found == {by_message, *([by_reply] if said.isascii() else []), *([by_title] if one_line else [])}
    assert (await listed(world, BOB, search=said)).conversations == ()


async def test_what_was_said_before_is_where_a_conversation_begins(world: World) -> None:
    """Items given at the start are the first turn: they are listed, named by, and part of the first context."""
    given = (
        InputItem(role="system", text="be brief"),
        InputItem(role="user", text="old question"),
        InputItem(role="assistant", text="old answer"),
    )
    conversation = await made(world, items=given)
    assert conversation.title == "old question"
    sent = await world.send("new question", conversation_id=conversation.id)
    prompt = STUB.decode(unpack_ids((await world.queued(sent.reply_id)).prompt))
    assert "be brief" in prompt
    assert prompt.index("old question") < prompt.index("old answer") < prompt.index("new question")
    assert "assistant\nold answer" in prompt
    assert "assistant\n<|im_end|>" not in prompt
    found = await items(world, conversation.id, ascending=True)
    assert texts(found) == ["be brief", "old question", "old answer", "new question", ""]
    assert [one.parent_id for one in found] == [None, *(one.item.id for one in found[:-1])]
    assert (await world.ask("get", ref(found[0].reply_id))).refusal.kind is RefusalKind.NOT_FOUND


# --- branches -------------------------------------------------------------------------------------------------


async def test_a_reply_written_anew_is_a_branch_under_the_same_message(world: World) -> None:
    """Regenerating answers the same message in the same context; both replies stay, under one message item."""
    conversation = (await made(world)).id
    first = await turn(world, conversation, "one", "first")
    second = await turn(world, conversation, "two", "second")
    other = (await again(world, conversation)).reply_id
    assert (await world.queued(other)).prompt == (await world.queued(second)).prompt
    assert (await world.queued(other)).sampling.seed != (await world.queued(second)).sampling.seed
    await world.write(other, ["other"])
    await world.archived(other)
    tree = {one.reply_id: one for one in await items(world, conversation, branches=True) if one.written}
    assert tree[other].parent_id == tree[second].parent_id
    assert (tree[other].active, tree[second].active, tree[first].active) == (True, False, True)
    assert texts(await items(world, conversation, ascending=True)) == ["one", "first", "two", "other"]
    assert len(await items(world, conversation, branches=True)) == 5
    named_one = (await again(world, conversation, reply_id=first)).reply_id
    assert (await world.queued(named_one)).prompt == (await world.queued(first)).prompt
    assert texts(await items(world, conversation, ascending=True)) == ["one", ""]


async def test_an_edited_message_branches_off_where_it_stood(world: World) -> None:
    """A message sent from an earlier reply, or from the root, follows that alone, and its branch becomes the active one."""
    conversation = (await made(world)).id
    first = await turn(world, conversation, "one", "first")
    second = await turn(world, conversation, "two", "second")
    edited = await turn(world, conversation, "two, edited", "third", branch_from=first)
    prompt = STUB.decode(unpack_ids((await world.queued(edited)).prompt))
    assert "first" in prompt
    assert "second" not in prompt
    tree = {one.item.text: one for one in await items(world, conversation, branches=True)}
    assert tree["two, edited"].parent_id == tree["two"].parent_id == tree["first"].item.id
    assert [tree[text].active for text in ("two", "second", "two, edited", "third")] == [False, False, True, True]
    await turn(world, conversation, "anew", "root", branch_from=ROOT)
    assert texts(await items(world, conversation, ascending=True)) == ["anew", "root"]
    assert (await update(world, conversation, head=second)).head == second
    assert texts(await items(world, conversation, ascending=True)) == ["one", "first", "two", "second"]


async def test_a_branch_point_of_another_conversation_is_not_found(world: World) -> None:
    """A reply of another conversation, another user's, or none at all is no branch point, no head, and not written anew."""
    here, elsewhere = (await made(world)).id, (await made(world)).id
    foreign = (await made(world, BOB)).id
    other = await turn(world, elsewhere, "x", "y")
    sent = await world.send("x", who=BOB, conversation_id=foreign)
    answers: set[Any] = set()
    for reply in (other, sent.reply_id, clock.new_reply_id("local", 0)):
        for answer in (
            await world.send("m", conversation_id=here, branch_from=reply),
            await update(world, here, head=reply),
            await again(world, here, reply_id=reply),
        ):
            answers.add((answer.refusal.kind, answer.refusal.message.replace(reply, "ID")))
    assert answers == {(RefusalKind.NOT_FOUND, "No reply ID was found in this conversation.")}
    assert (await again(world, here)).refusal.kind is RefusalKind.BAD_REQUEST


async def test_five_presses_of_regenerate_cost_one_live_reply(world: World) -> None:
    """Pressed five times at once over two instances: one reply is live, four are superseded, all stay as branches."""
    await world.service("conversation-2")
    conversation = (await made(world)).id
    await turn(world, conversation, "one", "first")
    sent = await asyncio.gather(*(again(world, conversation) for _ in range(5)))
    replies = [one.reply_id for one in sent]
    ends = [(await world.logs.read(reply)).ended for reply in replies]
    assert [end and end.reason for end in ends].count(None) == 1
    assert [end.reason for end in ends if end is not None] == [EndReason.SUPERSEDED] * 4
    live = replies[ends.index(None)]
    assert (await view(world, conversation)).head == live
    tree = [one for one in await items(world, conversation, branches=True) if one.written]
    assert {one.reply_id for one in tree} >= set(replies)
    assert len({one.parent_id for one in tree}) == 1
    assert [one.reply_id for one in tree if one.active] == [live]


async def test_one_message_sent_twice_at_once_does_not_supersede_itself(world: World) -> None:
    """Under one idempotency key, in one conversation, over two instances: one reply, and it lives."""
    await world.service("conversation-2")
    for number in range(5):
        conversation = (await made(world)).id
        sends = (world.send("one", conversation_id=conversation, key=f"k{number}") for _ in range(6))
        (reply,) = {one.reply_id for one in await asyncio.gather(*sends)}
        assert (await world.logs.read(reply)).ended is None
        assert [one.reply_id for one in await items(world, conversation) if one.written] == [reply]


async def test_a_reply_on_another_branch_is_superseded_too(world: World) -> None:
    """One reply is in flight per conversation, wherever its head has been moved meanwhile."""
    conversation = (await made(world)).id
    first = await turn(world, conversation, "one", "first")
    running = (await world.send("two", conversation_id=conversation)).reply_id
    assert (await view(world, conversation)).in_flight == running
    await update(world, conversation, head=first)
    await world.send("three", conversation_id=conversation)
    ended = (await world.logs.read(running)).ended
    assert ended is not None
    assert ended.reason is EndReason.SUPERSEDED


async def test_pages_of_items_neither_repeat_nor_leave_out(world: World) -> None:
    """Both orders, with branches and without, in pages of two, are the whole list."""
    conversation = (await made(world)).id
    for number in range(3):
        await turn(world, conversation, f"m{number}", f"r{number}")
    other = (await again(world, conversation)).reply_id
    await world.write(other, ["other"])
    await world.archived(other)
    for branches in (True, False):
        for ascending in (True, False):
            whole = await items(world, conversation, branches=branches, ascending=ascending)
            paged: list[ConversationItem] = []
            while len(paged) < len(whole):
                after = paged[-1].item.id if paged else None
                more = await items(world, conversation, 2, branches=branches, ascending=ascending, after=after)
                assert more
                paged += more
            assert paged == whole
    order = ListItems(principal=ANN, request_id="r", conversation_id=conversation, limit=2, after="msg_x")
    assert (await world.ask("conversation_items", order)).refusal.kind is RefusalKind.NOT_FOUND


async def test_long_items_come_in_several_answers(world: World) -> None:
    """An answer holds what fits on the bus and says that there is more."""
    given = tuple(InputItem(role="user", text="x" * 300_000) for _ in range(3))
    conversation = (await made(world, items=given)).id
    order = ListItems(principal=ANN, request_id="r", conversation_id=conversation, limit=100, ascending=True)
    found = await world.ask("conversation_items", order)
    assert (len(found.items), found.has_more) == (1, True)


# --- whose it is, and its end -----------------------------------------------------------------------------------


async def test_a_foreign_conversation_is_an_unknown_one_on_every_verb(world: World) -> None:
    """Each verb answers another user's conversation as one that never was, and nothing of it changes."""
    foreign = (await made(world, title="theirs")).id
    reply = await turn(world, foreign, "secret", "answer")
    before = await view(world, foreign), await items(world, foreign)
    said = set()
    for conversation in (foreign, clock.new_conversation_id(), "conv_x"):
        common: Any = {"principal": BOB, "request_id": "r", "conversation_id": conversation}
        for answer in (
            await view(world, conversation, BOB),
            await world.ask("conversation_items", ListItems(limit=5, **common)),
            await update(world, conversation, BOB, title="mine now", head=reply),
            await world.ask("conversation_delete", named(conversation, BOB)),
            await again(world, conversation, BOB, reply_id=reply),
            await world.send("x", who=BOB, conversation_id=conversation),
            await listed(world, BOB, after=conversation),
        ):
            said.add((answer.refusal.kind, answer.refusal.message.replace(conversation, "ID")))
    assert said == {(RefusalKind.NOT_FOUND, "No conversation ID was found.")}
    assert (await view(world, foreign), await items(world, foreign)) == before


async def test_deleting_reaches_rows_logs_and_stored_ends(world: World) -> None:
    """After a deletion, with a reply running, no row, log or ENDED record of the conversation is left, and no word."""
    conversation = (await made(world, title="canary", metadata={"a": "canary"})).id
    ended = await turn(world, conversation, "canary", "canary", key="k")
    running = (await world.send("canary", conversation_id=conversation)).reply_id
    assert isinstance(await world.ask("conversation_delete", named(conversation)), Done)
    assert (await world.logs.read(running)).ended is not None
    await world.publish_ended(running)
    for reply in (ended, running):
        assert (await world.ask("get", ref(reply))).refusal.kind is RefusalKind.NOT_FOUND

    async def purged() -> bool:
        return await world.rows("SELECT * FROM purges") == []

    await until(purged, "logs are purged")
    for table in await world.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        rows = await world.rows(f"SELECT t::text AS line FROM {table['tablename']} t")
        assert not [row["line"] for row in rows if "canary" in row["line"]]
        assert not [row["line"] for row in rows if ended in row["line"] or running in row["line"]]
    kept = world.server.stream(NAMES.ended_stream).entries.values()
    assert not [entry for entry in kept if b"canary" in entry.data]
    assert (await view(world, conversation)).refusal.kind is RefusalKind.NOT_FOUND
    assert (await world.send("x", conversation_id=conversation)).refusal.kind is RefusalKind.NOT_FOUND
