"""`chorus keys`: create, list and revoke API keys. A key is shown once; only its digest is stored."""

from ops.database import connected
from ops.reach import Reach, operator_bus
from services.conversation.key_store import KeyRow, create_key, list_keys, revoke_key
from shared.errors import BusError, ConfigError
from shared.messages import KeyRevoked, encode
from shared.subjects import Names
from shared.tiers import Tier


async def create(reach: Reach, *, org: str, user: str, tier: Tier, label: str) -> str:
    """A new key, to be shown this once."""
    connection = await connected(reach.postgres.reveal())
    try:
        key, _ = await create_key(connection, org=org, user=user, tier=tier, label=label)
    finally:
        await connection.close()
    return key


async def listed(reach: Reach, *, org: str | None, user: str | None) -> list[KeyRow]:
    connection = await connected(reach.postgres.reveal())
    try:
        return list(await list_keys(connection, org=org, user=user))
    finally:
        await connection.close()


async def revoke(reach: Reach, key_id: str) -> str:
    """Revoke, then tell every gateway; returns a sentence. Raises ConfigError when there is no such key."""
    connection = await connected(reach.postgres.reveal())
    try:
        row = await revoke_key(connection, key_id)
    finally:
        await connection.close()
    if row is None:
        raise ConfigError(f"there is no key {key_id}: `chorus keys list` shows them")
    try:
        async with operator_bus(reach) as bus:
            await bus.publish(Names(reach.region).keys, encode(KeyRevoked(key_id=key_id)))
    except BusError as error:
        return f"{key_id} is revoked, but the gateways could not be told ({error}): they forget it within minutes"
    return f"{key_id} is revoked"


def line(row: KeyRow) -> str:
    """A key for a person: never the key itself."""
    state = f"revoked {row.revoked_at:%Y-%m-%d %H:%M}" if row.revoked_at else "good"
    owner = f"{row.org}/{row.user}"
    return (
        f"{row.id}  {row.tier.value:<10}  {owner:<24}  {row.created_at:%Y-%m-%d %H:%M}  {state}  {row.label}".rstrip()
    )
