"""The gateway's doors over HTTP."""

import json

import pytest

from tests.service.gateway_world import World, parse_sse


@pytest.fixture
async def world():
    async with World().running() as running:
        yield running


async def test_a_streamed_response_arrives_as_numbered_events(world):
    """A streamed POST gives the whole event sequence, each event's id equal to its sequence number."""
    async with world.client() as client, client.post("/v1/responses", json={"input": "hi", "stream": True}) as response:
        assert response.status == 200
        events = parse_sse(await response.read())
    bodies = [json.loads(event.data) for event in events]
    assert [event.id for event in events] == [str(body["sequence_number"]) for body in bodies]
    assert [event.name for event in events] == [body["type"] for body in bodies]
    assert bodies[0]["type"] == "response.created"
    assert "".join(body["delta"] for body in bodies if body["type"] == "response.output_text.delta") == "Hello world!"
    assert bodies[-1]["response"]["usage"]["output_tokens"] == 4
