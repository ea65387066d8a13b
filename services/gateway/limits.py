"""How many requests a user may make in a minute and have in flight. Pure; a script in Valkey is its equal.

enter(id) ──> one request of the minute's, a place among those in flight       or: which of the two is missing, and
leave(id) ──> the place is free                                                how long until it is worth coming again
no leave  ──> the place is free when its lease runs out: a gateway that dies must not count for ever

`level` counts in 1/60,000 request, so that a refill by the millisecond is whole numbers. Who is refused pays nothing.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

UNITS = 60_000  # in a request


class Allowed(NamedTuple):
    """A tier's limits, of one user over all gateways."""

    per_min: int
    in_flight: int


class Verdict(IntEnum):
    """As the script says it."""

    LET_IN = 0
    TOO_MANY_A_MINUTE = 1
    TOO_MANY_IN_FLIGHT = 2


class Entry(NamedTuple):
    """`remaining` requests are left; all of them are back in `reset_ms`."""

    verdict: Verdict
    wait_ms: int
    remaining: int
    reset_ms: int


@dataclass
class Visitor:
    """One user's requests. Times are wall-clock milliseconds; a clock that goes back gives nothing twice."""

    level: int | None = None  # units; None: full
    at_ms: int = 0
    leases: dict[str, int] = field(default_factory=dict)  # id -> when it runs out

    def enter(self, request_id: str, allowed: Allowed, now_ms: int, lease_ms: int) -> Entry:
        full = allowed.per_min * UNITS
        if self.level is None:
            self.level, self.at_ms = full, now_ms
        passed_ms = max(0, now_ms - self.at_ms)
        self.level = min(full, self.level + passed_ms * allowed.per_min)
        self.at_ms += passed_ms
        self.leases = {key: at_ms for key, at_ms in self.leases.items() if at_ms > now_ms}
        verdict, wait_ms = Verdict.LET_IN, 0
        if self.level < UNITS:
            verdict, wait_ms = Verdict.TOO_MANY_A_MINUTE, -(-(UNITS - self.level) // allowed.per_min)
        elif len(self.leases) >= allowed.in_flight:
            verdict, wait_ms = Verdict.TOO_MANY_IN_FLIGHT, 1000
        else:
            self.level -= UNITS
            self.leases[request_id] = now_ms + lease_ms
        return Entry(verdict, wait_ms, self.level // UNITS, -(-(full - self.level) // allowed.per_min))

    def leave(self, request_id: str) -> None:
        self.leases.pop(request_id, None)


def duration(seconds: float) -> str:
    """As OpenAI's `x-ratelimit-reset-*` say it: 120ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{max(0, round(seconds * 1000))}ms"
    if seconds < 60.0:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{whole % 60}s"


def rate_headers(kind: str, limit: int, remaining: int, reset_s: float) -> dict[str, str]:
    """`kind` is requests or tokens."""
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(remaining),
        f"x-ratelimit-reset-{kind}": duration(reset_s),
    }
