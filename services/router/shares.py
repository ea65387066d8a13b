"""How many lane messages a router holds while they wait: an equal share for each lane consumer, so that a flood of one
user bucket never keeps the others' messages out. What runs does not count. Pure.
"""

from collections import Counter
from collections.abc import Sequence

from shared.limits import ROUTER_HELD_MAX, ROUTER_SHARE_MIN


class Shares:
    def __init__(self, consumers: Sequence[str], most: int = ROUTER_HELD_MAX) -> None:
        self._share = max(ROUTER_SHARE_MIN, most // max(1, len(consumers)))
        self._held: Counter[str] = Counter()
        self._consumer: dict[str, str] = {}  # reply -> the consumer whose share it takes

    def room(self, consumer: str) -> int:
        """Messages that may still be pulled from it."""
        return max(0, self._share - self._held[consumer])

    def hold(self, reply_id: str, consumer: str) -> None:
        """Delivered: it counts until `free`."""
        if reply_id not in self._consumer:
            self._consumer[reply_id] = consumer
            self._held[consumer] += 1

    def free(self, reply_id: str) -> bool:
        """It runs, or has left; True when that made room."""
        consumer = self._consumer.pop(reply_id, None)
        if consumer is not None:
            self._held[consumer] -= 1
        return consumer is not None

    def __len__(self) -> int:
        return len(self._consumer)
