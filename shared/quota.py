"""Tokens a user may use: a bucket per (org, user, model) that refills with time. Pure; a script in Valkey is its equal.

reserve(id, amount) ──> level - amount, lease id          the prompt and the most it may write, before it is queued
settle(id, used)    ──> level + (amount - used)           once: what was used stays charged, the rest comes back
no settle           ──> the lease runs out, and all of it comes back

`level` counts in 1/60,000 token, so that a refill by the millisecond is whole numbers: a bucket that gets `per_min`
tokens a minute gets `per_min` units a millisecond. Reserved is always settled + refunded + what is still leased.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

UNITS = 60_000  # in a token
SWEEP_MAX = 16  # leases that ran out, taken back at each reserve


class Limit(NamedTuple):
    """`capacity` tokens at once, `per_min` tokens a minute afterwards."""

    capacity: int
    per_min: int


class Grant(NamedTuple):
    """`wait_ms` 0: reserved; else come again then. `remaining` tokens are left; all of them are back in `reset_ms`."""

    wait_ms: int
    remaining: int
    reset_ms: int


class Totals(NamedTuple):
    """Tokens since the bucket was made."""

    reserved: int
    settled: int
    refunded: int


NOTHING = Totals(0, 0, 0)


@dataclass
class Lease:
    amount: int
    expires_ms: int


@dataclass
class Bucket:
    """One user's tokens of one model. Times are wall-clock milliseconds; a clock that goes back gives nothing twice."""

    level: int | None = None  # units; None: full
    at_ms: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    totals: Totals = NOTHING

    def reserve(self, lease_id: str, amount: int, limit: Limit, now_ms: int, lease_ms: int) -> Grant:
        """More than the bucket holds needs a full one, and leaves a debt. The same id again changes nothing."""
        self._refill(limit, now_ms)
        self._sweep(limit, now_ms)
        assert self.level is not None
        if lease_id in self.leases:
            return self._grant(0, limit)
        missing = min(amount, limit.capacity) * UNITS - self.level
        if missing > 0:
            return self._grant(-(-missing // limit.per_min), limit)
        self.level -= amount * UNITS
        self.leases[lease_id] = Lease(amount, now_ms + lease_ms)
        self.totals = self.totals._replace(reserved=self.totals.reserved + amount)
        return self._grant(0, limit)

    def settle(self, lease_id: str, used: int, limit: Limit, now_ms: int) -> bool:
        """Whether it was leased: the first settle counts, and none after the lease ran out."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self._refill(limit, now_ms)
        self._return(lease.amount, min(max(used, 0), lease.amount), limit)
        return True

    def _refill(self, limit: Limit, now_ms: int) -> None:
        full = limit.capacity * UNITS
        if self.level is None:
            self.level, self.at_ms = full, now_ms
        passed_ms = max(0, now_ms - self.at_ms)
        self.level = min(full, self.level + passed_ms * limit.per_min)
        self.at_ms += passed_ms

    def _sweep(self, limit: Limit, now_ms: int) -> None:
        """Leases that ran out, the oldest first."""
        over = sorted((one.expires_ms, key) for key, one in self.leases.items() if one.expires_ms <= now_ms)
        for _, key in over[:SWEEP_MAX]:
            self._return(self.leases.pop(key).amount, 0, limit)

    def _return(self, amount: int, used: int, limit: Limit) -> None:
        assert self.level is not None
        self.level = min(limit.capacity * UNITS, self.level + (amount - used) * UNITS)
        reserved, settled, refunded = self.totals
        self.totals = Totals(reserved, settled + used, refunded + amount - used)

    def _grant(self, wait_ms: int, limit: Limit) -> Grant:
        assert self.level is not None
        missing = limit.capacity * UNITS - self.level
        return Grant(wait_ms, max(0, self.level) // UNITS, -(-missing // limit.per_min))
