"""API keys: digest, lookup, and a cache that outlives the database. The key itself is never kept, sent or logged.

fresh (60 s) ──> valid
older        ──> asked about again;  nobody to ask: valid until 10 min after the last yes
unknown      ──> a no is remembered for 5 s, so that a client in a loop costs nothing
revoked      ──> forgotten at the word on `control.keys`; a yes that was under way then does not count
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from services.gateway.http import ProblemError, bearer_key, problem_of_status, unavailable
from shared import clock
from shared.errors import BusError, RefusedError
from shared.limits import KEY_CACHE_MAX, KEY_FRESH_S, KEY_STALE_S_MAX, KEY_UNKNOWN_S
from shared.messages import Principal
from shared.outcomes import RefusalKind

_ASK_AGAIN_S = 5.0  # after a question that nobody answered, for a key that is still valid


class Lookup(Protocol):
    async def key(self, digest: bytes, *, patient: bool) -> Principal:
        """Whose key it is; RefusedError NOT_FOUND for none, BusError or UNAVAILABLE when nobody can say.

        `patient`: worth waiting for somebody who can.
        """
        ...


@dataclass(slots=True)
class _Known:
    principal: Principal | None  # None: no such key
    confirmed_s: float
    ask_s: float  # when to ask again


class KeyCache:
    """What is known of keys, least recently used first. Pure: `now` comes in."""

    def __init__(self, most: int = KEY_CACHE_MAX) -> None:
        self._most = most
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._digests: dict[str, bytes] = {}  # key id -> digest, for revocation
        self._revoked: OrderedDict[str, None] = OrderedDict()  # they never come back

    def get(self, digest: bytes, now: float) -> _Known | None:
        """What is known and may still be used, fresh or not."""
        known = self._known.get(digest)
        if known is None:
            return None
        age_s_max = KEY_STALE_S_MAX if known.principal is not None else KEY_UNKNOWN_S
        if now - known.confirmed_s >= age_s_max:
            self._drop(digest)
            return None
        self._known.move_to_end(digest)
        return known

    def found(self, digest: bytes, principal: Principal, now: float) -> Principal | None:
        """An answer came; None when the key was revoked while it was on its way."""
        if principal.key_id in self._revoked:
            self.absent(digest, now)
            return None
        self._put(digest, _Known(principal, now, now + KEY_FRESH_S))
        self._digests[principal.key_id] = digest
        return principal

    def absent(self, digest: bytes, now: float) -> None:
        self._put(digest, _Known(None, now, now + KEY_UNKNOWN_S))

    def unanswered(self, digest: bytes, now: float) -> None:
        known = self._known.get(digest)
        if known is not None:
            known.ask_s = now + _ASK_AGAIN_S

    def revoke(self, key_id: str) -> None:
        self._revoked[key_id] = None
        self._revoked.move_to_end(key_id)
        if len(self._revoked) > self._most:
            self._revoked.popitem(last=False)
        digest = self._digests.get(key_id)
        if digest is not None:
            self._drop(digest)

    def _put(self, digest: bytes, known: _Known) -> None:
        self._drop(digest)
        self._known[digest] = known
        if len(self._known) > self._most:
            self._drop(next(iter(self._known)))

    def _drop(self, digest: bytes) -> None:
        known = self._known.pop(digest, None)
        if known is not None and known.principal is not None:
            self._digests.pop(known.principal.key_id, None)


class Keys:
    """Authenticates requests."""

    def __init__(self, lookup: Lookup, now_s: Callable[[], float] = clock.now_s) -> None:
        self._lookup, self._now_s = lookup, now_s
        self._cache = KeyCache()
        self._asking: dict[bytes, asyncio.Lock] = {}  # one question per key at a time

    async def principal(self, headers: Mapping[str, str]) -> Principal:
        """Whose request it is. Raises ProblemError 401, or RefusedError UNAVAILABLE when nobody can say."""
        key = bearer_key(headers)
        if key is None:
            raise ProblemError(problem_of_status(401, "Give your API key as `Authorization: Bearer <key>`."))
        digest = hashlib.sha256(key.encode()).digest()
        now = self._now_s()
        known = self._cache.get(digest, now)
        if known is None:
            known = await self._ask(digest)
        elif now >= known.ask_s and digest not in self._asking:  # the others go on with what was true a minute ago
            known = await self._ask(digest, patient=False)
        if known.principal is None:
            raise ProblemError(problem_of_status(401, "That API key is not valid."))
        return known.principal

    def revoked(self, key_id: str) -> None:
        self._cache.revoke(key_id)

    async def _ask(self, digest: bytes, *, patient: bool = True) -> _Known:
        lock = self._asking.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                known = self._cache.get(digest, self._now_s())
                if known is not None and self._now_s() < known.ask_s:
                    return known  # somebody asked while we waited
                await self._ask_now(digest, patient=patient)
        finally:
            if not lock.locked():
                self._asking.pop(digest, None)
        known = self._cache.get(digest, self._now_s())
        if known is None:
            raise unavailable("API keys cannot be checked right now. Try again in a moment.")
        return known

    async def _ask_now(self, digest: bytes, *, patient: bool) -> None:
        try:
            principal = await self._lookup.key(digest, patient=patient)
        except RefusedError as error:
            if error.refusal.kind is RefusalKind.NOT_FOUND:
                self._cache.absent(digest, self._now_s())
            else:
                self._cache.unanswered(digest, self._now_s())
        except BusError:
            self._cache.unanswered(digest, self._now_s())
        else:
            self._cache.found(digest, principal, self._now_s())
