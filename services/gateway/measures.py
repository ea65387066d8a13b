"""What a gateway measures of each stream; docs/metrics.md defines every interval.

accepted ──ttft──> first token written ──itl──> next delta written ──itl──> ...
                   └────────────── tpot = (last - first) / (n - 1) ──────────────┘
"""

from enum import StrEnum

from shared.limits import STALL_S
from shared.messages import Accepted
from shared.telemetry import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, Metrics


class StallCause(StrEnum):
    """What happened in the gap, as far as a gateway can tell."""

    FAILOVER = "failover"  # another attempt opened
    RELAY = "relay"  # the stream was opened again
    QUEUE = "queue"  # it was said to wait
    CLIENT = "client"  # the client did not take what there was
    UNKNOWN = "unknown"


class Measures:
    """The gateway's metrics of streams, by tier and model."""

    def __init__(self, metrics: Metrics) -> None:
        labels = ("tier", "model")
        self.ttft = metrics.histogram(
            "ttft_seconds", "request accepted by the gateway -> first token written", labels, LATENCY_BUCKETS_S
        )
        self.tpot = metrics.histogram(
            "tpot_seconds", "(last token - first token) / (tokens - 1), per reply", labels, TOKEN_BUCKETS_S
        )
        self.itl = metrics.histogram("itl_seconds", "gap between two writes of tokens", labels, TOKEN_BUCKETS_S)
        self.stalls = metrics.counter("stalls_total", "gaps between tokens longer than 2 s", (*labels, "cause"))
        self.tokens = metrics.counter("gateway_tokens_total", "tokens written to clients", labels)
        self.closed = metrics.counter("gateway_streams_closed_total", "streams that are over", ("door", "outcome"))
        self.resumed = metrics.counter("gateway_resumes_total", "streams that began after an event number")
        self.limits = metrics.counter("gateway_limits_total", "requests at their user's limits", ("outcome",))
        self.valkey_away = metrics.gauge("gateway_valkey_away", "1 while Valkey does not answer")
        self.pings = metrics.counter("gateway_pings_total", "comments sent to keep silent streams alive")


class StreamMeter:
    """One stream's clock. `asked_s` is None for a resume: its first token says nothing of the time to first token."""

    def __init__(self, measures: Measures, accepted: Accepted, asked_s: float | None) -> None:
        labels = (accepted.tier.value, accepted.model)
        self._ttft = measures.ttft.labels(*labels)
        self._tpot = measures.tpot.labels(*labels)
        self._itl = measures.itl.labels(*labels)
        self._tokens = measures.tokens.labels(*labels)
        self._stalls, self._labels = measures.stalls, labels
        self._asked_s = asked_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._first_count = 0
        self._count = 0
        self.cause = StallCause.UNKNOWN
        self.stalled = 0

    def wrote(self, tokens: int, now: float) -> None:
        """So many more tokens are with the client."""
        self._tokens.inc(tokens)
        self._count += tokens
        if self._first_s is None:
            self._first_s, self._first_count = now, tokens
            if self._asked_s is not None:
                self._ttft.observe(now - self._asked_s)
        else:
            gap_s = now - self._last_s
            self._itl.observe(gap_s)
            if gap_s > STALL_S:
                self.stalled += 1
                self._stalls.labels(*self._labels, self.cause.value).inc()
        self._last_s = now
        self.cause = StallCause.UNKNOWN

    def finished(self) -> None:
        """The reply has ended and was followed from its first token."""
        later = self._count - self._first_count
        if self._first_s is not None and self._asked_s is not None and later > 0:
            self._tpot.observe((self._last_s - self._first_s) / later)
