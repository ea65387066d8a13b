"""Headers: resume points, idempotency keys, bearer keys, and errors in OpenAI's shape."""

import pytest

from services.gateway.events import Event
from services.gateway.http import (
    EVENT_NUMBER_MAX,
    PING,
    bearer_key,
    encode_events,
    headers_too_large,
    idempotency_key,
    problem_of,
    problem_of_status,
    resume_point,
)
from shared.errors import RefusedError
from shared.limits import HEADER_BYTES_MAX
from shared.messages import Principal
from shared.outcomes import Refusal, RefusalKind
from shared.tiers import Tier

ALICE = Principal(org="acme", user="alice", tier=Tier.PAID, key_id="k1")
BOB = Principal(org="acme", user="bob", tier=Tier.PAID, key_id="k2")


def test_an_event_is_id_event_one_data_line_and_a_blank_line():
    """The exact bytes of an event, of the first one of a connection, of a chat chunk, and of a ping."""
    event = Event(7, "response.queued", b'{"a":1}')
    block = b'id: 7\nevent: response.queued\ndata: {"a":1}\n\n'
    assert encode_events([event]) == block
    assert encode_events([event, event], first=True) == b"retry: 1000\n" + block + block
    assert encode_events([], first=True) == b""
    assert encode_events([Event(None, None, b"[DONE]")]) == b"data: [DONE]\n\n"
    assert PING == b": ping\n"


def test_the_header_stands_before_the_address():
    """A browser that reconnects repeats its old address and sends the newer number in the header."""
    assert resume_point({}, {}) == -1
    assert resume_point({}, {"starting_after": "0"}) == 0
    assert resume_point({"Last-Event-ID": "1016"}, {"starting_after": "5"}) == 1016
    assert resume_point({"Last-Event-ID": ""}, {"starting_after": "5"}) == 5
    assert resume_point({"Last-Event-ID": str(EVENT_NUMBER_MAX)}, {}) == EVENT_NUMBER_MAX


@pytest.mark.parametrize("said", ["-1", "1.5", "x", "0x10", " 5", "5\n", "٣", "9" * 4000, str(EVENT_NUMBER_MAX + 1)])
def test_what_no_event_could_have_as_its_number_is_refused(said):
    """`Last-Event-ID` and `starting_after` are client data: a bounded integer or 400."""
    for headers, query in (({"Last-Event-ID": said}, {}), ({}, {"starting_after": said})):
        with pytest.raises(RefusedError) as caught:
            resume_point(headers, query)
        assert caught.value.refusal.status == 400


def test_the_clients_own_idempotency_key_is_taken_as_it_is():
    """Visible ASCII up to the limit is passed on; anything else is a 400."""
    assert idempotency_key({"Idempotency-Key": "abc"}, ALICE, b"h", "n") == "abc"
    for said in ("", "a b", "é", "x" * 256, "gw:1", "sdk:1"):
        with pytest.raises(RefusedError):
            idempotency_key({"Idempotency-Key": said}, ALICE, b"h", "n")


def test_a_key_is_derived_only_when_an_sdk_says_that_it_tries_again():
    """A first try gets a nonce of its own; retries of the same request by the same user share a key, others do not."""
    first = {"x-stainless-retry-count": "0"}
    again = {"x-stainless-retry-count": "1"}
    assert idempotency_key(first, ALICE, b"h", "n1") == "gw:n1"
    assert idempotency_key({}, ALICE, b"h", "n2") == "gw:n2"
    assert idempotency_key({"x-stainless-retry-count": "x"}, ALICE, b"h", "n3") == "gw:n3"
    keys = [idempotency_key(again, who, body, "n") for who, body in ((ALICE, b"h"), (BOB, b"h"), (ALICE, b"i"))]
    assert len(set(keys)) == 3
    assert all(key.startswith("sdk:") for key in keys)
    assert idempotency_key({"x-stainless-retry-count": "2"}, ALICE, b"h", "m") == keys[0]


@pytest.mark.parametrize("kind", list(RefusalKind))
def test_every_refusal_is_an_error_with_all_four_keys(kind):
    """Refusals keep their status and code on the wire; 429 and 503 say when to come again in whole seconds."""
    problem = problem_of(Refusal(kind=kind, message="No.", param="p", retry_after_s=0.2))
    assert set(problem.body["error"]) == {"message", "type", "param", "code"}
    assert 400 <= problem.status < 600
    assert problem.status != 409
    assert problem.headers["Retry-After"] == "1"
    bare = problem_of(Refusal(kind=kind, message="No."))
    assert ("Retry-After" in bare.headers) == (bare.status in (429, 503))
    assert problem_of(Refusal(kind=kind, message="No.", retry_after_s=3.01)).headers["Retry-After"] == "4"


@pytest.mark.parametrize("status", [400, 401, 404, 405, 408, 413, 418, 431, 500, 503])
def test_what_http_has_a_name_for_has_the_same_shape(status):
    """Errors that are no refusal of ours look like every other error."""
    problem = problem_of_status(status, "No.")
    assert problem.status == status
    assert set(problem.body["error"]) == {"message", "type", "param", "code"}
    assert problem.body["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")


def test_a_bearer_key_is_one_visible_word_of_bounded_length():
    """Anything else is no key at all."""
    assert bearer_key({"Authorization": "Bearer sk-1"}) == "sk-1"
    assert bearer_key({"Authorization": "bearer  sk-1 "}) == "sk-1"
    for said in ("", "Bearer", "Bearer ", "Basic sk-1", "Bearer a b", "Bearer é", "Bearer " + "x" * 257):
        assert bearer_key({"Authorization": said}) is None
    assert bearer_key({}) is None


def test_the_size_of_all_headers_together_is_bounded():
    """Many small headers are as large as one big one."""
    assert not headers_too_large([(b"a", b"b" * 100)] * 100)
    assert headers_too_large([(b"a", b"b" * 100)] * (HEADER_BYTES_MAX // 100))
