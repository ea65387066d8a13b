"""A stored request into its lane: `accepted` in the log, then the lane. May be done again by anyone at any time.

append accepted (expects an empty log) ──> publish to the lane (message id = reply id, so twice is once)
      └ something stands there already: another of us was first, so its `accepted` counts
"""

import msgspec

from shared import clock
from shared.bus import Bus
from shared.errors import RefusedError, StreamFullError, WrongLastSequenceError
from shared.limits import APPEND_TIMEOUT_S
from shared.log_store import LogStore
from shared.messages import EndedReply, GenerateRequest, encode
from shared.outcomes import Refusal, RefusalKind
from shared.tiers import Tier
from shared.token_log import LogView, ended_reply

LANE_FULL_RETRY_S = 10.0
LANE_LOOK_S = 0.25  # a lane found full is tried again this often; who comes in between is refused without any work

LOG_FULL = Refusal(
    kind=RefusalKind.LOG_FULL,
    message="There is no room for another reply at the moment. Try again in a few seconds.",
    retry_after_s=LANE_FULL_RETRY_S,
)
LANE_FULL = Refusal(
    kind=RefusalKind.LANE_FULL,
    message="Too many requests are waiting already, so this one was not taken in. Try again in a few seconds.",
    retry_after_s=LANE_FULL_RETRY_S,
)


class Queueing:
    def __init__(self, bus: Bus, logs: LogStore, lane_look_s: float = LANE_LOOK_S) -> None:
        self._bus, self._logs, self._lane_look_s = bus, logs, lane_look_s
        self._full_until_s: dict[Tier, float] = {}

    def check(self, lane: Tier) -> None:
        """Raises RefusedError (LANE_FULL) when the lane was full a moment ago."""
        if clock.now_s() < self._full_until_s.get(lane, 0.0):
            raise RefusedError(LANE_FULL)

    async def queue(self, subject: str, request: GenerateRequest) -> EndedReply | None:
        """None: it is in its lane. An EndedReply: its log ended before it was, so no router will archive it.

        Raises RefusedError (LOG_FULL, LANE_FULL), BusTimeoutError, LogGoneError.
        """
        reply_id = request.reply_id
        try:
            seq = await self._logs.append(reply_id, 0, encode(request.accepted))
        except StreamFullError:
            raise RefusedError(LOG_FULL) from None
        except WrongLastSequenceError:
            view = await self._logs.read(reply_id)
            if view.ended is not None:
                return ended_reply(view)
            if view.opened is not None:
                return None
            request, seq = _as_accepted(request, view)
        queued = msgspec.structs.replace(request, accepted_seq=seq)
        try:
            await self._bus.append(subject, encode(queued), message_id=reply_id, timeout_s=APPEND_TIMEOUT_S)
        except StreamFullError:
            self._full_until_s[request.accepted.tier] = clock.now_s() + self._lane_look_s
            raise RefusedError(LANE_FULL) from None
        return None


def _as_accepted(request: GenerateRequest, view: LogView) -> tuple[GenerateRequest, int]:
    """The request as the standing `accepted` has it: that one's seed and budget are what clients see."""
    accepted = view.accepted
    assert accepted is not None, "a log that was read has its head"
    sampling = msgspec.structs.replace(request.sampling, seed=accepted.seed)
    return msgspec.structs.replace(request, accepted=accepted, sampling=sampling), view.accepted_seq
