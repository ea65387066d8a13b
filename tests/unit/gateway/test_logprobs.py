"""Log probabilities from the log to the wire of both doors."""

import itertools
import json

import pytest

from services.gateway.events import FROM_START, ChatEvents, ResponseEvents
from services.gateway.openai_objects import chat_completion, logprob_list, response_object
from services.gateway.reply import ReplyFold
from shared.messages import RequestEcho, TokenLogprob
from shared.token_log import event_of_token
from tests.unit.gateway.logs import accepted, log_of, odds_of
from tests.unit.gateway.test_events import DELTA, openai_client, wire

TEXTS = ["Hel", "lo", " wor", "ld", ""]  # the last one ends the reply and is no part of its text
SHOWN = logprob_list(odds_of(at, text) for at, text in enumerate(TEXTS))
LOG = log_of(TEXTS, cuts=[1, 3], logprobs=True, head=accepted(echo=RequestEcho(top_logprobs=2)))
DEALS = [[LOG], [[item] for item in LOG], [LOG[:3], LOG[3:]]]


def bodies(events, deals):
    return [json.loads(event.data) for items in deals for event in events.feed(items) if event.data != b"[DONE]"]


@pytest.mark.parametrize("deals", DEALS)
def test_every_delta_has_those_of_its_tokens(deals):
    """However chunks are joined, the deltas' lists join to the list of the whole text, which every later event repeats."""
    got = {}
    for body in bodies(ResponseEvents(), deals):
        got.setdefault(body["type"].removeprefix("response."), []).append(body)
    assert list(itertools.chain(*(body["logprobs"] for body in got["output_text.delta"]))) == SHOWN
    assert got["output_text.done"][0]["logprobs"] == SHOWN
    assert got["content_part.done"][0]["part"]["logprobs"] == SHOWN
    assert got["completed"][0]["response"]["output"][0]["content"][0]["logprobs"] == SHOWN
    assert got["completed"][0]["response"]["top_logprobs"] == 2


@pytest.mark.parametrize("cut", range(len(TEXTS)))
def test_a_resumed_stream_has_those_it_has_not_seen(cut: int):
    """A cut at any token: the rest is the rest, not one more or less."""
    events = ResponseEvents(after=event_of_token(cut) if cut else FROM_START)
    deltas = [body for body in bodies(events, [LOG]) if body["type"] == DELTA]
    first = cut + 1 if cut else 0
    assert list(itertools.chain(*(body["logprobs"] for body in deltas))) == SHOWN[first:]


@pytest.mark.parametrize("deals", DEALS)
def test_chat_chunks_have_those_of_their_tokens(deals):
    """Streamed piece by piece or as one object, chat completions tell the same."""
    chunks = [body["choices"][0] for body in bodies(ChatEvents(), deals)]
    told = [choice["logprobs"]["content"] for choice in chunks if choice["logprobs"] is not None]
    assert list(itertools.chain(*told)) == SHOWN
    fold = ReplyFold()
    for item in LOG:
        fold.add(item)
    assert chat_completion(fold.view)["choices"][0]["logprobs"] == {"content": SHOWN, "refusal": None}
    assert response_object(fold.view)["output"][0]["content"][0]["logprobs"] == SHOWN


def test_who_did_not_ask_gets_none():
    """The lists are empty where the API wants a list, and null where it wants nothing."""
    plain = log_of(TEXTS)
    assert all(body["logprobs"] == [] for body in bodies(ResponseEvents(), [plain]) if body["type"] == DELTA)
    assert all(body["choices"][0]["logprobs"] is None for body in bodies(ChatEvents(), [plain]))


def test_half_a_character_is_told_by_its_bytes():
    """A token that is no text of its own has its bytes; one that has none, as the end of a reply, is left out."""
    first, second = "é".encode()[:1], "é".encode()[1:]
    told = logprob_list([TokenLogprob(first, -1.0), TokenLogprob(second, -2.0), TokenLogprob(b"", -3.0)])
    assert [one["bytes"] for one in told] == [[0xC3], [0xA9]]
    assert told[0] == {"token": "\ufffd", "bytes": [0xC3], "logprob": -1.0, "top_logprobs": []}


def test_the_official_client_reads_both_doors():
    """openai-python's stream helpers accumulate the log probabilities of a response and of a chat completion."""
    deals = [LOG[:1], LOG[1:3], LOG[3:]]
    with openai_client(wire(ResponseEvents(), deals)).responses.stream(model="stub", input="hi") as stream:
        final = list(stream)[-1].response
    assert [one.logprob for one in final.output[0].content[0].logprobs] == [one["logprob"] for one in SHOWN]
    client = openai_client(wire(ChatEvents(), deals))
    messages = [{"role": "user", "content": "hi"}]
    with client.chat.completions.stream(model="stub", messages=messages, logprobs=True) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.logprobs is not None
    assert [one.logprob for one in choice.logprobs.content] == [one["logprob"] for one in SHOWN]
    assert choice.logprobs.content[0].top_logprobs[0].token == "x"
