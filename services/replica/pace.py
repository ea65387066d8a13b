"""How often a replica appends: more tokens a chunk when there is more to say, or when the bus is slow. Pure."""

from collections.abc import Iterable

from shared.limits import APPEND_LATENCY_FACTOR, CHUNK_INTERVAL_S_MAX, CHUNK_INTERVAL_S_MIN

_SMOOTHING = 0.1
_TOGETHER_S = 0.001
_NEARLY = 0.5  # of an interval


class ChunkPace:
    """The coalescing interval, from the number of logs being written and the measured time of an append."""

    def __init__(self, appends_per_s_max: int) -> None:
        self._appends_per_s_max = appends_per_s_max
        self.append_s = 0.0  # smoothed

    def measured(self, seconds: float) -> None:
        """An append took this long until its ack."""
        self.append_s += _SMOOTHING * (seconds - self.append_s)

    def interval_s(self, writing: int) -> float:
        """Seconds between two chunks of a log while `writing` logs are written."""
        wanted = max(writing / self._appends_per_s_max, APPEND_LATENCY_FACTOR * self.append_s)
        return min(CHUNK_INTERVAL_S_MAX, max(CHUNK_INTERVAL_S_MIN, wanted))


def goes_by(dues: Iterable[float], now: float, interval_s: float) -> float:
    """What is due by then goes out now: with the first that is due also those that nearly are.

    So that the logs of a replica move together: a burst of appends wakes the bus and all its readers once. What has no
    time to wait for (due 0) goes without taking others along.
    """
    soon = now + _TOGETHER_S
    return max(soon, now + _NEARLY * interval_s) if any(0 < due <= soon for due in dues) else soon


def wakes_at(due: float, interval_s: float, step_s: float) -> float:
    """When it goes out without a step: the next, of `step_s`, may bring one more token, within the longest interval."""
    return min(due + step_s, due + CHUNK_INTERVAL_S_MAX - interval_s)
