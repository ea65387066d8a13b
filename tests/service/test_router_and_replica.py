"""A lane message becomes a log with one end and one archived reply, whatever happens to routers and replicas meanwhile."""

from collections.abc import AsyncIterator

import pytest

from shared.outcomes import EndReason
from shared.tiers import Tier
from tests.service.serving_plane import Plane, PlaceEngine, eventually, plane


@pytest.fixture
async def region() -> AsyncIterator[Plane]:
    async with plane() as made:
        yield made


async def test_a_lane_message_becomes_an_ended_reply(region: Plane):
    """Queued, placed, opened, dispatched, written, ended, archived, acked; usage and blocks add up."""
    await region.replica()
    await region.router()
    reply = await region.send(tokens=40, budget=24)
    ended = await region.ended(reply)
    view = await region.log(reply)
    assert view.ids == region.expected_ids(reply)
    assert ended.reason is EndReason.MAX_TOKENS
    assert ended.checked
    assert ended.attempts == 1
    assert ended.first_token_s is not None
    assert ended.usage.output_tokens == 24
    await region.calm()
    await eventually(lambda: len(region.server.stream("local_USAGE").entries) == 1, "one usage record")
    (usage,) = await region.usage(reply)
    assert (usage.input_tokens, usage.output_tokens, usage.replica) == (40, 24, "replica-1")
