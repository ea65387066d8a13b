"""What can become of a demand, each with a sentence for a person. The enum value is the metric label.

429 is the user's own limit; 503 is our lack of room. They are never exchanged.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec


class EndReason(StrEnum):
    """Why a reply ended; stands in its `end` entry. Nothing ever moves from one reason to another."""

    STOP_TOKEN = "stop_token"  # noqa: S105 - a reason, no secret
    MAX_TOKENS = "max_tokens"
    STOP_SEQUENCE = "stop_sequence"
    USER_STOP = "user_stop"
    IDLE = "idle"
    SUPERSEDED = "superseded"
    SAFETY = "safety"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def natural(self) -> bool:
        """The model itself came to the end (or to its budget)."""
        return self in NATURAL_ENDS


NATURAL_ENDS = frozenset({EndReason.STOP_TOKEN, EndReason.MAX_TOKENS, EndReason.STOP_SEQUENCE})
CANCELLED_ENDS = frozenset({EndReason.USER_STOP, EndReason.IDLE, EndReason.SUPERSEDED})


class RefusalKind(StrEnum):
    """Why a demand was not let in."""

    BAD_REQUEST = "bad_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNKNOWN_MODEL = "unknown_model"
    NOT_FOUND = "not_found"  # unknown and foreign ids alike
    KEY_REUSED = "key_reused"  # same idempotency key, other body
    FLAGGED = "flagged"  # the input check said no
    QUOTA = "quota"
    CONCURRENCY = "concurrency"
    LANE_FULL = "lane_full"
    LOG_FULL = "log_full"
    UNAVAILABLE = "unavailable"  # a part we need did not answer in time
    GONE = "gone"  # the token log has expired; the stored reply is still there


class _Wire(NamedTuple):
    status: int
    type: str
    code: str


_WIRE: dict[RefusalKind, _Wire] = {
    RefusalKind.BAD_REQUEST: _Wire(400, "invalid_request_error", "invalid_value"),
    RefusalKind.PROMPT_TOO_LONG: _Wire(400, "invalid_request_error", "context_length_exceeded"),
    RefusalKind.UNKNOWN_MODEL: _Wire(404, "invalid_request_error", "model_not_found"),
    RefusalKind.NOT_FOUND: _Wire(404, "invalid_request_error", "not_found"),
    RefusalKind.KEY_REUSED: _Wire(422, "invalid_request_error", "idempotency_key_reused"),
    RefusalKind.FLAGGED: _Wire(400, "invalid_request_error", "content_policy_violation"),
    RefusalKind.QUOTA: _Wire(429, "rate_limit_error", "rate_limit_exceeded"),
    RefusalKind.CONCURRENCY: _Wire(429, "rate_limit_error", "too_many_in_flight"),
    RefusalKind.LANE_FULL: _Wire(503, "server_error", "lane_full"),
    RefusalKind.LOG_FULL: _Wire(503, "server_error", "log_full"),
    RefusalKind.UNAVAILABLE: _Wire(503, "server_error", "unavailable"),
    RefusalKind.GONE: _Wire(410, "invalid_request_error", "stream_expired"),
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """A no, said early: what, why in a sentence, which field, and when to come again."""

    kind: RefusalKind
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def status(self) -> int:
        return _WIRE[self.kind].status

    @property
    def wire_type(self) -> str:
        return _WIRE[self.kind].type

    @property
    def code(self) -> str:
        return _WIRE[self.kind].code
