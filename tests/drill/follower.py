"""A user's client that does not give up: it posts, and when it is cut it goes on at another gateway after what it has.

It knows beforehand what a scripted replica writes, so each token that is lost, repeated or out of order is seen at
once, with its place.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from services.replica.stub_runner import scripted_token
from shared.tokenizer import STUB_WORD_FIRST
from tests.drill.wire import Answer, CutError, Event, ask

CLOSING = frozenset({"response.completed", "response.incomplete", "response.failed"})
GIVE_UP_S = 60.0  # without anything new
RETRY_S = 0.05
_FIRST, _GAP = 1000, 16  # event numbers: the delta that ends with token i


def script(seed: int, length: int) -> list[int]:
    """Token ids of a scripted reply: a function of the seed and the place, whatever happens to its replicas."""
    return [scripted_token(seed, position) for position in range(length)]


def word(token: int) -> str:
    return f" w{token - STUB_WORD_FIRST:04d}"


@dataclass
class Story:
    """What one reply looked like from outside. Times are `time.monotonic()`."""

    seed: int
    budget: int
    reply_id: str = ""
    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens by then)
    last: int = -1  # event number
    asked_s: float = 0.0
    ended_s: float = 0.0
    final: dict[str, Any] | None = None
    closings: int = 0
    connections: int = 0
    cuts: int = 0  # connections that broke, or could not be made
    turned_away: int = 0  # by a gateway that leaves; another one took it
    errors: list[str] = field(default_factory=list)  # answers that a client would show as an error
    wrong: list[str] = field(default_factory=list)  # tokens, texts and numbers that are not what they must be
    given_up: bool = False

    @property
    def over(self) -> bool:
        return self.final is not None or self.given_up

    @property
    def reason(self) -> str:
        """How it ended, as a client reads it."""
        final = self.final or {}
        if final.get("status") == "cancelled":
            return "cancelled"
        return str((final.get("incomplete_details") or {}).get("reason") or final.get("status") or "open")

    @property
    def complete(self) -> bool:
        return self.reason == "max_output_tokens" and len(self.ids) == self.budget

    def pause_at(self, moment: float) -> float | None:
        """The gap between tokens in which `moment` lies, or that begins soon after it; None: nothing was written."""
        around = [
            later - earlier
            for (earlier, _), (later, _) in zip(self.arrivals, self.arrivals[1:], strict=False)
            if earlier - 0.3 <= moment <= later
        ]
        return max(around, default=None)

    def longest_pause(self) -> float:
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((later - earlier for (earlier, _), (later, _) in pairs), default=0.0)


class Follower:
    """Follows one reply from its message to its end. `scripted`: hold it against what a stub writes."""

    def __init__(
        self,
        gateways: Sequence[str],
        key: str,
        *,
        seed: int,
        tokens: int,
        model: str = "stub",
        scripted: bool = True,
        more: dict[str, Any] | None = None,
    ) -> None:
        self.story = Story(seed=seed, budget=tokens)
        self._gateways, self._key, self._at = list(gateways), key, seed % len(gateways)
        self._expected = script(seed, tokens) if scripted else None
        self._idempotency = {"Idempotency-Key": f"drill-{uuid4().hex}"}
        self._body = {
            "model": model,
            "input": f"{seed}: plan a day in Hampi",  # no prefix in common: placed by load, not by affinity
            "max_output_tokens": tokens,
            "seed": seed,
            "stream": True,
            "include": ["chorus.token_ids"],
            **(more or {}),
        }
        self._news_s = 0.0

    async def run(self) -> Story:
        story = self.story
        story.asked_s = self._news_s = time.monotonic()
        while not story.over:
            try:
                await self._connection()
            except CutError:
                story.cuts += 1
            if story.final is None:
                self._at = (self._at + 1) % len(self._gateways)
                if time.monotonic() - self._news_s > GIVE_UP_S:
                    story.given_up = True
                await asyncio.sleep(RETRY_S)
        return story

    async def _connection(self) -> None:
        """One connection, for as long as it holds."""
        answer = await self._ask()
        self.story.connections += 1
        try:
            if answer.status == 200:
                async for event in answer.events():
                    self._take(event)
            elif answer.status == 204:
                self.story.given_up = self.story.final is None
            else:
                await self._refused(answer)
        finally:
            answer.close()

    async def _ask(self) -> Answer:
        gateway, story = self._gateways[self._at], self.story
        if not story.reply_id:
            return await ask(gateway, "POST", "/v1/responses", self._key, self._body, self._idempotency)
        path = f"/v1/responses/{story.reply_id}?stream=true&include[]=chorus.token_ids"
        return await ask(gateway, "GET", path, self._key, headers={"Last-Event-ID": str(story.last)})

    async def _refused(self, answer: Answer) -> None:
        said = (await answer.body()).decode(errors="replace")
        if answer.status == 503 and "shutting down" in said:
            self.story.turned_away += 1
            return
        self.story.errors.append(f"{answer.status}: {said[:200]}")
        await asyncio.sleep(min(float(answer.headers.get("retry-after", "0")), 2.0))

    # --- what is heard ---------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        story, self._news_s = self.story, time.monotonic()
        if event.sequence_number <= story.last:
            story.wrong.append(f"event {event.sequence_number} after {story.last}")
        story.last = event.sequence_number
        if event.type == "response.created" and event.response is not None:
            story.reply_id = event.response["id"]
        elif event.type == "response.output_text.delta":
            self._delta(event)
        elif event.type in CLOSING:
            story.final, story.ended_s = event.response or {}, self._news_s
            story.closings += 1

    def _delta(self, event: Event) -> None:
        story = self.story
        at = len(story.ids)
        story.ids += event.token_ids
        story.arrivals.append((self._news_s, len(story.ids)))
        if event.sequence_number != _FIRST + _GAP * (len(story.ids) - 1):
            story.wrong.append(f"event {event.sequence_number} ends with token {len(story.ids) - 1}")
        if self._expected is None:
            return
        expected = self._expected[at : len(story.ids)]
        if list(event.token_ids) != expected:
            story.wrong.append(f"tokens [{at}, {len(story.ids)}) are {list(event.token_ids)[:6]}, not {expected[:6]}")
        elif event.delta != "".join(map(word, expected)):
            story.wrong.append(f"the text of tokens [{at}, {len(story.ids)}) is {event.delta[:40]!r}")


async def stop(gateway: str, key: str, reply_id: str) -> int:
    """What the stop button does; the status of the answer."""
    answer = await ask(gateway, "POST", f"/v1/responses/{reply_id}/cancel", key)
    try:
        await answer.body()
        return answer.status
    finally:
        answer.close()


async def retrieve(gateway: str, key: str, reply_id: str) -> Any:
    """The stored reply, token ids included; None when there is no 200."""
    answer = await ask(gateway, "GET", f"/v1/responses/{reply_id}?include[]=chorus.token_ids", key)
    try:
        body = await answer.body()
        return msgspec.json.decode(body) if answer.status == 200 else None
    finally:
        answer.close()
