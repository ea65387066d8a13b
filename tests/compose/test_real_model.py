"""The default profile: a real model's reply through the proxy, also when its replica is killed."""

import os

import pytest

from tests.compose.stack import Stack, docker
from tests.compose.test_stack import killed_while_writing, running_replica
from tests.integration.system import eventually
from tests.integration.test_real_system import (
    test_a_prompt_too_long_is_refused_with_limit_and_count,
    test_a_seeded_reply_is_the_same_again,
    test_cuts_resume_on_the_other_gateway,
    test_it_knows_the_capital_of_france,
    test_the_mini_model_says_what_it_is,
    test_three_turns_by_reference_equal_the_context_sent_whole,
    wires,
)
from tests.integration.wire import Wire

__all__ = [
    "test_a_prompt_too_long_is_refused_with_limit_and_count",
    "test_a_seeded_reply_is_the_same_again",
    "test_cuts_resume_on_the_other_gateway",
    "test_it_knows_the_capital_of_france",
    "test_the_mini_model_says_what_it_is",
    "test_three_turns_by_reference_equal_the_context_sent_whole",
    "wires",
]

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif("CHORUS_COMPOSE_MODEL" not in os.environ, reason="CHORUS_COMPOSE_MODEL names no model folder"),
]
QUESTION = {
    "model": "smollm2-135m",
    "input": "Tell a long story about a river.",
    "max_output_tokens": 200,
    "temperature": 0,
}


@pytest.fixture
def chorus(real_stack: Stack) -> Stack:
    return real_stack


def test_the_real_model_answers_through_the_proxy(real_stack: Stack) -> None:
    """A question gets words of the real model; the mini model is there too."""
    with Wire(real_stack.proxy, real_stack.key()) as wire:
        heard = wire.stream(QUESTION)
        assert heard.final is not None
        assert heard.final["usage"]["output_tokens"] == len(heard.token_ids) > 20
        assert "river" in heard.text
        assert {model["id"] for model in wire.get("/v1/models").json()["data"]} == {"smollm2-135m", "smollm2-135m-mini"}


def test_docker_kill_of_the_real_replica(real_stack: Stack) -> None:
    """The replica that writes is killed: the other one goes on in the middle of the sentence, with the same words."""
    with Wire(real_stack.proxy, real_stack.key()) as wire:
        reference = wire.stream(QUESTION)
        victims: list[str] = []

        def kill() -> None:
            victims.append(running_replica(real_stack, "replica"))
            docker("kill", real_stack.container(victims[0]))

        heard = killed_while_writing(wire, QUESTION, kill)
        docker("start", real_stack.container(victims[0]))
        assert heard.text == reference.text
        assert heard.token_ids == reference.token_ids
        eventually(lambda: real_stack.healthy(victims[0]), "the replica is back", 120)
