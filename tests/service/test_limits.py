"""Limits at the doors: true headers, clear refusals, and nothing that breaks when Valkey does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.limits import Allowed, Entry, Visitor
from services.gateway.limits_store import SCRIPT
from shared.settings import Secret
from shared.tiers import Tier
from shared.valkey import Valkey
from tests.integration.servers import RunningValkey
from tests.service.conversation_world import a_world, until
from tests.service.whole_world import Whole, said

KEYS = ["local:requests:{u}", "local:in_flight:{u}"]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from("abcdef"),
            st.builds(Allowed, st.integers(1, 90), st.integers(1, 4)),
            st.integers(-100, 3000),
        ),
        max_size=30,
    )
)
def test_the_script_is_the_pure_code(valkey_url: str, loop: asyncio.Runner, steps: list) -> None:
    """The same requests in the same order are let in and refused alike, with the same figures."""

    async def body() -> None:
        valkey, pure, now_ms = Valkey(valkey_url, call_s=10.0), Visitor(), 1_700_000_000_000
        try:
            await valkey.call("FLUSHALL")
            for enters, key, allowed, passed_ms in steps:
                now_ms += passed_ms
                if enters:
                    wanted = pure.enter(key, allowed, now_ms, 4000)
                    answer = (await valkey.run(SCRIPT, [(KEYS, [key, *allowed, now_ms, 4000, 60])]))[0]
                    assert Entry(*answer) == wanted
                else:
                    pure.leave(key)
                    await valkey.call("ZREM", KEYS[1], key)
        finally:
            await valkey.close()

    loop.run(body())


@asynccontextmanager
async def doors(
    postgres_url: str, valkey_url: str, conversation: dict[str, Any] | None = None, **gateway: Any
) -> AsyncIterator[Whole]:
    async with a_world(postgres_url) as world:
        await world.service(redis_url=Secret(valkey_url), **(conversation or {}))
        whole = Whole(world)
        await whole.start(redis_url=Secret(valkey_url), **gateway)
        yield whole


async def ask(client: aiohttp.ClientSession, **more: Any) -> aiohttp.ClientResponse:
    async with client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 20, **more}) as answer:
        await answer.read()
        return answer


def left(answer: aiohttp.ClientResponse, kind: str) -> tuple[int, int]:
    names = (f"x-ratelimit-limit-{kind}", f"x-ratelimit-remaining-{kind}")
    assert answer.headers[f"x-ratelimit-reset-{kind}"].endswith("s")
    return int(answer.headers[names[0]]), int(answer.headers[names[1]])


async def test_every_answer_says_what_is_left(postgres_url: str, valkey_url: str) -> None:
    """Streams and whole answers carry limit, remaining and reset of requests and tokens, and they are true."""
    async with doors(postgres_url, valkey_url, {"tokens_per_min_paid": 10_000}, requests_per_min_paid=100) as whole:
        client = await whole.client()
        first = await ask(client)
        assert left(first, "requests") == (100, 99)
        limit, remaining = left(first, "tokens")
        assert limit == 10_000
        assert 9_900 < remaining < 10_000 - 20
        streamed = await ask(client, stream=True)
        assert left(streamed, "requests") == (100, 98)
        assert left(streamed, "tokens")[0] == 10_000
        async with client.get("/v1/models") as answer:
            assert "x-ratelimit-limit-requests" not in answer.headers


async def test_too_many_requests_are_told_when_to_come_again(postgres_url: str, valkey_url: str) -> None:
    """Past the minute's requests: 429, the reason, whole seconds of Retry-After, and true headers; others are not touched."""
    async with doors(postgres_url, valkey_url, requests_per_min_paid=3) as whole:
        client, other = await whole.client("ann"), await whole.client("bob")
        statuses = [(await ask(client)).status for _ in range(3)]
        refused = await ask(client)
        assert (*statuses, refused.status) == (200, 200, 200, 429)
        assert left(refused, "requests") == (3, 0)
        assert 1 <= int(refused.headers["Retry-After"]) <= 20
        async with client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}) as answer:
            assert (answer.status, (await said(answer))["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await ask(other)).status == 200


async def test_requests_in_flight_are_bounded_over_gateways_and_freed(postgres_url: str, valkey_url: str) -> None:
    """A third stream of two is refused; when one has ended or its client has left, there is a place again."""
    async with doors(postgres_url, valkey_url, in_flight_paid=2) as whole:
        client = await whole.client()
        whole.words = None

        async def stream() -> int:
            return (await ask(client, stream=True)).status

        async with asyncio.TaskGroup() as group:
            ended, leaving = group.create_task(stream()), group.create_task(stream())

            async def full() -> bool:
                answer = await ask(client, stream=True, background=True)
                assert answer.status == 429
                assert (await _code(client))[0] == "too_many_in_flight"
                return True

            await until(lambda: _both(whole), "both are in flight")
            await full()
            leaving.cancel()
            whole.words = ["done"]
            assert await ended == 200

        async def free() -> bool:
            return (await ask(client)).status == 200

        await until(free, "a place is free again")


async def _both(whole: Whole) -> bool:
    return len(await whole.world.all_queued()) == 2


async def _code(client: aiohttp.ClientSession) -> tuple[str, str]:
    async with client.post("/v1/responses", json={"input": "hi"}) as answer:
        assert int(answer.headers["Retry-After"]) >= 1
        error = (await said(answer))["error"]
        return error["code"], error["message"]


async def test_past_the_tokens_the_mini_model_answers_then_nobody(postgres_url: str, valkey_url: str) -> None:
    """On the wire: the other model's name, the notice and what was asked for; then 429 with what is left."""
    async with doors(postgres_url, valkey_url, {"tokens_per_min_free": 40}) as whole:
        client = await whole.client(tier=Tier.FREE)
        assert (await ask(client)).status == 200
        async with client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 20}) as answer:
            body = await said(answer)
        assert body["model"] == "stub-mini"
        assert body["metadata"]["requested_model"] == "stub"
        assert "limit for stub" in body["metadata"]["notice"]
        answers = [await ask(client) for _ in range(8)]
        refused = next(one for one in answers if one.status == 429)
        assert left(refused, "tokens")[0] == 40
        assert int(refused.headers["Retry-After"]) >= 1


async def test_valkey_killed_paused_flushed_and_back_is_no_error(postgres_url: str, tmp_path: Path) -> None:
    """Whatever happens to Valkey, requests are answered: unlimited while it is away, limited again when it is back."""
    running = RunningValkey(tmp_path)
    await running.start()
    try:
        async with doors(postgres_url, running.url, requests_per_min_paid=2) as whole:
            client = await whole.client()
            assert [(await ask(client)).status for _ in range(3)] == [200, 200, 429]
            admin = Valkey(running.url, call_s=10.0)
            await admin.call("FLUSHALL")
            assert (await ask(client)).status == 200
            await admin.call("SCRIPT", "FLUSH")
            assert (await ask(client)).status == 200
            await admin.call("CLIENT", "PAUSE", 60_000, "ALL")
            paused = [await ask(client) for _ in range(4)]
            assert {one.status for one in paused} == {200}
            assert not any(name.startswith("x-ratelimit") for name in paused[-1].headers)
            await admin.close()
            await running.kill()
            assert [(await ask(client)).status for _ in range(4)] == [200] * 4
            count = whole.metrics.registry.get_sample_value
            assert count("chorus_gateway_limits_total", {"outcome": "unmetered"}) >= 6
            assert count("chorus_gateway_valkey_away") == 1
            await running.start()

            async def limited() -> bool:
                return (await ask(client)).status == 429

            await until(limited, "limits hold again")
            assert count("chorus_gateway_valkey_away") == 0
    finally:
        await running.stop()
