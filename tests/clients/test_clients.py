"""The official clients are the wire's acceptance test: plain users' scripts, run with each, 1 s heartbeats on.

`make clients` installs them and runs this; `make test` runs what is installed already.
"""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.clients.conftest import MODEL, SCRIPT_S, WORDS, Told
from tests.clients.install import CLIENTS, Client

Scripts = dict[str, Future[Told]]

TYPES = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]
QUEUED = "response.queued"
ERRORS = {
    "key": ["AuthenticationError", 401, "invalid_api_key", True],
    "key_stream": ["AuthenticationError", 401, "invalid_api_key", True],
    "reply": ["NotFoundError", 404, "not_found", True],
    "cancel": ["NotFoundError", 404, "not_found", True],
    "conversation": ["NotFoundError", 404, "not_found", True],
    "model": ["NotFoundError", 404, "model_not_found", True],
    "field": ["BadRequestError", 400, "invalid_value", True],
    "field_stream": ["BadRequestError", 400, "invalid_value", True],
    "tools": ["BadRequestError", 400, "invalid_value", True],
    "other_body": ["UnprocessableEntityError", 422, "idempotency_key_reused", True],
}
LIMITS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]


def missing(client: Client) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not client.installed, reason=f"{client.package} is not installed here: `make clients`")


def those(*names: str) -> Any:
    return pytest.mark.parametrize(
        "name", [pytest.param(client.name, marks=missing(client)) for client in CLIENTS if client.name in names]
    )


openai = those("openai-new", "openai-old", "openai-node")
langchain = those("langchain")
doors = pytest.mark.parametrize("door", ["chat", "responses"])


def result(told: Scripts, name: str, scene: str) -> dict[str, Any]:
    """What came of one demand; an exception that the user would have seen fails the test."""
    said: dict[str, Any] = told[name].result(SCRIPT_S).results[scene]
    assert "raised" not in said, said["raised"]
    return said


THREE = [word.strip() for word in WORDS[:3]]  # what is written before the stop string


def three_words(text: str) -> bool:
    return len(text.split()) == 3


@those(*(client.name for client in CLIENTS))
def test_heartbeats_fell_within_its_streams(told: Scripts, name: str) -> None:
    """Comments really stood between the events that the client read, so the other tests were held under them."""
    done = told[name].result(SCRIPT_S)
    assert done.heartbeats >= 4
    pinned = next(client.package for client in CLIENTS if client.name == name)
    assert pinned.endswith(done.results["version"])


@openai
def test_a_chat_completion(told: Scripts, name: str) -> None:
    """Text, finish reason and usage arrive, whole and streamed; all chunks have one id."""
    whole, streamed = (result(told, name, scene) for scene in ("chat", "chat_stream"))
    assert three_words(whole["text"])
    assert three_words(streamed["text"])
    assert whole["finish_reason"] == streamed["finish_reason"] == "length"
    assert whole["completion_tokens"] == streamed["completion_tokens"] == 3
    assert whole["prompt_tokens"] > 0
    assert streamed["ids"] == 1


@openai
def test_the_chat_stream_helper(told: Scripts, name: str) -> None:
    """The helper's deltas are its final completion."""
    said = result(told, name, "chat_stream_helper")
    assert said["text"].split() == THREE
    assert said["heard"] == said["text"]
    assert said["finish_reason"] == "stop"


@openai
def test_a_response(told: Scripts, name: str) -> None:
    """A response is typed as the client knows it, and retrieved as it was."""
    said = result(told, name, "response")
    assert three_words(said["text"])
    assert said["again"] == said["text"]
    assert (said["status"], said["reason"]) == ("incomplete", "max_output_tokens")
    assert said["output_tokens"] == 3
    assert said["cached_tokens"] >= 0


@openai
def test_a_response_streams_in_order(told: Scripts, name: str) -> None:
    """Events are of known types, in the protocol's order, with rising numbers; notices of waiting only while it does."""
    said = result(told, name, "response_stream")
    assert [kind for kind in said["types"] if kind != QUEUED] == TYPES
    waited = said["types"][1 : 1 + said["types"].count(QUEUED)]
    assert set(waited) <= {QUEUED}
    assert said["rising"]
    assert three_words(said["text"])
    assert said["final"] == said["text"]
    assert said["output_tokens"] == 3


@openai
def test_the_response_stream_helper_goes_on_after_a_cut(told: Scripts, name: str) -> None:
    """Left in the middle and gone on with by id, the helper misses nothing and repeats nothing."""
    said = result(told, name, "response_stream_helper")
    assert said["text"].split() == THREE
    assert said["final"] == said["text"]
    assert said["after_the_cut"]
    assert said["status"] == "completed"


@those("openai-node")
def test_the_response_stream_s_listeners(told: Scripts, name: str) -> None:
    """openai-node's `responses.stream()`, which throws on an event it does not know, hears them all."""
    said = result(told, name, "response_stream_listeners")
    assert said["text"].split() == THREE
    assert said["final"] == said["text"]
    assert said["status"] == "completed"
    assert said["events"] >= len(TYPES)


@openai
def test_a_background_response(told: Scripts, name: str) -> None:
    """It is answered at once, polled to its end, and replayed after an event number."""
    said = result(told, name, "background")
    assert said["first"] in ("queued", "in_progress")
    assert said["status"] == "incomplete"
    assert three_words(said["text"])
    assert said["replayed"] == said["text"]
    assert said["begins_after"] > 0


@openai
def test_a_cancelled_response(told: Scripts, name: str) -> None:
    """Cancelling is answered with the cancelled response, again too."""
    assert result(told, name, "cancel") == {"status": "cancelled", "again": "cancelled", "usage": True}


@openai
def test_turns_by_reference(told: Scripts, name: str) -> None:
    """`previous_response_id` brings the context along; input items are listed; what is deleted is not found."""
    said = result(told, name, "turns")
    assert said == {"named": True, "longer": True, "items": ["and now?"], "deleted": True}


@openai
def test_a_conversation(told: Scripts, name: str) -> None:
    """A conversation is created with items, spoken in, listed, added to and taken from, updated and deleted."""
    said = result(told, name, "conversation")
    assert three_words(said.pop("text"))
    assert said == {
        "named": True,
        "items": ["first", "second", "third"],
        "left": True,
        "topic": ["walls", "doors"],
        "deleted": True,
    }


@openai
def test_errors_have_their_classes(told: Scripts, name: str) -> None:
    """Each refusal is the exception that users catch, with its code and its request's id."""
    assert result(told, name, "errors") == ERRORS


@openai
def test_headers_and_models(told: Scripts, name: str) -> None:
    """The request's id and the limits can be read, and the models are listed."""
    said = result(told, name, "headers")
    raw, parsed = said["request_id"]
    assert raw.startswith("req_")
    assert parsed == raw
    assert said["limits"] == LIMITS
    assert MODEL in said["models"]
    assert said["model"] == MODEL


@those("openai-new", "openai-old")
def test_the_asynchronous_client(told: Scripts, name: str) -> None:
    """AsyncOpenAI streams both doors."""
    said = result(told, name, "asynchronous")
    assert three_words(said["chat"])
    assert said["text"].split() == THREE
    assert said["final"] == said["text"]


# --- LangChain -------------------------------------------------------------------------------------------


@langchain
@doors
def test_langchain_invokes(told: Scripts, name: str, door: str) -> None:
    """`invoke` gives the text and what it cost."""
    said = result(told, name, f"{door}_invoke")
    assert three_words(said["text"])
    assert said["usage"]["output_tokens"] == 3
    assert said["usage"]["total_tokens"] == said["usage"]["input_tokens"] + 3


@langchain
@doors
def test_langchain_streams(told: Scripts, name: str, door: str) -> None:
    """`stream` gives pieces that add up, and the usage with the last."""
    said = result(told, name, f"{door}_stream")
    assert said["texts"] > 1
    assert three_words(said["text"])
    assert said["whole"] == said["text"]
    assert said["usage"]["output_tokens"] == 3


@langchain
@doors
def test_langchain_asynchronously(told: Scripts, name: str, door: str) -> None:
    """`ainvoke` and `astream` do as well."""
    said = result(told, name, f"{door}_asynchronous")
    assert three_words(said["invoked"])
    assert three_words(said["streamed"])


@langchain
@doors
def test_langchain_sends_turns_back(told: Scripts, name: str, door: str) -> None:
    """Answers go back in as history, in the form in which LangChain keeps them."""
    said = result(told, name, f"{door}_turns")
    assert said["prompts"] == sorted(set(said["prompts"]))
    assert three_words(said["text"])


@langchain
@doors
def test_langchain_chains(told: Scripts, name: str, door: str) -> None:
    """A prompt, the model and a parser, in a batch and streamed."""
    said = result(told, name, f"{door}_chain")
    assert all(three_words(text) for text in [*said["batch"], said["streamed"]])


@langchain
@doors
def test_langchain_s_errors(told: Scripts, name: str, door: str) -> None:
    """Its exceptions are still openai's."""
    assert result(told, name, f"{door}_errors") == {
        "key": ["AuthenticationError", "invalid_api_key"],
        "model": ["NotFoundError", "model_not_found"],
        "field": ["BadRequestError", "invalid_value"],
    }


@langchain
def test_langchain_remembers_by_reference(told: Scripts, name: str) -> None:
    """With `use_previous_response_id` the second turn is sent alone, and its prompt holds the first."""
    said = result(told, name, "remembered")
    assert said["ids"] == ["resp_", "resp_"]
    assert said["prompts"][1] > said["prompts"][0] + 3
