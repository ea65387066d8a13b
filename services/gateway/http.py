"""The HTTP side of the wire: headers, server-sent events, resume points, idempotency keys, problems. Pure.

An event is `id:`, `event:`, one `data:` line, a blank line. A ping is a comment *without* a blank line: after an
`id:` a blank line alone would make some clients dispatch an empty event. `retry:` stands inside the first block.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.gateway.events import FROM_START, Event, terminal_event
from services.gateway.openai_objects import Json, error_object
from shared.errors import ChorusError, RefusedError
from shared.limits import HEADER_BYTES_MAX, IDEMPOTENCY_KEY_CHARS_MAX, OUTPUT_TOKENS_MAX
from shared.messages import Principal
from shared.outcomes import Refusal, RefusalKind

PING = b": ping\n"
RETRY_MS = 1000  # what a browser waits before it connects again
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
REQUEST_ID = "x-request-id"
REPLY_ID = "x-chorus-reply"  # which reply a stream is of, also before its first event

NONCE_PREFIX = "gw:"  # drawn by a gateway, so that its own second try cannot start a second reply
DERIVED_PREFIX = "sdk:"  # derived from what was asked, when an SDK says that it tries again
EVENT_NUMBER_MAX = terminal_event(OUTPUT_TOKENS_MAX)

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_DIGITS = re.compile(r"[0-9]{1,10}")


# --- server-sent events ----------------------------------------------------------------------------------


def encode_events(events: Iterable[Event], *, first: bool = False) -> bytes:
    """Events as bytes, for one write. `first`: of this connection."""
    blocks = [
        b"data: %b\n\n" % event.data
        if event.number is None or event.name is None
        else b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, event.name.encode(), event.data)
        for event in events
    ]
    if first and blocks:
        blocks.insert(0, b"retry: %d\n" % RETRY_MS)
    return b"".join(blocks)


def resume_point(headers: Mapping[str, str], query: Mapping[str, str]) -> int:
    """After which event number a client wants to go on: FROM_START when it says nothing.

    `Last-Event-ID` is newer than the address it reconnects to, so it stands before `starting_after`. Client data:
    raises RefusedError unless it is an integer that an event could have.
    """
    said, param = headers.get("Last-Event-ID"), "Last-Event-ID"
    if not said:
        said, param = query.get("starting_after"), "starting_after"
    if said is None:
        return FROM_START
    if _DIGITS.fullmatch(said) is None or int(said) > EVENT_NUMBER_MAX:
        raise bad_request(f"{param} must be an event number, 0 to {EVENT_NUMBER_MAX}.", param)
    return int(said)


# --- idempotency -----------------------------------------------------------------------------------------


def idempotency_key(headers: Mapping[str, str], principal: Principal, body_hash: bytes, nonce: str) -> str:
    """The key under which conversation stores the reply; each request has one, so that our own retries are safe.

    The client's own, else one derived from what is asked when an SDK says that this is its retry (identical requests
    without a key are legitimate, so a first try never gets one), else `nonce`. Raises RefusedError on a malformed one.
    """
    said = headers.get("Idempotency-Key")
    if said is not None:
        if not 0 < len(said) <= IDEMPOTENCY_KEY_CHARS_MAX or _VISIBLE.fullmatch(said) is None:
            raise bad_request(
                f"Idempotency-Key must be 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters.", "Idempotency-Key"
            )
        if said.startswith((NONCE_PREFIX, DERIVED_PREFIX)):
            raise bad_request(
                f"Idempotency-Key must not begin with {NONCE_PREFIX!r} or {DERIVED_PREFIX!r}.", "Idempotency-Key"
            )
        return said
    retries = headers.get("x-stainless-retry-count", "0")
    if retries.isdigit() and retries.strip("0"):
        asker = f"{principal.org}\0{principal.user}\0".encode()
        return DERIVED_PREFIX + hashlib.sha256(asker + body_hash).hexdigest()
    return NONCE_PREFIX + nonce


# --- problems --------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """An answer that is an error: status, OpenAI's body, and the headers that belong to it."""

    status: int
    body: Json
    headers: dict[str, str]


class ProblemError(ChorusError):
    """An answer that no refusal of ours has a word for."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.body["error"]["message"])
        self.problem = problem


_OF_STATUS = {
    400: ("invalid_request_error", "bad_request"),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_encoding"),
    431: ("invalid_request_error", "headers_too_large"),
    503: ("server_error", "unavailable"),
}


def problem_of(refusal: Refusal) -> Problem:
    """A refusal on the wire; 429 and 503 always say when to come again, in whole seconds, at least one."""
    headers = {}
    if refusal.status in (429, 503) or refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s or 1.0)))
    body = error_object(refusal.message, refusal.wire_type, refusal.param, refusal.code)
    return Problem(refusal.status, body, headers)


def problem_of_status(status: int, message: str) -> Problem:
    """An error that HTTP itself has a name for."""
    kind, code = _OF_STATUS.get(status, ("server_error" if status >= 500 else "invalid_request_error", "error"))
    headers = {"Retry-After": "1"} if status == 503 else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Problem(status, error_object(message, kind, None, code), headers)


def bad_request(message: str, param: str | None = None) -> RefusedError:
    return RefusedError(Refusal(kind=RefusalKind.BAD_REQUEST, message=message, param=param))


def not_found(message: str = "No such reply.", param: str | None = None) -> RefusedError:
    """Unknown and foreign ids alike."""
    return RefusedError(Refusal(kind=RefusalKind.NOT_FOUND, message=message, param=param))


def no_conversation(conversation_id: str, param: str | None = None) -> RefusedError:
    """As conversation says it of one that is unknown or foreign: this cannot even be one."""
    return not_found(f"No conversation {conversation_id[:80]} was found.", param)


def no_item(item_id: str) -> RefusedError:
    return not_found(f"No item {item_id[:80]} was found in this conversation.")


def no_branch(reply_id: str, param: str) -> RefusedError:
    return not_found(f"No reply {reply_id[:80]} was found in this conversation.", param)


def unavailable(message: str, retry_after_s: float = 1.0) -> RefusedError:
    return RefusedError(Refusal(kind=RefusalKind.UNAVAILABLE, message=message, retry_after_s=retry_after_s))


def headers_too_large(raw: Iterable[tuple[bytes, bytes]]) -> bool:
    return sum(len(name) + len(value) + 4 for name, value in raw) > HEADER_BYTES_MAX


def bearer_key(headers: Mapping[str, str]) -> str | None:
    """The key of an `Authorization: Bearer` header, or None when there is none that could be one."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and _VISIBLE.fullmatch(key) and len(key) <= 256 else None
