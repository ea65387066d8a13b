"""Honest waiting: how fast a queue is served and who stands where in it.

The router says it once a second; relays make positions and seconds of it. Pure.
"""

from collections import deque
from collections.abc import Sequence

from shared.limits import QUEUE_VIEW_REPLIES_MAX, SERVED_RATE_MARKS_MAX, SERVED_RATE_WINDOW_S
from shared.messages import QueueView
from shared.tiers import Tier


class ServedRate:
    """Requests leaving a queue per second, over the last SERVED_RATE_WINDOW_S.

    Measured only while somebody waits: an idle queue serves nobody, and that says nothing of its speed.
    """

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=SERVED_RATE_MARKS_MAX)
        self._since: float | None = None  # when the queue last became non-empty

    def waiting(self, count: int, now: float) -> None:
        """How many wait now."""
        if count == 0:
            self._since = None
            self._left.clear()
        elif self._since is None:
            self._since = now

    def left(self, now: float) -> None:
        """One left the queue for a replica."""
        self._left.append(now)

    def per_s(self, now: float) -> float:
        """0.0 while nothing is known: then there is a position, but no ETA."""
        if self._since is None:
            return 0.0
        start = max(self._since, now - SERVED_RATE_WINDOW_S)
        if len(self._left) == SERVED_RATE_MARKS_MAX:
            start = max(start, self._left[0])
        count = sum(mark >= start for mark in self._left)
        return count / (now - start) if now > start else 0.0


def queue_view(
    *, router: str, tier: Tier, model: str, order: Sequence[str], waiting: int, served_per_s: float
) -> QueueView:
    """What the router broadcasts; names the first QUEUE_VIEW_REPLIES_MAX of those who wait."""
    return QueueView(
        router=router,
        tier=tier,
        model=model,
        waiting=waiting,
        served_per_s=served_per_s,
        reply_ids=tuple(order[:QUEUE_VIEW_REPLIES_MAX]),
    )
