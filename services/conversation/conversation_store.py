"""Conversation objects in PostgreSQL: their rows, their trees, and the end of all of it.

Every statement names the owner; unknown and foreign are the same None. Raises StoreAwayError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.conversation.replies import State
from services.conversation.rows import (
    Cause,
    EncodedItem,
    Line,
    Purge,
    as_json,
    read_accepted,
    read_item,
    read_output,
    read_sampling,
)
from services.conversation.store import BATCH_S, Store, insert_items, note_purge
from services.conversation.tree import Node, TurnNode
from shared.limits import CONVERSATION_REPLIES_MAX, CONVERSATIONS_SEARCHED_MAX
from shared.messages import Accepted, ConversationItem, ConversationView, InputItem, Principal, Sampling
from shared.outcomes import EndReason
from shared.storage import Connection

_metadata = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True)
class Source:
    """What a reply was made from: enough to ask for another one."""

    accepted: Accepted
    sampling: Sampling
    parent_id: str | None
    items: tuple[InputItem, ...]


@dataclass(frozen=True)
class SeedTurn:
    """Items that a conversation begins with, or that were put into it, as a turn that nobody replied to."""

    accepted: Accepted
    tokenizer: str
    items: Sequence[EncodedItem]


class ConversationStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, view: ConversationView, who: Principal, seed: SeedTurn | None) -> None:
        async with self._store.connection() as conn, conn.transaction():
            await conn.execute(
                "INSERT INTO conversations (id, org, usr, metadata, head_id, created_at, updated_at, title)"
                " VALUES ($1, $2, $3, $4, $5, to_timestamp($6), to_timestamp($7), $8)",
                view.id,
                who.org,
                who.user,
                as_json(view.metadata),
                None if seed is None else seed.accepted.reply_id,
                view.created_s,
                view.updated_s,
                view.title,
            )
            if seed is not None:
                await _insert_items_turn(conn, view.id, seed, None)

    async def add(self, who: Principal, conversation_id: str, turn: SeedTurn, title: str) -> bool:
        """A turn behind the head, as the new head; False when the conversation is gone. `title`: if it has none yet."""
        async with self._store.connection() as conn, conn.transaction():
            row = await conn.fetchrow(
                "SELECT head_id FROM conversations WHERE id = $1 AND org = $2 AND usr = $3 FOR UPDATE",
                conversation_id,
                who.org,
                who.user,
            )
            if row is None:
                return False
            await _insert_items_turn(conn, conversation_id, turn, row["head_id"])
            await conn.execute(
                "UPDATE conversations SET head_id = $2, version = version + 1, updated_at = to_timestamp($3),"
                " title = CASE WHEN title = '' THEN $4 ELSE title END WHERE id = $1",
                conversation_id,
                turn.accepted.reply_id,
                turn.accepted.created_s,
                title,
            )
        return True

    async def remove_message(self, who: Principal, conversation_id: str, item_id: str) -> int | None:
        """An item of a message, from every turn that has it; the epoch since, None when there is none."""
        async with self._store.connection() as conn, conn.transaction():
            gone = await conn.fetch(_REMOVE_ITEM, conversation_id, item_id, who.org, who.user)
            return await _moved_on(conn, conversation_id) if gone else None

    async def remove_reply(
        self, who: Principal, conversation_id: str, reply_id: str, *, now_s: float, latest_s: float
    ) -> int | None:
        """What the model wrote, its log and its ENDED record as their ends are archived; its message stays.

        As `remove_message` otherwise.
        """
        async with self._store.connection() as conn, conn.transaction():
            status = await conn.fetchval(_REMOVE_REPLY, conversation_id, reply_id, who.org, who.user)
            if status is None:
                return None
            await conn.execute("DELETE FROM idempotency WHERE reply_id = $1", reply_id)
            await note_purge(conn, Purge(reply_id, Cause.DELETED), now_s if status == State.ENDED else latest_s)
            return await _moved_on(conn, conversation_id)

    async def line(self, who: Principal, conversation_id: str) -> Line | None:
        async with self._store.connection() as conn:
            row = await conn.fetchrow(
                "SELECT head_id, version, epoch, ARRAY(SELECT r.id FROM replies r WHERE r.conversation_id = c.id"
                " AND r.status <> 'ended' ORDER BY r.created_at) AS in_flight"
                " FROM conversations c WHERE id = $1 AND org = $2 AND usr = $3",
                conversation_id,
                who.org,
                who.user,
            )
        return None if row is None else Line(row["head_id"], row["version"], row["epoch"], row["in_flight"])

    async def holds(self, who: Principal, conversation_id: str, reply_id: str) -> bool:
        """Whether the reply is one of this conversation."""
        async with self._store.connection() as conn:
            return bool(
                await conn.fetchval(
                    "SELECT true FROM replies WHERE id = $1 AND conversation_id = $2 AND org = $3 AND usr = $4",
                    reply_id,
                    conversation_id,
                    who.org,
                    who.user,
                )
            )

    async def view(self, who: Principal, conversation_id: str) -> ConversationView | None:
        async with self._store.connection() as conn:
            row = await conn.fetchrow(
                f"{_VIEW} FROM conversations c WHERE id = $1 AND org = $2 AND usr = $3",
                conversation_id,
                who.org,
                who.user,
            )
        return None if row is None else _read_view(row)

    async def newest(self, who: Principal, *, limit: int, after: str | None, search: str) -> list[ConversationView]:
        """Last changed first, from behind `after`."""
        in_words = _pattern(as_json(search)[1:-1]) if search else None
        async with self._store.connection() as conn:
            rows = await conn.fetch(
                _NEWEST,
                who.org,
                who.user,
                after,
                in_words,
                limit,
                CONVERSATIONS_SEARCHED_MAX if search else None,
                _pattern(search),
            )
        return [_read_view(row) for row in rows]

    async def update(
        self,
        who: Principal,
        conversation_id: str,
        *,
        title: str | None,
        metadata: dict[str, str] | None,
        head: str | None,
    ) -> None:
        """What is None stays as it is. A new head moves the version: who read the old one reads again."""
        async with self._store.connection() as conn:
            await conn.execute(
                "UPDATE conversations SET title = coalesce($4, title), metadata = coalesce($5::json, metadata),"
                " version = version + CASE WHEN $6::text IS NULL THEN 0 ELSE 1 END, head_id = coalesce($6, head_id),"
                " updated_at = now() WHERE id = $1 AND org = $2 AND usr = $3",
                conversation_id,
                who.org,
                who.user,
                title,
                None if metadata is None else as_json(metadata),
                head,
            )

    async def first_items(self, who: Principal, conversation_id: str) -> list[InputItem]:
        """Of its oldest turn."""
        async with self._store.connection() as conn:
            rows = await conn.fetch(
                "SELECT id, role, content FROM items WHERE reply_id = (SELECT id FROM replies"
                " WHERE conversation_id = $1 AND org = $2 AND usr = $3 ORDER BY created_at, id LIMIT 1)"
                " ORDER BY position",
                conversation_id,
                who.org,
                who.user,
            )
        return [read_item(row) for row in rows]

    async def turns(self, who: Principal, conversation_id: str) -> list[TurnNode]:
        """The tree's rows, without a word of what was said."""
        async with self._store.connection() as conn:
            rows = await conn.fetch(
                "SELECT id, parent_id, kind, extract(epoch FROM created_at)::float8 AS created_s,"
                " ARRAY(SELECT i.id FROM items i WHERE i.reply_id = r.id ORDER BY i.position) AS item_ids"
                " FROM replies r WHERE conversation_id = $1 AND org = $2 AND usr = $3 LIMIT $4",
                conversation_id,
                who.org,
                who.user,
                CONVERSATION_REPLIES_MAX,
            )
        return [
            TurnNode(row["id"], row["parent_id"], row["created_s"], row["item_ids"], replied=row["kind"] == "reply")
            for row in rows
        ]

    async def words(self, who: Principal, shown: Sequence[Node]) -> list[ConversationItem]:
        """These nodes with what was said. One that was deleted meanwhile is left out."""
        replies = list({node.reply_id for node in shown})
        async with self._store.connection() as conn:
            written = await conn.fetch(_WRITTEN, replies, who.org, who.user)
            said = await conn.fetch(_SAID, replies, who.org, who.user)
        by_reply = {row["id"]: row for row in written}
        by_place = {(row["reply_id"], row["id"]): row for row in said}
        made = []
        for node in shown:
            if node.position is None and node.reply_id in by_reply:
                made.append(_written(node, by_reply[node.reply_id]))
            elif node.position is not None and (node.reply_id, node.item_id) in by_place:
                made.append(_item(node, read_item(by_place[node.reply_id, node.item_id])))
        return made

    async def source(self, who: Principal, conversation_id: str, reply_id: str) -> Source | None:
        async with self._store.connection() as conn:
            row = await conn.fetchrow(
                "SELECT accepted, sampling, parent_id FROM replies WHERE id = $1 AND conversation_id = $2 AND org = $3"
                " AND usr = $4 AND kind = 'reply'",
                reply_id,
                conversation_id,
                who.org,
                who.user,
            )
        if row is None:
            return None
        items = await self._store.input_items(who, reply_id)
        return Source(read_accepted(row), read_sampling(row), row["parent_id"], tuple(items))

    async def delete(self, who: Principal, conversation_id: str, *, now_s: float, latest_s: float) -> list[str]:
        """Everything of it, at once; logs and ENDED records as their ends are archived. The replies that went."""
        async with self._store.connection(BATCH_S) as conn, conn.transaction():
            owner = conversation_id, who.org, who.user
            mine = await conn.fetchval(
                "DELETE FROM conversations WHERE id = $1 AND org = $2 AND usr = $3 RETURNING true", *owner
            )
            if not mine:
                return []
            rows = await conn.fetch(_DELETE, *owner, now_s, latest_s)
            gone = [row["id"] for row in rows]
            await conn.execute("DELETE FROM idempotency WHERE reply_id = ANY($1)", gone)
        return gone


_VIEW = """
SELECT c.id, c.title, c.metadata, extract(epoch FROM c.created_at)::float8 AS created_s,
       extract(epoch FROM c.updated_at)::float8 AS updated_s,
       (SELECT h.id FROM replies h WHERE h.id = c.head_id AND h.kind = 'reply') AS head,
       (SELECT r.id FROM replies r WHERE r.conversation_id = c.id AND r.status <> 'ended'
         ORDER BY r.created_at DESC LIMIT 1) AS in_flight
"""
# What was said stands in JSON behind `{"kind":"text","text":"`: $4 is made for that, and looked for behind it.
_NEWEST = f"""
WITH mark AS (SELECT updated_at, id FROM conversations WHERE id = $3 AND org = $1 AND usr = $2),
     mine AS (SELECT * FROM conversations WHERE org = $1 AND usr = $2
                 AND ($3::text IS NULL OR (updated_at, id) < (SELECT updated_at, id FROM mark))
               ORDER BY updated_at DESC, id DESC LIMIT $6)
{_VIEW} FROM mine c
 WHERE $4::text IS NULL OR c.title ILIKE $7 OR EXISTS (
       SELECT 1 FROM replies r WHERE r.conversation_id = c.id AND (
              substr(r.output::text, 25) ILIKE $4
              OR EXISTS (SELECT 1 FROM items i WHERE i.reply_id = r.id AND substr(i.content::text, 24) ILIKE $4)))
 ORDER BY c.updated_at DESC, c.id DESC LIMIT $5
"""  # noqa: S608 - two constants joined
_WRITTEN = """
SELECT id, status, reason, output, withdrawn, model, accepted FROM replies
 WHERE id = ANY($1) AND org = $2 AND usr = $3
"""
_SAID = """
SELECT reply_id, id, role, content FROM items WHERE reply_id = ANY($1) AND org = $2 AND usr = $3
"""
_REMOVE_ITEM = """
WITH gone AS (DELETE FROM items i USING replies r
               WHERE i.id = $2 AND r.id = i.reply_id AND r.conversation_id = $1 AND r.org = $3 AND r.usr = $4
              RETURNING i.reply_id, length(i.token_ids) / 4 AS tokens)
UPDATE replies r SET message_tokens = r.message_tokens - gone.tokens FROM gone WHERE r.id = gone.reply_id RETURNING r.id
"""
# Withdrawn, so that an end which is archived later brings no words back.
_REMOVE_REPLY = """
UPDATE replies SET kind = 'items', withdrawn = true, output = '[]', token_ids = '', output_tokens = 0
 WHERE id = $2 AND conversation_id = $1 AND org = $3 AND usr = $4 AND kind = 'reply' RETURNING status
"""
_DELETE = """
WITH gone AS (DELETE FROM replies WHERE conversation_id = $1 AND org = $2 AND usr = $3 RETURNING id, status),
     noted AS (INSERT INTO purges (reply_id, cause, due_at)
               SELECT id, 'deleted', to_timestamp(CASE WHEN status = 'ended' THEN $4::float8 ELSE $5::float8 END)
                 FROM gone
               ON CONFLICT (reply_id) DO UPDATE SET cause = 'deleted', due_at = least(purges.due_at, excluded.due_at))
SELECT id FROM gone
"""


async def _moved_on(conn: Connection, conversation_id: str) -> int:
    """Something that was said is taken back: whoever read it before reads again."""
    return int(
        await conn.fetchval(
            "UPDATE conversations SET epoch = epoch + 1, version = version + 1 WHERE id = $1 RETURNING epoch",
            conversation_id,
        )
    )


def _pattern(said: str) -> str:
    """For LIKE: `said`, anywhere."""
    for char in ("\\", "%", "_"):
        said = said.replace(char, "\\" + char)
    return f"%{said}%"


def _read_view(row: Any) -> ConversationView:
    return ConversationView(
        id=row["id"],
        created_s=row["created_s"],
        updated_s=row["updated_s"],
        title=row["title"],
        metadata=_metadata.decode(row["metadata"]),
        head=row["head"],
        in_flight=row["in_flight"],
    )


def _written(node: Node, row: Any) -> ConversationItem:
    ended = row["status"] == State.ENDED
    return msgspec.structs.replace(
        _item(node, InputItem(role="assistant", text=read_output(row), id=node.item_id)),
        written=True,
        ended=ended,
        reason=EndReason(row["reason"]) if ended else None,
        withdrawn=row["withdrawn"],
        model=row["model"],
        notice=read_accepted(row).echo.notice,
    )


def _item(node: Node, item: InputItem) -> ConversationItem:
    return ConversationItem(
        item=item, parent_id=node.parent_id, reply_id=node.reply_id, active=node.active, created_s=node.created_s
    )


async def _insert_items_turn(conn: Connection, conversation_id: str, seed: SeedTurn, parent_id: str | None) -> None:
    accepted = seed.accepted
    await conn.execute(
        "INSERT INTO replies (id, kind, org, usr, conversation_id, model, tokenizer, tier, status, created_at,"
        " deadline_at, ended_at, accepted, sampling, message_tokens, input_tokens, parent_id)"
        " VALUES ($1, 'items', $2, $3, $4, $5, $6, $7, 'ended', to_timestamp($8), to_timestamp($8), to_timestamp($8),"
        " $9, '{}', $10, $10, $11)",
        accepted.reply_id,
        accepted.org,
        accepted.user,
        conversation_id,
        accepted.model,
        seed.tokenizer,
        accepted.tier.value,
        accepted.created_s,
        as_json(accepted),
        sum(len(item.ids) for item in seed.items),
        parent_id,
    )
    await insert_items(conn, accepted, seed.items)
