"""Requests per minute and in flight, counted in Valkey over all gateways.

enter ──> script: let in, or a refusal with a time          away: everybody is let in, counted and journalled
leave ──> a queue, told in batches: no client waits for it
held  ──> renewed, so that only a gateway that died lets its leases run out
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from services.gateway.limits import Allowed, Entry, Verdict, rate_headers
from services.gateway.measures import Measures
from shared import clock
from shared.errors import RefusedError, ValkeyAwayError
from shared.limits import IN_FLIGHT_LEASE_S, IN_FLIGHT_RENEW_S
from shared.messages import Principal
from shared.outcomes import Refusal, RefusalKind
from shared.tiers import Tier
from shared.valkey import Script, Valkey

SCRIPT = Script((Path(__file__).parent / "lua" / "enter.lua").read_text(encoding="utf-8"))
LEAVING_MAX = 65_536  # not yet told; past it their leases run out by themselves
BATCH = 256
_KEEP_S = 300  # a user who asks nothing has all of a minute back by then

Headers = dict[str, str]


class TooManyError(RefusedError):
    """`headers` say how many there are."""

    def __init__(self, refusal: Refusal, headers: Headers) -> None:
        super().__init__(refusal)
        self.headers = headers


class Limits:
    """`valkey` None: nobody is counted."""

    def __init__(self, valkey: Valkey | None, region: str, allowed: Mapping[Tier, Allowed], measures: Measures) -> None:
        self._valkey, self._region, self._allowed, self._measures = valkey, region, allowed, measures
        self._held: dict[str, Principal] = {}  # request id -> whose
        self._leaving: deque[tuple[str, Principal]] = deque(maxlen=LEAVING_MAX)
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def admitted(self, who: Principal, request_id: str) -> AsyncIterator[Headers]:
        """A place in flight for the block, and the headers about it; raises TooManyError."""
        entry = await self._enter(who, request_id)
        if entry is None:
            yield {}
            return
        allowed = self._allowed[who.tier]
        headers = rate_headers("requests", allowed.per_min, entry.remaining, entry.reset_ms / 1000)
        if entry.verdict is not Verdict.LET_IN:
            raise TooManyError(_refusal(entry, allowed), headers)
        self._held[request_id] = who
        try:
            yield headers
        finally:
            del self._held[request_id]
            self._leaving.append((request_id, who))
            self._wake.set()

    async def run(self) -> None:
        """Tell what has left, and renew what is held, for as long as the gateway lives."""
        if self._valkey is None:
            await asyncio.Event().wait()
        renew_s = clock.now_s() + IN_FLIGHT_RENEW_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, renew_s - clock.now_s())):
                    await self._wake.wait()
            except TimeoutError:
                renew_s = clock.now_s() + IN_FLIGHT_RENEW_S
                await self._renew()
            self._wake.clear()
            while self._leaving:
                await self._tell()

    async def _enter(self, who: Principal, request_id: str) -> Entry | None:
        if self._valkey is None:
            return None
        lease_ms, now_ms = round(IN_FLIGHT_LEASE_S * 1000), round(clock.wall_s() * 1000)
        arguments: list[str | int] = [request_id, *self._allowed[who.tier], now_ms, lease_ms, _KEEP_S]
        try:
            verdict, *figures = (await self._valkey.run(SCRIPT, [(self._keys(who), arguments)]))[0]
        except ValkeyAwayError:
            self._measures.limits.labels("unmetered").inc()
            return None
        self._measures.limits.labels(Verdict(verdict).name.lower()).inc()
        return Entry(Verdict(verdict), *figures)

    async def _tell(self) -> None:
        batch = [self._leaving.popleft() for _ in range(min(BATCH, len(self._leaving)))]
        await self._many([("ZREM", self._keys(who)[1], request_id) for request_id, who in batch])

    async def _renew(self) -> None:
        """Only what still stands: what ran out meanwhile is not brought back, another may have its place."""
        until_ms = round((clock.wall_s() + IN_FLIGHT_LEASE_S) * 1000)
        held = list(self._held.items())
        for at in range(0, len(held), BATCH):
            commands: list[tuple[str | int, ...]] = []
            for request_id, who in held[at : at + BATCH]:
                key = self._keys(who)[1]
                commands += [("ZADD", key, "XX", until_ms, request_id), ("EXPIRE", key, _KEEP_S)]
            await self._many(commands)

    async def _many(self, commands: list[tuple[str | int, ...]]) -> None:
        assert self._valkey is not None, "run() waits without one"
        try:
            await self._valkey.many(commands)
        except ValkeyAwayError:
            self._measures.limits.labels("lost").inc(len(commands))  # the leases run out by themselves

    def _keys(self, who: Principal) -> list[str]:
        """Both in one slot of a cluster, by what stands in braces."""
        owner = f"{quote(who.org, safe='')}:{quote(who.user, safe='')}:{who.tier}"
        return [f"{self._region}:requests:{{{owner}}}", f"{self._region}:in_flight:{{{owner}}}"]


def _refusal(entry: Entry, allowed: Allowed) -> Refusal:
    if entry.verdict is Verdict.TOO_MANY_A_MINUTE:
        kind, said = RefusalKind.QUOTA, f"Limit reached: {allowed.per_min} requests a minute."
    else:
        kind, said = RefusalKind.CONCURRENCY, f"Limit reached: {allowed.in_flight} requests in flight at once."
    return Refusal(kind=kind, message=f"{said} Try again later.", retry_after_s=entry.wait_ms / 1000)
