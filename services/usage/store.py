"""The ledger in PostgreSQL: batches in, sums out. Raises one of storage.UNAVAILABLE_ERRORS while it is away."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import asyncpg

from services.usage.ledger import Account, AttemptKey, Sums, first_of_each
from shared.errors import ChorusError
from shared.messages import UsageRecord
from shared.storage import Pool, borrow, migrate
from shared.tiers import Tier

_MIGRATIONS = Path(__file__).parent / "migrations"
_INSERT = """
INSERT INTO usage_records (reply_id, attempt, org_id, user_id, tier, model, replica,
                           input_tokens, cached_tokens, output_tokens, engine_s, core_s, at)
SELECT * FROM unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
                     $8::bigint[], $9::bigint[], $10::bigint[], $11::float8[], $12::float8[], $13::timestamptz[])
ON CONFLICT (reply_id, attempt) DO NOTHING
RETURNING reply_id, attempt
"""
_SUMS = """
SELECT tier, model, count(*) AS attempts, sum(input_tokens)::bigint AS input_tokens,
       sum(cached_tokens)::bigint AS cached_tokens, sum(output_tokens)::bigint AS output_tokens,
       sum(engine_s) AS engine_s, sum(coalesce(core_s, engine_s)) AS core_s
FROM usage_records
WHERE at >= $1 AND at < $2 AND ($3::text IS NULL OR org_id = $3)
GROUP BY tier, model
"""


class RowRefusedError(ChorusError):
    """A record that the table does not take, today or later."""


class LedgerStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def migrate(self) -> list[str]:
        """Raises ConfigError when an applied migration has changed."""
        async with borrow(self._pool) as conn:
            return await migrate(conn, "usage", _MIGRATIONS)

    async def add(self, records: Sequence[UsageRecord]) -> set[AttemptKey]:
        """Commit what is not charged yet, all or nothing; returns the attempts that are new.

        Raises RowRefusedError when one of them cannot stand in the table: then none does.
        """
        rows = list(first_of_each(records).values())
        columns = (
            [row.reply_id for row in rows],
            [row.attempt for row in rows],
            [row.org for row in rows],
            [row.user for row in rows],
            [row.tier.value for row in rows],
            [row.model for row in rows],
            [row.replica for row in rows],
            [row.input_tokens for row in rows],
            [row.cached_tokens for row in rows],
            [row.output_tokens for row in rows],
            [row.engine_s for row in rows],
            [row.core_s for row in rows],
            [datetime.fromtimestamp(row.at_s, UTC) for row in rows],
        )
        try:
            async with borrow(self._pool) as conn:
                added = await conn.fetch(_INSERT, *columns)
        except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError) as error:
            raise RowRefusedError(str(error)) from error
        return {AttemptKey(row["reply_id"], row["attempt"]) for row in added}

    async def sums(self, since_s: float, until_s: float, org: str | None = None) -> dict[Account, Sums]:
        """Sums of the attempts that ended in [since_s, until_s), seconds since the epoch; of one org or of all."""
        edges = (datetime.fromtimestamp(since_s, UTC), datetime.fromtimestamp(until_s, UTC))
        async with borrow(self._pool) as conn:
            rows = await conn.fetch(_SUMS, *edges, org)
        return {
            Account(Tier(row["tier"]), row["model"]): Sums(
                attempts=row["attempts"],
                input_tokens=row["input_tokens"],
                cached_tokens=row["cached_tokens"],
                output_tokens=row["output_tokens"],
                engine_s=row["engine_s"],
                core_s=row["core_s"],
            )
            for row in rows
        }
