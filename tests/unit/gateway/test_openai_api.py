"""JSON from outside: what is taken, and what is refused with which field named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import bodies
from services.gateway.bodies import depth_of
from services.gateway.openai_api import parse_chat, parse_response
from shared.catalog import local_catalog
from shared.errors import RefusedError
from shared.limits import INPUT_CHARS_MAX, INPUT_ITEMS_MAX, JSON_DEPTH_MAX, LOGIT_BIAS_MAX
from shared.messages import InputItem, Principal
from shared.outcomes import RefusalKind
from shared.tiers import Tier

CATALOG = local_catalog("stub")
HELLO = [{"role": "user", "content": "hi"}]


def respond(**body):
    return parse_response(json.dumps({"input": "hi", **body}).encode(), CATALOG)


def chat(**body):
    return parse_chat(json.dumps({"messages": HELLO, **body}).encode(), CATALOG)


def refusal(parse, *args, **body):
    with pytest.raises(RefusedError) as caught:
        parse(*args, **body)
    return caught.value.refusal


# --- what is taken ---------------------------------------------------------------------------------------


def test_the_smallest_request_gets_the_defaults():
    """A bare input is a user's message to the default model, stored, with OpenAI's sampling defaults."""
    asked = respond()
    assert asked.items == (InputItem(role="user", text="hi"),)
    assert (asked.model, asked.stream, asked.token_ids, asked.include_usage) == ("stub", False, False, False)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (1.0, 1.0, None)
    assert (asked.echo.door, asked.echo.store, asked.echo.background) == ("responses", True, False)


def test_input_may_be_messages_with_texts_or_text_parts():
    """Roles and parts of both doors' spellings become items; a refusal part is the text of the refusal."""
    items = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}],
        },
    ]
    assert [(item.role, item.text) for item in respond(input=items).items] == [
        ("developer", "be brief"),
        ("user", "ab"),
        ("assistant", "cd"),
    ]


def test_every_sampling_field_arrives():
    """All that shapes sampling, OpenAI's and ours, is passed on as given; negative seeds become 63 bits."""
    given_ = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "ignore_eos": True,
    }
    for asked in (
        respond(**given_, seed=-1, stop="x", logit_bias={"12": -100, "3": 5}),
        chat(**given_, seed=-1, stop=["x"]),
    ):
        assert {name: getattr(asked.sampling, name) for name in given_} == given_
        assert asked.sampling.seed == (1 << 63) - 1
        assert asked.sampling.stop == ("x",)
    assert respond(logit_bias={"12": -100, "3": 5}).sampling.logit_bias == {3: 5.0, 12: -100.0}


def test_the_echo_holds_what_the_response_object_repeats():
    """Instructions, parent, limits, metadata and tier stand in the echo."""
    parent = "resp_local0101JDZZZZZZZZZZZZZZZZZZZZZZ"
    echo = respond(
        instructions="be kind",
        previous_response_id=parent,
        max_output_tokens=9,
        metadata={"b": "2", "a": "1"},
        service_tier="flex",
        background=True,
        model="stub-mini",
    ).echo
    assert (echo.instructions, echo.previous_response_id, echo.max_output_tokens) == ("be kind", parent, 9)
    assert (echo.metadata, echo.service_tier, echo.background) == ({"a": "1", "b": "2"}, "flex", True)
    assert echo.requested_model == "stub-mini"
    assert (
        respond(conversation={"id": "conv_01K0000000000000000000000A"}).echo.conversation_id
        == "conv_01K0000000000000000000000A"
    )
    assert respond(store=False).echo.store is False


def test_the_echo_says_how_much_the_model_may_write_at_most():
    """More than the model writes is no error, as its limit is not the client's to know; but the echo does not lie."""
    assert respond(max_output_tokens=1_000_000, model="stub-mini").echo.max_output_tokens == 1024
    assert chat(max_tokens=1_000_000, model="stub").echo.max_output_tokens == 4096


def test_chat_takes_both_names_of_the_limit_and_is_not_stored_by_default():
    """`max_completion_tokens` stands before the older `max_tokens`; chat stores only when asked."""
    assert chat(max_tokens=3).echo.max_output_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).echo.max_output_tokens == 4
    assert (chat().echo.door, chat().echo.store, chat(store=True).echo.store) == ("chat", False, True)
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_nulls_are_defaults_and_unknown_fields_are_ignored():
    """SDKs send null for what they leave open, and newer ones send fields we have never heard of."""
    asked = respond(temperature=None, stop=None, metadata=None, tools=[], text=None, something_new={"deep": [1]})
    assert asked.sampling == respond().sampling
    assert chat(n=1, tool_choice="none", response_format={"type": "text"}, logprobs=False, modalities=["text"])


def test_log_probabilities_are_asked_for_as_each_door_has_it():
    """Responses by an `include` value or a number of likeliest tokens, chat by a flag; the response object echoes it."""
    assert respond().sampling.logprobs is None
    assert respond(include=["message.output_text.logprobs"]).sampling.logprobs == 0
    asked = respond(top_logprobs=20)
    assert (asked.sampling.logprobs, asked.echo.top_logprobs) == (20, 20)
    assert chat(top_logprobs=0).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temperature": 2.1}, "temperature must be a number from 0 to 2."),
        ({"temperature": "hot"}, "temperature must be a number from 0 to 2."),
        ({"top_p": 0}, "top_p must be a number above 0, at most 1."),
        ({"top_k": -1}, "top_k must be an integer from 0 (off) to 1000000."),
        ({"min_p": 1.1}, "min_p must be a number from 0 to 1."),
        ({"presence_penalty": -3}, "presence_penalty must be a number from -2 to 2."),
        ({"frequency_penalty": 3}, "frequency_penalty must be a number from -2 to 2."),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, at most 10."),
        ({"logit_bias": {"1": 101}}, "logit_bias must be at most 1024 token ids, each with a number from -100 to 100."),
        ({"seed": 1 << 63}, "seed must be an integer from -9223372036854775808 to 9223372036854775807."),
        ({"stop": [""]}, "stop must be a string of 1 to 256 characters, or at most 4 of them."),
        ({"top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20."),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false."),
    ],
)
@pytest.mark.parametrize("parse", [respond, chat])
def test_a_parameter_out_of_range_is_told_the_range(parse, body, said):
    """Both ends of it, whichever was passed."""
    assert refusal(parse, **body).message == said


def test_token_ids_are_asked_for_by_name():
    """The opt-in extra is an `include` value; OpenAI's other values are ignored."""
    assert respond(include=["chorus.token_ids", "reasoning.encrypted_content"]).token_ids
    assert not respond(include=["reasoning.encrypted_content"]).token_ids


# --- the hash of the body --------------------------------------------------------------------------------


def test_the_body_hash_is_of_the_meaning_and_not_of_the_bytes():
    """Key order, spacing, spelled-out defaults and how the answer is read do not change it; what is asked does."""
    plain = respond()
    same = [
        parse_response(b'{ "stream":true, "input" : "hi" }', CATALOG),
        respond(temperature=1.0, include=["chorus.token_ids"]),
        respond(input=[{"content": [{"text": "hi", "type": "input_text"}], "role": "user"}]),
    ]
    assert {asked.body_hash for asked in same} == {plain.body_hash}
    other = [respond(input="ho"), respond(temperature=0), respond(store=False), respond(metadata={"a": "b"}), chat()]
    assert len({asked.body_hash for asked in [plain, *other]}) == 1 + len(other)
    one, two = respond(metadata={"a": "1", "b": "2"}), respond(metadata={"b": "2", "a": "1"})
    assert one.body_hash == two.body_hash


def test_the_message_carries_the_request():
    """What goes to conversation is the parsed request with who asks and under which key."""
    who = Principal(org="o", user="u", tier=Tier.FREE, key_id="k")
    asked = respond()
    message = asked.message(who, "req_1", "gw:1")
    assert (message.principal, message.request_id, message.idempotency_key) == (who, "req_1", "gw:1")
    assert (message.items, message.body_hash) == (asked.items, asked.body_hash)


# --- what is refused -------------------------------------------------------------------------------------

BOTH = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "a\0"}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(n): 1 for n in range(LOGIT_BIAS_MAX + 1)}}, "logit_bias"),
    ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
    ({"metadata": {"k": 1}}, "metadata[...]"),
    ({"metadata": {"k": "\0"}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"stream": "yes"}, "stream"),
    ({"store": 1}, "store"),
    ({"model": 5}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"user": "u" * 513}, "user"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": True}, "top_logprobs"),
]


@pytest.mark.parametrize(("body", "param"), BOTH, ids=[f"{n}-{next(iter(b))}" for n, (b, _) in enumerate(BOTH)])
@pytest.mark.parametrize("parse", [respond, chat])
def test_fields_of_both_doors_are_refused_by_name(parse, body, param):
    """A wrong type, range or size is a 400 that names the field."""
    no = refusal(parse, **body)
    assert (no.kind, no.status, no.param) == (RefusalKind.BAD_REQUEST, 400, param)
    assert no.message.endswith(".")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": "a\0b"}, "input"),
        ({"input": "x" * (INPUT_CHARS_MAX + 1)}, "input"),
        ({"input": "é" * 600_000}, "input"),
        ({"input": HELLO * (INPUT_ITEMS_MAX + 1)}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [*HELLO, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2.5}, "max_output_tokens"),
        ({"instructions": "a\0"}, "instructions"),
        ({"background": True, "store": False}, "store"),
        ({"previous_response_id": "resp_local0101JDZZZZZZZZZZZZZZZZZZZZZZ", "conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.type"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"n": "x"}, "n"),
        ({"messages": HELLO}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_fields_of_responses_are_refused_by_name(body, param):
    """What `/v1/responses` alone knows, or cannot honour, is a 400 that names the field."""
    no = refusal(respond, **body)
    assert (no.status, no.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "t"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_fields_of_chat_are_refused_by_name(body, param):
    """What chat completions alone know, or cannot honour, is a 400 that names the field."""
    no = refusal(chat, **body)
    assert (no.status, no.param) == (400, param)


def test_a_parent_that_cannot_be_one_is_not_found():
    """An id of the wrong shape gets the same answer as an unknown one."""
    no = refusal(respond, previous_response_id="resp_../../x")
    assert (no.kind, no.status, no.param) == (RefusalKind.NOT_FOUND, 404, "previous_response_id")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"[]",
        b"{",
        b'{"input":"hi"} trailing',
        b'{"input":"\xff"}',
        b'{"input":"\\ud800"}',
        b'{"input":"hi","temperature":NaN}',
        b'{"input":"hi","temperature":1e999}',
        b'\xff\xfe{"input":"hi"}',
        b'{"other":"hi"}',
    ],
)
def test_what_is_not_a_request_in_json_is_a_bad_request(raw):
    """Malformed JSON, invalid UTF-8, lone surrogates and numbers that are none are refused, never an error of ours."""
    assert refusal(parse_response, raw, CATALOG).status == 400


@pytest.mark.parametrize("depth", [JSON_DEPTH_MAX + 1, 100_000])
def test_deep_nesting_is_refused_also_in_fields_we_ignore(depth):
    """Depth is bounded before anything is built, and brackets inside strings do not count."""
    deep = b"[" * depth + b"]" * depth
    assert "nested" in refusal(parse_response, b'{"input":"hi","x":' + deep + b"}", CATALOG).message
    assert respond(input="[" * depth).items[0].text == "[" * depth


@given(
    st.recursive(st.text(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
)
def test_the_depth_that_is_measured_is_the_depth_there_is(value):
    """The scan agrees with a walk of the parsed value, whatever quotes and brackets its strings hold."""

    def depth(node):
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return 1 + max(map(depth, inner), default=0) if isinstance(node, dict | list) else 0

    assert depth_of(json.dumps(value).encode()) == depth(value)


def test_an_unclosed_string_full_of_escapes_is_passed_over_once():
    """A body built to make the scan quadratic is one string to it, not one attempt per quote."""
    nasty = b"[" * 3 + b'"' + b'\\"' * 100_000
    assert len(bodies._STRING_OR_BRACKET.findall(nasty)) == 4
    assert depth_of(nasty) == 3
