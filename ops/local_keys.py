"""The three keys a local start prints, one per tier: made once and kept in the data folder."""

from pathlib import Path

import asyncpg
import msgspec

from ops.database import connected
from ops.files import write_private
from services.conversation.key_store import create_key, digest_of, find_key
from shared.errors import ConfigError
from shared.tiers import Tier

ORG = "local"


async def local_keys(postgres_url: str, path: Path) -> dict[str, str]:
    """Tier -> key; those in `path` that the database still knows, and new ones for the others."""
    kept = _kept(path)
    try:
        connection = await connected(postgres_url)
        try:
            keys = {tier.value: await _good_or_new(connection, tier, kept.get(tier.value)) for tier in Tier}
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError) as error:
        raise ConfigError(f"the local keys could not be made ({error}): start again") from error
    if keys != kept:
        write_private(path, msgspec.json.format(msgspec.json.encode(keys)))
    return keys


async def _good_or_new(connection: asyncpg.Connection, tier: Tier, key: str | None) -> str:
    if key is not None and await find_key(connection, digest_of(key)) is not None:
        return key
    made, _ = await create_key(connection, org=ORG, user=tier.value, tier=tier, label="made by chorus up")
    return made


def _kept(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}  # new keys take their place
