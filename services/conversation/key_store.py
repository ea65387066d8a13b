"""API keys in PostgreSQL: only their digests are kept. `chorus keys` uses these functions too."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from shared import clock
from shared.messages import Principal
from shared.storage import Connection
from shared.tiers import Tier

KEY_PREFIX = "sk-chorus-"
_KEY_BYTES = 32


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """What can be shown of a key: never the key."""

    id: str
    org: str
    user: str
    tier: Tier
    label: str
    created_at: datetime
    revoked_at: datetime | None = None


def digest_of(key: str) -> bytes:
    """What is stored and looked up in place of the key."""
    return hashlib.sha256(key.encode()).digest()


async def create_key(conn: Connection, *, org: str, user: str, tier: Tier, label: str = "") -> tuple[str, KeyRow]:
    """(the key, its row). The key is shown this once: nothing can bring it back."""
    key = KEY_PREFIX + clock.random_token(_KEY_BYTES)
    row = await conn.fetchrow(
        "INSERT INTO keys (id, digest, org, usr, tier, label) VALUES ($1, $2, $3, $4, $5, $6) RETURNING *",
        clock.new_key_id(),
        digest_of(key),
        org,
        user,
        tier.value,
        label,
    )
    return key, _shown(row)


async def list_keys(conn: Connection, *, org: str | None = None, user: str | None = None) -> Sequence[KeyRow]:
    """Newest first, revoked ones included."""
    rows = await conn.fetch(
        "SELECT * FROM keys WHERE ($1::text IS NULL OR org = $1) AND ($2::text IS NULL OR usr = $2)"
        " ORDER BY created_at DESC, id DESC",
        org,
        user,
    )
    return [_shown(row) for row in rows]


async def revoke_key(conn: Connection, key_id: str) -> KeyRow | None:
    """The revoked row, or None when no key has this id. Twice is once: the first time stands.

    Whoever revokes also publishes on `control.keys`, so that gateways forget it within seconds.
    """
    row = await conn.fetchrow(
        "UPDATE keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = $1 RETURNING *", key_id
    )
    return None if row is None else _shown(row)


async def find_key(conn: Connection, digest: bytes) -> Principal | None:
    """Whose key it is; None when unknown or revoked."""
    row = await conn.fetchrow("SELECT id, org, usr, tier FROM keys WHERE digest = $1 AND revoked_at IS NULL", digest)
    if row is None:
        return None
    return Principal(org=row["org"], user=row["usr"], tier=Tier(row["tier"]), key_id=row["id"])


def _shown(row: Any) -> KeyRow:
    return KeyRow(
        id=row["id"],
        org=row["org"],
        user=row["usr"],
        tier=Tier(row["tier"]),
        label=row["label"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
