"""The ledger's rules: an attempt is charged once, and sums are sums of attempts. Pure.

    records (any order, any number of times) ──> one per (reply, attempt), the first ──> sums by tier and model

`store.py` keeps the same by its primary key; a test holds the two equal.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shared.messages import UsageRecord
from shared.tiers import Tier

_YEAR_9999_S = 253_370_764_800.0


class AttemptKey(NamedTuple):
    reply_id: str
    attempt: int


class Account(NamedTuple):
    """What sums are kept of."""

    tier: Tier
    model: str


@dataclass(frozen=True)
class Sums:
    """`core_s` is what is paid for (seconds of a core or a GPU); the rest says what came of it."""

    attempts: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    engine_s: float = 0.0
    core_s: float = 0.0

    def plus(self, record: UsageRecord) -> "Sums":
        return replace(
            self,
            attempts=self.attempts + 1,
            input_tokens=self.input_tokens + record.input_tokens,
            cached_tokens=self.cached_tokens + record.cached_tokens,
            output_tokens=self.output_tokens + record.output_tokens,
            engine_s=self.engine_s + record.engine_s,
            core_s=self.core_s + core_seconds(record),
        )

    @property
    def core_s_per_million(self) -> float | None:
        """Seconds of a core per million output tokens; None before there is any."""
        return self.core_s / self.output_tokens * 1e6 if self.output_tokens else None


def core_seconds(record: UsageRecord) -> float:
    """What an attempt cost. A replica of an earlier version tells the engine's seconds only."""
    return record.engine_s if record.core_s is None else record.core_s


def key_of(record: UsageRecord) -> AttemptKey:
    return AttemptKey(record.reply_id, record.attempt)


def first_of_each(records: Iterable[UsageRecord]) -> dict[AttemptKey, UsageRecord]:
    """The first record of each attempt, in order; what comes again is the same attempt told twice."""
    first: dict[AttemptKey, UsageRecord] = {}
    for record in records:
        first.setdefault(key_of(record), record)
    return first


class Ledger:
    """All attempts told so far, each once, and their sums."""

    def __init__(self) -> None:
        self._known: set[AttemptKey] = set()
        self._sums: dict[Account, Sums] = {}

    def add(self, record: UsageRecord) -> bool:
        """Charge an attempt; False, and nothing changes, when it is charged already."""
        key = key_of(record)
        if key in self._known:
            return False
        self._known.add(key)
        account = Account(record.tier, record.model)
        self._sums[account] = self._sums.get(account, Sums()).plus(record)
        return True

    def sums(self) -> Iterator[tuple[Account, Sums]]:
        yield from self._sums.items()


def fault(record: UsageRecord) -> str | None:
    """Why a record cannot stand in the ledger, or None. The table has the same checks."""
    if record.attempt < 1:
        return f"attempt {record.attempt}"
    if not 0 <= record.cached_tokens <= record.input_tokens:
        return f"{record.cached_tokens} cached of {record.input_tokens} input tokens"
    if record.output_tokens < 0 or not all(0 <= s < float("inf") for s in (record.engine_s, core_seconds(record))):
        return f"{record.output_tokens} output tokens in {record.engine_s} s, {record.core_s} s of a core"
    if not 0 <= record.at_s < _YEAR_9999_S:
        return f"at {record.at_s} s"
    texts = (record.reply_id, record.org, record.user, record.model, record.replica)
    if any("\0" in text for text in texts):
        return "a text with a null character"
    return None
