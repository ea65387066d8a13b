"""The log -> event rules: numbers, order, cuts, and how replies end."""

import itertools
import json

import httpx2 as httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.events import ChatEvents, ResponseEvents, terminal_event
from services.gateway.http import PING, encode_events
from services.gateway.openai_objects import REFUSAL_TEXT
from shared.errors import TokenLogError
from shared.messages import Notice, RequestEcho
from shared.outcomes import EndReason
from shared.token_log import EVENT_NOTICE_LAST, closing_event, event_of_token
from tests.unit.gateway.logs import (
    FIRST_ID,
    accepted,
    chunk,
    chunkings,
    end,
    log_of,
    opened,
    sequenced,
    token_texts,
)
from tests.unit.gateway.sse_reader import parse_sse

TEXTS = ["Hello", "", " wor", "ld", "!", ""]
DELTA = "response.output_text.delta"


def heard(deals, **how):
    """(number, body) of every event a client with these wishes gets."""
    events = ResponseEvents(**how)
    found = [event for items in deals for event in events.feed(items)]
    return [(event.number, json.loads(event.data)) for event in found]


def text_of(got):
    return "".join(body["delta"] for _, body in got if body["type"] == DELTA)


def ids_of(got):
    return [token for _, body in got if body["type"] == DELTA for token in body["token_ids"]]


# --- numbers ---------------------------------------------------------------------------------------------


def test_the_events_of_a_reply_come_in_openais_order_with_our_numbers():
    """A short reply gives every structural event once, in order, with numbers that follow from the log."""
    got = heard([log_of(TEXTS, cuts=[1, 3])])
    last = closing_event(64)
    assert [(number, body["type"].removeprefix("response.")) for number, body in got] == [
        (0, "created"),
        (990, "in_progress"),
        (998, "output_item.added"),
        (999, "content_part.added"),
        (event_of_token(5), "output_text.delta"),
        (last, "output_text.done"),
        (last + 1, "content_part.done"),
        (last + 6, "output_item.done"),
        (last + 7, "completed"),
    ]
    assert all(number == body["sequence_number"] for number, body in got)
    assert terminal_event(64) == last + 7


def test_each_batch_of_chunks_is_one_delta_numbered_by_its_last_token():
    """Deltas follow how the log was dealt out; each carries the number of the last token it holds."""
    items = log_of(TEXTS, cuts=[1, 3])
    got = heard([items[:3], items[3:5], items[5:]])
    assert [(number, body["delta"]) for number, body in got if body["type"] == DELTA] == [
        (event_of_token(0), "Hello"),
        (event_of_token(5), " world!"),
    ]


@given(st.data())
def test_any_two_chunkings_give_the_same_numbers_and_text(data):
    """However a log was cut and dealt out, the text up to an event number and all other events are the same."""
    texts = data.draw(token_texts)
    for deals in (data.draw(chunkings(texts)), data.draw(chunkings(texts))):
        got = heard(deals)
        shown = ""
        for number, body in got:
            if body["type"] == DELTA:
                shown += body["delta"]
                assert shown == "".join(texts[: (number - 1000) // 16 + 1])
        assert [pair for pair in got if pair[1]["type"] != DELTA] == [
            pair for pair in heard([log_of(texts)]) if pair[1]["type"] != DELTA
        ]
        numbers = [number for number, _ in got]
        assert all(before < after for before, after in itertools.pairwise(numbers))


@given(st.data())
def test_a_cut_at_any_event_resumes_to_the_identical_remainder(data):
    """A client cut after any event, resumed on a gateway that sees other chunks, ends with the same text and ids."""
    texts = data.draw(token_texts)
    reason = data.draw(st.sampled_from(list(EndReason)))
    whole = heard(data.draw(chunkings(texts, reason)), token_ids=True)
    other = data.draw(chunkings(texts, reason))
    cut = data.draw(st.integers(0, len(whole)))
    before, after = whole[:cut], whole[cut - 1][0] if cut else -1
    rest = heard(other, after=after, token_ids=True)
    assert text_of(before) + text_of(rest) == "".join(texts)
    assert ids_of(before) + ids_of(rest) == list(range(FIRST_ID, FIRST_ID + len(texts)))
    assert all(number > after for number, _ in rest)
    structure = [pair for pair in before + rest if pair[1]["type"] != DELTA]
    assert structure == [pair for pair in whole if pair[1]["type"] != DELTA]


@given(st.integers(-1, closing_event(64) + 40))
def test_any_number_at_all_can_be_resumed_from(after):
    """Also a number between two events, of a notice, or past the end leaves out exactly what is not after it."""
    whole = heard([log_of(TEXTS, cuts=range(6))])
    rest = heard([log_of(TEXTS, cuts=[2])], after=after)
    seen = 0 if after < 1000 else (after - 1000) // 16 + 1
    assert text_of(rest) == "".join(TEXTS[seen:])
    assert [pair for pair in rest if pair[1]["type"] != DELTA] == [
        (number, body) for number, body in whole if number > after and body["type"] != DELTA
    ]


def test_entries_that_come_again_are_shown_once():
    """A relay that repeats entries, or a bucket written anew as one chunk, adds only what was not there."""
    events = ResponseEvents()
    first = log_of(TEXTS, cuts=[1, 3], reason=None)
    anew = sequenced([accepted(), opened(2), chunk(0, TEXTS, 2), end()])
    got = [event for items in (first, first[2:4], anew) for event in events.feed(items)]
    deltas = [json.loads(event.data)["delta"] for event in got if event.name == DELTA]
    assert deltas == ["Hello world!"]
    assert [event.name for event in got].count("response.created") == 1


def test_a_hole_in_the_log_is_never_shown():
    """A chunk that does not join what is here raises instead of leaving words out."""
    events = ResponseEvents()
    events.feed(sequenced([accepted(), opened(), chunk(0, ["a"])]))
    with pytest.raises(TokenLogError, match="token 2, but 1"):
        events.feed(sequenced([chunk(2, ["c"])]))
    with pytest.raises(TokenLogError, match="head is missing"):
        ResponseEvents().feed(sequenced([opened()]))


# --- notices ---------------------------------------------------------------------------------------------


def test_notices_while_queued_repeat_a_known_event_type_below_one_thousand():
    """Position and ETA come as `response.queued` with metadata, counting up, and stop where their numbers end."""
    events = ResponseEvents()
    events.feed(log_of([], reason=None)[:1])
    got = [events.notice(Notice(kind="queued", position=3 - n, eta_s=4.26)) for n in range(2)]
    bodies = [json.loads(event.data) for (event,) in got]
    assert [body["sequence_number"] for body in bodies] == [1, 2]
    assert bodies[0]["type"] == "response.queued"
    assert bodies[0]["response"]["metadata"] == {"notice": "queued", "position": "3", "eta_s": "4.3"}
    late = ResponseEvents(after=EVENT_NOTICE_LAST)
    late.feed(log_of([], reason=None)[:1])
    assert late.notice(Notice(kind="queued", position=1)) == []


def test_notices_of_a_second_gateway_count_on_after_those_of_the_first():
    """A client that reconnects while queued sees strictly increasing numbers."""
    events = ResponseEvents(after=7)
    assert events.feed(log_of([], reason=None)[:1]) == []
    (event,) = events.notice(Notice(kind="queued", position=1))
    assert event.number == 8


@pytest.mark.parametrize(
    ("tokens", "first"), [(0, 991), (1, event_of_token(0) + 1)], ids=["before the first token", "after a token"]
)
def test_notices_after_the_opening_take_the_gaps_and_never_a_structural_number(tokens, first):
    """A resumed attempt is told as `response.in_progress` between the numbers of tokens, until the gap is full."""
    events = ResponseEvents()
    events.feed(log_of(["a"] * tokens, reason=None))
    got = list(itertools.chain.from_iterable(events.notice(Notice(kind="resuming")) for _ in range(30)))
    numbers = [event.number for event in got]
    assert numbers == list(range(first, first + len(numbers)))
    assert 0 < len(numbers) < 16
    assert {event.name for event in got} == {"response.in_progress"}
    more = [event.number for event in events.feed(sequenced([chunk(tokens, ["b"]), end()]))]
    assert numbers[-1] < more[0]


def test_nothing_is_said_before_the_reply_is_known_nor_after_its_end():
    """A notice needs a response to stand in, and none follows the end."""
    events = ResponseEvents()
    assert events.notice(Notice(kind="queued")) == []
    events.feed(log_of(["a"]))
    assert events.notice(Notice(kind="resuming")) == []


# --- ends ------------------------------------------------------------------------------------------------

ENDS = {
    EndReason.STOP_TOKEN: ("completed", "completed", None),
    EndReason.STOP_SEQUENCE: ("completed", "completed", None),
    EndReason.MAX_TOKENS: ("incomplete", "incomplete", "max_output_tokens"),
    EndReason.USER_STOP: ("incomplete", "cancelled", "user_stop"),
    EndReason.IDLE: ("incomplete", "cancelled", "idle"),
    EndReason.SUPERSEDED: ("incomplete", "cancelled", "superseded"),
    EndReason.SAFETY: ("incomplete", "incomplete", "content_filter"),
    EndReason.FAILED: ("failed", "failed", None),
    EndReason.EXPIRED: ("failed", "failed", None),
}


@pytest.mark.parametrize("reason", list(EndReason))
def test_each_end_has_its_terminal_event_status_and_usage(reason):
    """Every reason ends in one terminal event of a known type, with what was written and the usage filled."""
    kind, status, incomplete = ENDS[reason]
    got = heard([log_of(TEXTS, reason=reason)], token_ids=True)
    number, body = got[-1]
    response = body["response"]
    assert (number, body["type"], response["status"]) == (terminal_event(64), f"response.{kind}", status)
    assert response["incomplete_details"] == (incomplete and {"reason": incomplete})
    assert (response["error"] is not None) == (kind == "failed")
    assert response["output"][0]["content"][0]["text"] == "Hello world!"
    assert response["usage"]["output_tokens"] == len(TEXTS)
    assert response["chorus"]["end_reason"] == reason.value
    assert sum(body["type"] in ("response.completed", "response.incomplete", "response.failed") for _, body in got) == 1


@pytest.mark.parametrize("reason", list(EndReason))
def test_a_reply_that_ends_before_its_first_token_has_an_item_only_when_that_is_its_answer(reason):
    """Stopped in the queue: no item is announced and the output is empty; an empty answer is still an answer."""
    got = heard([sequenced([accepted(), end(reason)])])
    names = [body["type"] for _, body in got]
    answered = reason.natural or reason is EndReason.SAFETY
    assert ("response.output_item.added" in names) == answered
    assert ("response.output_item.done" in names) == answered
    assert bool(got[-1][1]["response"]["output"]) == answered


def test_a_safety_stop_adds_a_refusal_after_the_text_that_was_shown():
    """The text part closes, then a refusal part opens and closes, and the item holds both."""
    got = heard([log_of(["bad"], reason=EndReason.SAFETY)])
    names = [body["type"].removeprefix("response.") for _, body in got]
    assert names[5:] == [
        "output_text.done",
        "content_part.done",
        "content_part.added",
        "refusal.delta",
        "refusal.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    content = got[-1][1]["response"]["output"][0]["content"]
    assert [part["type"] for part in content] == ["output_text", "refusal"]
    assert content[1]["refusal"] == REFUSAL_TEXT


def test_a_broken_stream_says_so_in_a_known_event_with_a_number_of_its_own():
    """The last word of a stream that cannot go on is OpenAI's `error` event, numbered after the last one."""
    events = ResponseEvents()
    events.feed(log_of(["a"], reason=None))
    (event,) = events.broken("stream_expired", "gone")
    assert (event.number, event.name) == (event_of_token(0) + 1, "error")
    assert json.loads(event.data)["code"] == "stream_expired"


def test_another_model_than_asked_for_is_said_in_the_metadata():
    """The word about the model stands beside the client's own metadata in every response object."""
    echo = RequestEcho(requested_model="stub", notice="Over the limit: mini answers.", metadata={"a": "b"})
    got = heard([sequenced([accepted(echo=echo), end()])])
    assert got[0][1]["response"]["metadata"] == {"a": "b", "notice": "Over the limit: mini answers."}


# --- the wire --------------------------------------------------------------------------------------------


@given(st.data())
def test_an_independent_parser_reads_back_what_was_encoded(data):
    """Whatever text is in them, events survive encoding: one data line each, id and name as given."""
    deals = data.draw(chunkings(data.draw(token_texts)))
    events = ResponseEvents()
    written = [event for items in deals for event in events.feed(items)]
    raw = PING.join([b"", *(encode_events([event], first=at == 0) for at, event in enumerate(written))])
    read = parse_sse(raw)
    assert [(event.id, event.name, event.data) for event in read] == [
        (str(event.number), event.name, event.data.decode()) for event in written
    ]
    assert all(event.data_lines == 1 for event in read)


def openai_client(raw: bytes) -> openai.OpenAI:
    """The official client, fed with `raw` as the body of any answer."""
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=raw)
    transport = httpx.MockTransport(lambda _: answer)
    return openai.OpenAI(base_url="http://gateway/v1", api_key="k", http_client=httpx.Client(transport=transport))


def wire(events, deals) -> bytes:
    """A whole stream with a ping between any two writes."""
    writes = [encode_events(events.feed(items), first=at == 0) for at, items in enumerate(deals)]
    return PING + PING.join(writes)


@pytest.mark.parametrize("reason", [EndReason.STOP_TOKEN, EndReason.MAX_TOKENS, EndReason.USER_STOP, EndReason.SAFETY])
def test_the_official_client_streams_a_response_through_its_own_state_machine(reason):
    """openai-python's stream helper, which is strict about order and items, accepts all of it and has the text."""
    items = log_of(TEXTS, cuts=[1, 3], reason=reason)
    raw = wire(ResponseEvents(), [items[:1], items[1:3], items[3:]])
    with openai_client(raw).responses.stream(model="stub", input="hi") as stream:
        seen = list(stream)
        final = seen[-1].response
    assert "".join(event.delta for event in seen if event.type == DELTA) == "Hello world!"
    assert final.output_text == "Hello world!"
    assert final.usage is not None
    assert final.usage.total_tokens == 7 + len(TEXTS)


def test_the_official_client_streams_a_chat_completion():
    """openai-python's chat stream helper accumulates our chunks to the text, finish reason and usage."""
    items = log_of(TEXTS, cuts=[1, 3])
    raw = wire(ChatEvents(include_usage=True), [items[:1], items[1:3], items[3:]])
    client = openai_client(raw)
    with client.chat.completions.stream(model="stub", messages=[{"role": "user", "content": "hi"}]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world!"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == len(TEXTS)


# --- chat ------------------------------------------------------------------------------------------------


def chat(deals, **how):
    events = ChatEvents(**how)
    return [event.data for items in deals for event in events.feed(items)]


@given(st.data())
def test_chat_chunks_hold_the_text_once_whatever_the_chunking(data):
    """The deltas of any chunking join to the same text, between one role chunk and one finish reason."""
    texts = data.draw(token_texts)
    got = chat(data.draw(chunkings(texts)), include_usage=True)
    bodies = [json.loads(line) for line in got[:-1]]
    assert got[-1] == b"[DONE]"
    assert bodies[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(body["choices"][0]["delta"].get("content", "") for body in bodies[:-1]) == "".join(texts)
    assert [body["choices"][0]["finish_reason"] for body in bodies[:-1]] == [None] * (len(bodies) - 2) + ["stop"]
    assert all(body["usage"] is None for body in bodies[:-1])
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"]["total_tokens"] == 7 + len(texts)
    assert len({(body["id"], body["created"]) for body in bodies}) == 1


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        (EndReason.STOP_TOKEN, "stop"),
        (EndReason.STOP_SEQUENCE, "stop"),
        (EndReason.MAX_TOKENS, "length"),
        (EndReason.SAFETY, "content_filter"),
        (EndReason.USER_STOP, "stop"),
        (EndReason.IDLE, "stop"),
        (EndReason.SUPERSEDED, "stop"),
    ],
)
def test_chat_finish_reasons(reason, finish):
    """Each end that is no failure maps to a finish reason that chat clients know; without usage asked, none is given."""
    got = chat([log_of(["a"], reason=reason)])
    body = json.loads(got[-2])
    assert body["choices"][0]["finish_reason"] == finish
    assert "usage" not in body


@pytest.mark.parametrize("reason", [EndReason.FAILED, EndReason.EXPIRED])
def test_a_failed_chat_stream_ends_in_an_error_the_official_client_raises(reason):
    """A failure mid-stream is a data line with an error, which openai-python turns into an exception."""
    raw = wire(ChatEvents(), [log_of(["a"], reason=reason)])
    stream = openai_client(raw).chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match=r"[Ss]end the message again"):
        list(stream)
