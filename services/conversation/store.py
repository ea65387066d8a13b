"""Messages and replies in PostgreSQL. Every statement that a user's act leads to names the owner.

Raises StoreAwayError while the database is away: the caller refuses with a time to come again, or tries later.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.conversation import key_store
from services.conversation.assembly import PINNED_ROLES
from services.conversation.replies import Event, State
from services.conversation.rows import (
    Archived,
    Cause,
    Claim,
    EncodedItem,
    IdempotencyKey,
    NewReply,
    Overdue,
    Purge,
    Queued,
    StoredReply,
    TextContent,
    Turn,
    as_json,
    guard,
    read_accepted,
    read_item,
    read_reply,
    read_turn,
)
from services.conversation.titles import title_of
from shared.errors import ChorusError
from shared.messages import Accepted, EndedReply, InputItem, Principal, pack_ids, unpack_ids
from shared.storage import UNAVAILABLE_ERRORS, Connection, Pool, borrow

HISTORY_TURNS_MAX = 1024  # earlier turns looked at; what is older than that is left out of the context
ANSWER_S = 3.0  # most that a user waits for one call, the wait for a connection included
BATCH_S = 5.0  # the same for what nobody waits for
PROBE_S = 0.8


class StoreAwayError(ChorusError):
    """PostgreSQL does not answer, or not in time; the effect of the call is unknown."""


class MovedOnError(ChorusError):
    """Another message of the same conversation was faster: the context must be read again."""


class Store:
    """`away` says why nothing is even tried: the watch found the database gone, so nobody waits for it."""

    def __init__(self, pool: Pool) -> None:
        self.away: str | None = None
        self._pool = pool
        self._served = 0  # calls that came to their end
        self._unanswered = 0

    @asynccontextmanager
    async def connection(self, deadline_s: float = ANSWER_S, *, probe: bool = False) -> AsyncIterator[Connection]:
        """One for the block; raises StoreAwayError."""
        if self.away is not None and not probe:
            raise StoreAwayError(self.away)
        try:
            async with asyncio.timeout(deadline_s), borrow(self._pool) as conn:
                yield conn
            self._served += 1
        except UNAVAILABLE_ERRORS as error:
            if isinstance(error, ValueError):  # asyncpg's own word for an argument of a wrong type: our fault
                raise
            raise StoreAwayError(f"{type(error).__name__}: {error}") from error

    async def watch(self) -> None:
        """Ask whether the database answers, and remember it; raises StoreAwayError.

        One that refuses is away at once; one that is silent, the second time: the first may have been our own queue.
        One that answered others meanwhile is only busy: to call it away would refuse everybody in a burst.
        """
        served = self._served
        try:
            async with self.connection(PROBE_S, probe=True) as conn:
                await conn.execute("SELECT 1")
        except StoreAwayError as error:
            if self._served > served and isinstance(error.__cause__, TimeoutError):
                return
            self._unanswered += 1
            if self._unanswered > 1 or not isinstance(error.__cause__, TimeoutError):
                self.away = str(error)
            raise
        self._unanswered, self.away = 0, None

    async def key(self, digest: bytes) -> Principal | None:
        async with self.connection() as conn:
            return await key_store.find_key(conn, digest)

    # --- the start of a reply ------------------------------------------------------------------------------

    async def claim_of(self, principal: Principal, key: str) -> Claim | None:
        async with self.connection() as conn:
            return await _claim_of(conn, principal.org, principal.user, key)

    async def begin(self, new: NewReply, idempotency: IdempotencyKey | None) -> Claim | None:
        """All rows of a reply, or none: returns the claim that was there first, when another send holds the key.

        Raises MovedOnError when its conversation is not the one at `new.line_version` any more.
        """
        accepted = new.accepted
        async with self.connection() as conn, conn.transaction():
            if idempotency is not None and not await _claim(conn, accepted, idempotency):
                return await _claim_of(conn, accepted.org, accepted.user, idempotency.key)
            await _insert_reply(conn, new)
            if accepted.echo.conversation_id is not None:
                await _move_head(conn, new, accepted.echo.conversation_id)
        return None

    async def claim(self, accepted: Accepted, idempotency: IdempotencyKey) -> Claim | None:
        """The key alone, for a reply that leaves no rows; returns the claim that was there first."""
        async with self.connection() as conn, conn.transaction():
            if await _claim(conn, accepted, idempotency):
                return None
            return await _claim_of(conn, accepted.org, accepted.user, idempotency.key)

    async def queued(self, reply_ids: Sequence[str]) -> None:
        """Their lanes took the requests: the outbox rows go.

        Replies are locked first, in the order of their ids, as everybody does who changes several rows of one: who ends
        or deletes one of them meanwhile waits, or is waited for.
        """
        async with self.connection() as conn, conn.transaction():
            await conn.execute("SELECT 1 FROM replies WHERE id = ANY($1) ORDER BY id FOR UPDATE", reply_ids)
            await conn.execute(
                "WITH sent AS (DELETE FROM outbox WHERE reply_id = ANY($1)),"
                " known AS (UPDATE idempotency SET queued = true WHERE reply_id = ANY($1))"
                " UPDATE replies SET status = $2 WHERE id = ANY($1) AND status = ANY($3)",
                reply_ids,
                State.QUEUED.value,
                guard(Event.QUEUED),
            )

    async def give_up(self, reply_id: str, detail: str) -> None:
        """It will not be queued: its key is free again, and its end is due now (the sweeper writes what is missing)."""
        async with self.connection() as conn, conn.transaction():
            await conn.execute(
                "UPDATE replies SET deadline_at = 'epoch', detail = $2 WHERE id = $1 AND status <> 'ended'",
                reply_id,
                detail,
            )
            await conn.execute("DELETE FROM outbox WHERE reply_id = $1", reply_id)
            await conn.execute("DELETE FROM idempotency WHERE reply_id = $1", reply_id)

    async def outbox(self, *, older_than_s: float, now_s: float, most: int) -> list[Queued]:
        """Requests stored at least `older_than_s` ago and still not known to be queued, oldest first."""
        async with self.connection() as conn:
            rows = await conn.fetch(
                "SELECT reply_id, subject, payload FROM outbox WHERE created_at < to_timestamp($1)"
                " ORDER BY created_at LIMIT $2",
                now_s - older_than_s,
                most,
            )
        return [Queued(row["reply_id"], row["subject"], row["payload"]) for row in rows]

    # --- context ---------------------------------------------------------------------------------------------

    async def history(self, principal: Principal, last_id: str, tokens_max: int) -> list[Turn] | None:
        """The turns up to `last_id`, oldest first, as far as `tokens_max` can hold; None when it is not theirs."""
        async with self.connection() as conn:
            chain = await conn.fetch(_CHAIN, last_id, principal.org, principal.user, HISTORY_TURNS_MAX)
            if not chain:
                return None
            whole, used = [], 0
            for row in chain:  # newest first
                if used <= tokens_max:
                    whole.append(row["id"])
                used += row["tokens"]
            every = [row["id"] for row in chain]
            rows = await conn.fetch(_TURNS, whole)
            items = await conn.fetch(_ITEMS, whole, every, sorted(PINNED_ROLES))
        by_reply: dict[str, list[EncodedItem]] = {}
        for item in items:
            by_reply.setdefault(item["reply_id"], []).append(
                EncodedItem(read_item(item), unpack_ids(item["token_ids"]))
            )
        turns = {row["id"]: read_turn(row, by_reply.get(row["id"], [])) for row in rows}
        for row in chain:
            if row["id"] not in turns and row["id"] in by_reply:
                turns[row["id"]] = Turn(
                    row["id"], State.ENDED, by_reply[row["id"]], tokenizer=row["tokenizer"], pinned_only=True
                )
        return [turns[reply] for reply in reversed(every) if reply in turns]

    async def history_since(self, principal: Principal, last_id: str, known_id: str) -> list[Turn] | None:
        """The one turn `last_id`, when the turn before it is `known_id`; else None."""
        async with self.connection() as conn:
            row = await conn.fetchrow(
                "SELECT id, kind, status, reason, tokenizer, output, token_ids FROM replies"
                " WHERE id = $1 AND parent_id = $2 AND org = $3 AND usr = $4",
                last_id,
                known_id,
                principal.org,
                principal.user,
            )
            if row is None:
                return None
            items = await conn.fetch(_ITEMS, [last_id], [], [])
        return [read_turn(row, [EncodedItem(read_item(item), unpack_ids(item["token_ids"])) for item in items])]

    # --- what stands -----------------------------------------------------------------------------------------

    async def reply(self, principal: Principal, reply_id: str) -> StoredReply | None:
        """None when it is unknown, deleted, never stored, or another's."""
        async with self.connection() as conn:
            row = await conn.fetchrow(
                "SELECT *, extract(epoch FROM ended_at)::float8 AS ended_s FROM replies"
                " WHERE id = $1 AND org = $2 AND usr = $3 AND kind = 'reply'",
                reply_id,
                principal.org,
                principal.user,
            )
        return None if row is None else read_reply(row)

    async def input_items(self, principal: Principal, reply_id: str) -> list[InputItem]:
        async with self.connection() as conn:
            rows = await conn.fetch(
                "SELECT id, role, content FROM items WHERE reply_id = $1 AND org = $2 AND usr = $3 ORDER BY position",
                reply_id,
                principal.org,
                principal.user,
            )
        return [read_item(row) for row in rows]

    async def purge_cause(self, reply_id: str) -> Cause | None:
        async with self.connection() as conn:
            cause = await conn.fetchval("SELECT cause FROM purges WHERE reply_id = $1", reply_id)
        return None if cause is None else Cause(cause)

    # --- the end of a reply ----------------------------------------------------------------------------------

    async def archive(self, replies: Sequence[EndedReply], now_s: float) -> list[Archived]:
        """Ended replies into their rows, all or none of them, each at most once.

        No router needs their logs any more, so a purge that waited for that is due now.
        """
        async with self.connection(BATCH_S) as conn, conn.transaction():
            outcomes = dict.fromkeys(range(len(replies)), Archived.NO_ROW)
            for at in sorted(outcomes, key=lambda at: replies[at].accepted.reply_id):  # rows are locked in that order
                outcomes[at] = await _archive(conn, replies[at])
            await conn.execute(
                "UPDATE purges SET due_at = least(due_at, to_timestamp($2)) WHERE reply_id = ANY($1)",
                [ended.accepted.reply_id for ended in replies],
                now_s,
            )
        return list(outcomes.values())

    async def overdue(self, *, now_s: float, grace_s: float, most: int) -> list[Overdue]:
        """Replies not ended `grace_s` past their deadline."""
        async with self.connection() as conn:
            rows = await conn.fetch(
                "SELECT id, accepted, detail FROM replies WHERE status <> 'ended' AND deadline_at < to_timestamp($1)"
                " ORDER BY deadline_at LIMIT $2",
                now_s - grace_s,
                most,
            )
        return [Overdue(read_accepted(row), row["detail"]) for row in rows]

    # --- taking back -----------------------------------------------------------------------------------------

    async def delete(
        self, principal: Principal, reply_id: str, *, now_s: float, latest_s: float
    ) -> tuple[str | None, int]:
        """Rows go now; the log and its ENDED record when the end has been archived, at `latest_s` in any case.

        Returns the conversation it was in, and that one's epoch since.
        """
        conversation_id, epoch = None, 0
        async with self.connection() as conn, conn.transaction():
            owner = reply_id, principal.org, principal.user
            gone = await conn.fetchrow(
                "DELETE FROM replies WHERE id = $1 AND org = $2 AND usr = $3"
                " RETURNING status, parent_id, conversation_id",
                *owner,
            )
            if gone is not None:  # what followed it follows what was before it
                await conn.execute(
                    "UPDATE replies SET parent_id = $2 WHERE parent_id = $1", reply_id, gone["parent_id"]
                )
                conversation_id = gone["conversation_id"]
                epoch = await conn.fetchval(
                    "UPDATE conversations SET epoch = epoch + 1, version = version + 1,"
                    " head_id = CASE WHEN head_id = $2 THEN $3 ELSE head_id END WHERE id = $1 RETURNING epoch",
                    conversation_id,
                    reply_id,
                    gone["parent_id"],
                )
            archived = gone is not None and gone["status"] == State.ENDED
            await conn.execute("DELETE FROM idempotency WHERE reply_id = $1 AND org = $2 AND usr = $3", *owner)
            await note_purge(conn, Purge(reply_id, Cause.DELETED), now_s if archived else latest_s)
        return conversation_id, epoch or 0

    async def withdraw(self, reply_id: str, *, now_s: float, latest_s: float) -> tuple[str | None, int]:
        """A flag came late: the stored text goes, the reply stays; all else as in `delete`."""
        async with self.connection() as conn, conn.transaction():
            taken = await conn.fetchrow(
                "UPDATE replies SET withdrawn = true, output = '[]', token_ids = '' WHERE id = $1"
                " RETURNING status, conversation_id",
                reply_id,
            )
            status, conversation_id = (None, None) if taken is None else taken
            epoch = await conn.fetchval(
                "UPDATE conversations SET epoch = epoch + 1 WHERE id = $1 RETURNING epoch", conversation_id
            )
            await note_purge(conn, Purge(reply_id, Cause.WITHDRAWN), now_s if status == State.ENDED else latest_s)
        return conversation_id, epoch or 0

    async def purges(self, *, now_s: float, most: int) -> list[Purge]:
        """Purges that are due."""
        async with self.connection() as conn:
            rows = await conn.fetch(
                "SELECT reply_id, cause FROM purges WHERE due_at <= to_timestamp($1) ORDER BY due_at LIMIT $2",
                now_s,
                most,
            )
        return [Purge(row["reply_id"], Cause(row["cause"])) for row in rows]

    async def purged(self, reply_id: str) -> None:
        async with self.connection() as conn:
            await conn.execute("DELETE FROM purges WHERE reply_id = $1", reply_id)

    async def forget_claims(self, *, before_s: float, most: int) -> int:
        """Idempotency keys older than this are free again; returns how many went."""
        async with self.connection() as conn:
            rows = await conn.fetch(
                "DELETE FROM idempotency WHERE (org, usr, key) IN (SELECT org, usr, key FROM idempotency"
                " WHERE created_at < to_timestamp($1) ORDER BY created_at LIMIT $2) RETURNING 1",
                before_s,
                most,
            )
        return len(rows)


# Newest first. `tokens` is what a turn adds to a context at least.
_CHAIN = """
WITH RECURSIVE chain AS (
    SELECT id, parent_id, tokenizer, message_tokens + output_tokens AS tokens, 1 AS depth
      FROM replies WHERE id = $1 AND org = $2 AND usr = $3
  UNION ALL
    SELECT r.id, r.parent_id, r.tokenizer, r.message_tokens + r.output_tokens, chain.depth + 1
      FROM chain JOIN replies r ON r.id = chain.parent_id AND r.org = $2 AND r.usr = $3
     WHERE chain.depth < $4
)
SELECT id, tokenizer, tokens FROM chain ORDER BY depth
"""
_TURNS = "SELECT id, kind, status, reason, tokenizer, output, token_ids FROM replies WHERE id = ANY($1)"
_ITEMS = """
SELECT reply_id, id, role, content, token_ids FROM items
 WHERE reply_id = ANY($1) OR (reply_id = ANY($2) AND role = ANY($3))
 ORDER BY reply_id, position
"""


async def _claim(conn: Connection, accepted: Accepted, idempotency: IdempotencyKey) -> bool:
    """True when the key is ours. Waits for a transaction that holds it and has not committed."""
    mine = await conn.fetchval(
        "INSERT INTO idempotency (org, usr, key, body_hash, reply_id, created_at)"
        " VALUES ($1, $2, $3, $4, $5, to_timestamp($6)) ON CONFLICT DO NOTHING RETURNING true",
        accepted.org,
        accepted.user,
        idempotency.key,
        idempotency.body_hash,
        accepted.reply_id,
        accepted.created_s,
    )
    return bool(mine)


async def _claim_of(conn: Connection, org: str, user: str, key: str) -> Claim | None:
    row = await conn.fetchrow(
        "SELECT reply_id, body_hash, queued FROM idempotency WHERE org = $1 AND usr = $2 AND key = $3",
        org,
        user,
        key,
    )
    return None if row is None else Claim(row["reply_id"], row["body_hash"], row["queued"])


async def _move_head(conn: Connection, new: NewReply, conversation_id: str) -> None:
    moved = await conn.fetchval(
        "UPDATE conversations SET head_id = $2, version = version + 1, updated_at = to_timestamp($4),"
        " title = CASE WHEN title = '' THEN $5 ELSE title END WHERE id = $1 AND version = $3 RETURNING true",
        conversation_id,
        new.accepted.reply_id,
        new.line_version,
        new.accepted.created_s,
        title_of(item.item for item in new.items),
    )
    if not moved:
        raise MovedOnError(conversation_id)


async def _insert_reply(conn: Connection, new: NewReply) -> None:
    accepted, echo = new.accepted, new.accepted.echo
    await conn.execute(
        "INSERT INTO replies (id, org, usr, conversation_id, parent_id, model, tokenizer, tier, status, created_at,"
        " deadline_at, accepted, sampling, message_tokens, input_tokens)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, to_timestamp($10), to_timestamp($11), $12, $13, $14, $15)",
        accepted.reply_id,
        accepted.org,
        accepted.user,
        echo.conversation_id,
        new.parent_id,
        accepted.model,
        new.tokenizer,
        accepted.tier.value,
        State.ACCEPTED.value,
        accepted.created_s,
        accepted.created_s + accepted.deadline_s,
        as_json(accepted),
        as_json(new.sampling),
        sum(len(item.ids) for item in new.items),
        accepted.input_tokens,
    )
    await insert_items(conn, accepted, new.items)
    await conn.execute(
        "INSERT INTO outbox (reply_id, org, usr, subject, payload, created_at)"
        " VALUES ($1, $2, $3, $4, $5, to_timestamp($6))",
        accepted.reply_id,
        accepted.org,
        accepted.user,
        new.lane_subject,
        new.request,
        accepted.created_s,
    )


async def insert_items(conn: Connection, accepted: Accepted, items: Sequence[EncodedItem]) -> None:
    """The message of a turn, in order."""
    await conn.executemany(
        "INSERT INTO items (reply_id, position, id, org, usr, role, content, token_ids)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        [
            (
                accepted.reply_id,
                position,
                encoded.item.id,
                accepted.org,
                accepted.user,
                encoded.item.role,
                as_json(TextContent(text=encoded.item.text)),
                pack_ids(encoded.ids),
            )
            for position, encoded in enumerate(items)
        ],
    )


async def _archive(conn: Connection, ended: EndedReply) -> Archived:
    if not ended.accepted.echo.store:
        return Archived.NO_ROW
    stored = await conn.fetchval(
        "UPDATE replies SET status = 'ended', reason = $2, detail = $3, ended_at = to_timestamp($4),"
        " output = CASE WHEN withdrawn THEN '[]' ELSE $5::json END,"
        " token_ids = CASE WHEN withdrawn THEN ''::bytea ELSE $6 END,"
        " cached_tokens = $7, output_tokens = $8, attempts = $9, checked = $10"
        " WHERE id = $1 AND status = ANY($11) RETURNING true",
        ended.accepted.reply_id,
        ended.reason.value,
        ended.detail,
        ended.ended_s,
        as_json((TextContent(text=ended.text),)),
        ended.ids,
        ended.usage.cached_tokens,
        ended.usage.output_tokens,
        ended.attempts,
        ended.checked,
        guard(Event.ENDED),
    )
    await conn.execute("DELETE FROM outbox WHERE reply_id = $1", ended.accepted.reply_id)
    if stored:
        return Archived.STORED
    known = await conn.fetchval("SELECT true FROM replies WHERE id = $1", ended.accepted.reply_id)
    return Archived.ALREADY if known else Archived.NO_ROW


async def note_purge(conn: Connection, purge: Purge, due_s: float) -> None:
    """A deletion stands above a withdrawal, and the earlier time counts."""
    await conn.execute(
        "INSERT INTO purges (reply_id, cause, due_at) VALUES ($1, $2, to_timestamp($3))"
        " ON CONFLICT (reply_id) DO UPDATE SET due_at = least(purges.due_at, excluded.due_at),"
        " cause = CASE WHEN purges.cause = 'deleted' THEN purges.cause ELSE excluded.cause END",
        purge.reply_id,
        purge.cause.value,
        due_s,
    )
