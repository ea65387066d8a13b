"""The whole path with the real model: what a person sees, turn after turn, whatever is cut in between."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.system import ROOT, System, running
from tests.integration.wire import Wire

MODEL_FILE = ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "smollm2-135m"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not MODEL_FILE.exists(), reason="no model here: run `chorus models fetch`"),
]


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder: Path = tmp_path_factory.mktemp("real")
    with running(folder / "data") as system:
        yield system


@pytest.fixture
def wires(chorus: System) -> Iterator[list[Wire]]:
    with Wire(chorus.gateways[0], chorus.key()) as first, Wire(chorus.gateways[1], chorus.key()) as second:
        yield [first, second]


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "max_output_tokens": tokens, **more}


def test_it_knows_the_capital_of_france(wires: list[Wire]) -> None:
    """A real model answers: the sign that template, weights and sampling are right together."""
    answer = wires[0].post("/v1/responses", greedy(24, input="Name the capital city of France.")).json()
    assert "Paris" in answer["output"][0]["content"][0]["text"]


def test_three_turns_by_reference_equal_the_context_sent_whole(chorus: System) -> None:
    """Turn three sees turns one and two as they were written, and answers as if the whole context had been sent."""
    with openai.OpenAI(base_url=chorus.gateways[0] + "/v1", api_key=chorus.key(), max_retries=0) as client:
        said = ["My name is Meera and I like temples.", "What is my name?", "And what do I like?"]
        context: list[Any] = []
        previous: str | None = None
        for text in said:
            turn = client.responses.create(
                model=MODEL, input=text, previous_response_id=previous, temperature=0, max_output_tokens=48
            )
            context += [{"role": "user", "content": text}]
            whole = client.responses.create(model=MODEL, input=context, temperature=0, max_output_tokens=48)
            assert turn.output_text == whole.output_text
            assert turn.usage is not None
            assert whole.usage is not None
            assert turn.usage.input_tokens == whole.usage.input_tokens
            context += [{"role": "assistant", "content": turn.output_text}]
            previous = turn.id
        assert turn.usage.input_tokens_details.cached_tokens > 0


def test_cuts_resume_on_the_other_gateway(wires: list[Wire]) -> None:
    """Ten cuts of a real reply, each resumed on the other gateway: text and token ids as in the uncut reply."""
    body = greedy(60, input="Tell me about the ruins of Hampi.")
    whole = wires[0].stream(body)
    for index in range(0, len(whole.token_ids), max(1, len(whole.token_ids) // 10)):
        heard = wires[0].stream(body, until=1000 + 16 * index)
        wires[1].resume(heard.reply_id, heard.last, heard)
        assert heard.token_ids == whole.token_ids
        assert heard.text == whole.text
        assert heard.numbers == sorted(set(heard.numbers))


def test_a_seeded_reply_is_the_same_again(wires: list[Wire]) -> None:
    """The same seed draws the same tokens, whatever else runs."""
    body = {
        "model": MODEL,
        "input": "Write a line about rain.",
        "temperature": 0.9,
        "seed": 11,
        "max_output_tokens": 24,
    }
    first, second = wires[0].stream(body), wires[1].stream(body)
    assert first.token_ids == second.token_ids
    assert wires[0].stream({**body, "seed": 12}).token_ids != first.token_ids


def test_the_mini_model_says_what_it_is(wires: list[Wire]) -> None:
    """/v1/models tells that the mini model is the same weights with smaller limits."""
    listed = {model["id"]: model for model in wires[0].get("/v1/models").json()["data"]}
    assert f"{MODEL}-mini" in listed
    assert "same weights" in str(listed[f"{MODEL}-mini"])


def test_a_prompt_too_long_is_refused_with_limit_and_count(wires: list[Wire]) -> None:
    """An over-long prompt is a 400 that says how long it is and how long it may be."""
    answer = wires[0].post("/v1/responses", greedy(8, input="word " * 3000))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"].replace(",", "")
