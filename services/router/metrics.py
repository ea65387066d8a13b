"""The router's metrics; docs/metrics.md defines them."""

from shared.telemetry import LATENCY_BUCKETS_S, Metrics
from shared.tiers import Tier


class RouterMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.undecodable = metrics.counter("router_undecodable_total", "bus messages no version of us wrote", ("what",))
        self.illegal = metrics.counter("router_illegal_events_total", "events that a lease's table does not have")
        self.deliveries = metrics.counter("router_deliveries_total", "lane messages delivered", ("tier", "again"))
        self.opens = metrics.counter("router_opens_total", "`open` entries appended", ("model", "attempt"))
        self.failovers = metrics.counter(
            "router_failovers_total", "replies opened again after a lost attempt", ("model",)
        )
        self.adopts = metrics.counter("router_adopts_total", "running replies taken over after a question", ("model",))
        self.dispatches = metrics.counter("router_dispatches_total", "dispatches sent", ("outcome",))
        self.unfit = metrics.counter("router_unfit_total", "requests that no replica could ever run", ("model",))
        self.suspects = metrics.counter("router_suspects_total", "replicas that became suspect", ("replica",))
        self.archived = metrics.counter("router_archived_total", "ended replies stored in ENDED", ("reason",))
        self.command_failures = metrics.counter("router_command_failures_total", "bus acts that failed", ("command",))
        self.queued_s = metrics.histogram(
            "router_queued_seconds", "queued -> placed", ("tier", "model"), buckets=LATENCY_BUCKETS_S
        )
        self.predicted_ttft_s = metrics.histogram(
            "router_predicted_ttft_seconds", "predicted at placement", ("model", "why"), buckets=LATENCY_BUCKETS_S
        )
        self._waiting = metrics.gauge("router_waiting", "requests waiting for a replica", ("tier", "model"))
        self._leases = metrics.gauge("router_leases", "lane messages held", ("state",))
        self._replicas = metrics.gauge("router_replicas", "replicas heard of", ("model",))

    def look(self, waiting: dict[tuple[Tier, str], int], leases: dict[str, int], replicas: dict[str, int]) -> None:
        """Once a second."""
        for (tier, model), count in waiting.items():
            self._waiting.labels(tier, model).set(count)
        for state, count in leases.items():
            self._leases.labels(state).set(count)
        for model, count in replicas.items():
            self._replicas.labels(model).set(count)
