"""Requests that decode and that nobody could run."""

import pytest
from msgspec import structs

from shared.soundness import dispatch_fault, request_fault
from tests.unit.replica_shell.test_attempt import dispatch

GOOD = dispatch()


def test_what_conversation_and_router_write_is_sound():
    """Nothing is found in good messages."""
    assert request_fault(GOOD.request, "local") is None
    assert dispatch_fault(GOOD, "local") is None


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"reply_id": name}
            for name in ("", "r1", "resp_local", "resp_elsewhere00" + "0" * 26, "a.b *", "zeply 13 é")
        ),
        *({"budget": budget} for budget in (0, -1, 1 << 40)),
        *({"deadline_s": seconds} for seconds in (float("nan"), float("inf"), 1e308, -1.0)),
    ],
)
def test_what_was_accepted_wrongly_is_found(change):
    """An id that names no log of ours, a budget or a deadline that is none."""
    request = structs.replace(GOOD.request, accepted=structs.replace(GOOD.request.accepted, **change))
    assert request_fault(request, "local")


@pytest.mark.parametrize(
    "change", [{"prompt": b""}, {"prompt": b"12345"}, {"block_hashes": b"123"}, {"accepted_seq": -1}]
)
def test_bytes_that_are_no_tokens_are_found(change):
    """Prompts are whole tokens, at least one; hashes are whole."""
    request = structs.replace(GOOD.request, **change)
    assert request_fault(request, "local")
    assert dispatch_fault(structs.replace(GOOD, request=request), "local")


@pytest.mark.parametrize(
    "change",
    [{"attempt": 0}, {"open_seq": 0}, {"deadline_left_s": float("nan")}, {"written": b"123"}, {"delivered": -1}],
)
def test_a_dispatch_of_nothing_is_found(change):
    """An attempt has a number and follows an open."""
    assert dispatch_fault(structs.replace(GOOD, **change), "local")
