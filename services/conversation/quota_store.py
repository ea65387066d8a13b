"""Users' tokens in Valkey: one script, one bucket per (org, user, model, lane), the same arithmetic as `shared.quota`.

Raises ValkeyAwayError. What was reserved and could never be settled comes back when its lease runs out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from shared.limits import QUOTA_KEEP_S, QUOTA_LEASE_S
from shared.quota import Grant, Limit, Totals
from shared.tiers import Tier
from shared.valkey import Script, Valkey

SCRIPT = Script((Path(__file__).parent / "lua" / "quota.lua").read_text(encoding="utf-8"))


class BucketName(NamedTuple):
    """Whose tokens of which model; each lane has its own, because each has its own limit."""

    org: str
    user: str
    model: str
    lane: Tier


class Settlement(NamedTuple):
    """A reservation's end: `used` of it."""

    bucket: BucketName
    limit: Limit
    reply_id: str
    used: int


class QuotaStore:
    def __init__(self, valkey: Valkey, region: str, lease_s: float = QUOTA_LEASE_S) -> None:
        self._valkey, self._region, self._lease_ms = valkey, region, round(lease_s * 1000)

    async def reserve(self, bucket: BucketName, limit: Limit, reply_id: str, *, amount: int, now_s: float) -> Grant:
        """`amount` tokens, unless that many are not there. Again with the same id is once."""
        call = self._call("reserve", bucket, limit, reply_id, amount=amount, now_s=now_s)
        return Grant(*(await self._valkey.run(SCRIPT, [call]))[0])

    async def settle(self, settlements: Sequence[Settlement], now_s: float) -> list[bool]:
        """Whether each was reserved and not yet settled; in one round trip."""
        calls = [
            self._call("settle", one.bucket, one.limit, one.reply_id, amount=one.used, now_s=now_s)
            for one in settlements
        ]
        return [answer[0] == 1 for answer in await self._valkey.run(SCRIPT, calls)]

    async def totals(self, bucket: BucketName) -> Totals:
        """For audits."""
        found = await self._valkey.call("HMGET", self._keys(bucket)[0], *Totals._fields)
        return Totals(*(int(value or 0) for value in found))

    def _call(
        self, verb: str, bucket: BucketName, limit: Limit, reply_id: str, *, amount: int, now_s: float
    ) -> tuple[list[str], list[str | int]]:
        now_ms, keep_s = round(now_s * 1000), round(QUOTA_KEEP_S)
        return self._keys(bucket), [verb, reply_id, amount, *limit, now_ms, self._lease_ms, keep_s]

    def _keys(self, bucket: BucketName) -> list[str]:
        """Both in one slot of a cluster, by what stands in braces."""
        owner = ":".join(quote(part, safe="") for part in bucket)
        return [f"{self._region}:quota:{{{owner}}}", f"{self._region}:leases:{{{owner}}}"]
