"""Whether a request, once decoded, is one that anybody could run. Pure.

Decoding checks types; this checks what types cannot say. Conversation writes no other requests, so one that fails came
from a fault or a stranger: the router drops it and counts it, a replica refuses it. Neither may die of it.
"""

import math

from shared.ids import reply_place
from shared.limits import LOG_AGE_S, OUTPUT_TOKENS_MAX
from shared.messages import Dispatch, GenerateRequest

_ID_BYTES, _HASH_BYTES = 4, 16


def request_fault(request: GenerateRequest, region: str) -> str | None:
    """What is wrong with it, as a phrase; None when nothing is."""
    accepted = request.accepted
    place = reply_place(accepted.reply_id)
    checks = (
        (place is not None and place.region == region, f"{accepted.reply_id[:60]!r} is not a reply of {region!r}"),
        (request.prompt and not len(request.prompt) % _ID_BYTES, f"a prompt of {len(request.prompt)} bytes"),
        (not len(request.block_hashes) % _HASH_BYTES, f"block hashes of {len(request.block_hashes)} bytes"),
        (0 < accepted.budget <= OUTPUT_TOKENS_MAX, f"a budget of {accepted.budget} tokens"),
        (0 <= accepted.deadline_s <= LOG_AGE_S, f"a deadline of {accepted.deadline_s} s"),  # NaN is neither
        (request.accepted_seq >= 0, f"an accepted entry at {request.accepted_seq}"),
    )
    return next((fault for holds, fault in checks if not holds), None)


def dispatch_fault(dispatch: Dispatch, region: str) -> str | None:
    """The same of a dispatch."""
    if dispatch.attempt < 1 or dispatch.open_seq < 1 or not math.isfinite(dispatch.deadline_left_s):
        return f"attempt {dispatch.attempt} after sequence {dispatch.open_seq}, {dispatch.deadline_left_s} s left"
    if len(dispatch.written) % _ID_BYTES:
        return f"written tokens of {len(dispatch.written)} bytes"
    if dispatch.delivered < 0:
        return f"delivery {dispatch.delivered}"
    return request_fault(dispatch.request, region)
