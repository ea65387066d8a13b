"""Many replies that end in every way, on a running Chorus; then every reserved token must be settled or refunded.

    python -m tests.fuzz.endings DIR/ready.json [COUNT]         COUNT 2,000; ends with 1 when a token is missing

whole | streamed | left by its client | stopped | background, stopped | superseded | refused | deleted
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from shared.quota import Totals
from shared.valkey import Valkey

AT_ONCE = 16
SETTLE_S = 120.0


class Endings:
    def __init__(self, gateways: list[str], key: str, seed: int = 1) -> None:
        self._gateways, self._chance = gateways, random.Random(seed)
        self._headers = {"Authorization": f"Bearer {key}"}
        self.told: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        ways = (
            self._whole,
            self._left,
            self._stopped,
            self._background,
            self._superseded,
            self._refused,
            self._deleted,
        )
        left = iter(range(count))

        async def one() -> None:
            async with aiohttp.ClientSession(headers=self._headers) as http:
                for number in left:
                    way = ways[number % len(ways)]
                    await way(http, self._chance.choice(self._gateways))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one())

    async def _ask(self, http: aiohttp.ClientSession, url: str, path: str, **body: Any) -> dict[str, Any]:
        async with http.post(url + path, json=body) as answer:
            found: dict[str, Any] = await answer.json()
            self.told[str(answer.status)] += 1
            return found

    async def _whole(self, http: aiohttp.ClientSession, url: str) -> None:
        await self._ask(http, url, "/v1/responses", input="whole", max_output_tokens=self._chance.randrange(1, 40))

    async def _left(self, http: aiohttp.ClientSession, url: str) -> None:
        """The client goes away: nobody listens, and the reply ends as idle or by itself."""
        body = {"input": "left", "max_output_tokens": 30, "stream": True}
        async with http.post(f"{url}/v1/responses", json=body) as answer:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._chance.random() * 0.2):
                    await answer.content.read(400)
            answer.close()
        self.told["left"] += 1

    async def _stopped(self, http: aiohttp.ClientSession, url: str) -> None:
        made = await self._ask(http, url, "/v1/responses", input="stop", background=True, max_output_tokens=400)
        await asyncio.sleep(self._chance.random() * 0.2)
        await self._ask(http, url, f"/v1/responses/{made['id']}/cancel")

    async def _background(self, http: aiohttp.ClientSession, url: str) -> None:
        made = await self._ask(
            http, url, "/v1/responses", input="b", background=True, service_tier="flex", max_output_tokens=9
        )
        await self._ask(http, url, f"/v1/responses/{made['id']}/cancel")

    async def _superseded(self, http: aiohttp.ClientSession, url: str) -> None:
        conversation = (await self._ask(http, url, "/v1/conversations"))["id"]
        for text in ("one", "two"):
            common = {"conversation": conversation, "max_output_tokens": 60}
            await self._ask(http, url, "/v1/responses", input=text, background=True, **common)
        await self._ask(http, url, f"/v1/conversations/{conversation}/regenerate")

    async def _refused(self, http: aiohttp.ClientSession, url: str) -> None:
        await self._ask(http, url, "/v1/responses", input="word " * 20_000)

    async def _deleted(self, http: aiohttp.ClientSession, url: str) -> None:
        store = self._chance.random() < 0.5
        if store:
            made = await self._ask(http, url, "/v1/responses", input="gone", background=True, max_output_tokens=50)
            async with http.delete(f"{url}/v1/responses/{made['id']}") as answer:
                self.told[str(answer.status)] += 1
        else:
            await self._ask(http, url, "/v1/responses", input="unstored", store=False, max_output_tokens=9)


async def totals(valkey: Valkey) -> Totals:
    found = [0, 0, 0]
    for key in await valkey.call("KEYS", "*:quota:*"):
        values = await valkey.call("HMGET", key, *Totals._fields)
        found = [one + int(value or 0) for one, value in zip(found, values, strict=True)]
    return Totals(*found)


async def main() -> int:
    ready = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2_000
    valkey, endings, began_s = (
        Valkey(ready["redis"]),
        Endings(ready["gateways"], ready["keys"]["paid"]),
        time.monotonic(),
    )
    await endings.run(count)
    asked_s, give_up_s = time.monotonic() - began_s, time.monotonic() + SETTLE_S
    while True:
        sums = await totals(valkey)
        missing = sums.reserved - sums.settled - sums.refunded
        if missing == 0 or time.monotonic() > give_up_s:
            break
        await asyncio.sleep(0.5)
    await valkey.close()
    found = {
        "requests": count,
        "told": dict(endings.told),
        **sums._asdict(),
        "missing": missing,
        "s": round(asked_s, 1),
    }
    print(json.dumps(found))  # noqa: T201
    return 0 if missing == 0 and sums.settled > 0 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
