"""The replica's metrics; docs/metrics.md defines them."""

from services.replica.engine_messages import StepReport
from shared.messages import ReplicaHealth
from shared.telemetry import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, Metrics


class ReplicaMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.undecodable = metrics.counter("replica_undecodable_total", "bus messages no version of us wrote")
        self.dispatches = metrics.counter("replica_dispatches_total", "dispatches answered", ("answer",))
        self.attempts = metrics.counter("replica_attempts_total", "attempts over", ("outcome",))
        self.unchecked = metrics.counter("replica_ends_unchecked_total", "ends without a verdict in time", ("error",))
        self.cancel_to_free_s = metrics.histogram(
            "replica_cancel_to_free_seconds",
            "the engine told to drop a sequence -> its blocks free",
            ("phase", "cause"),
            buckets=LATENCY_BUCKETS_S,
        )
        self._step_s = metrics.histogram("replica_step_seconds", "one forward pass", buckets=TOKEN_BUCKETS_S)
        self._sampled = metrics.counter("replica_tokens_sampled_total", "tokens sampled")
        self._cached = metrics.counter("replica_prefix_hit_tokens_total", "prompt tokens the prefix cache saved")
        self._preempted = metrics.counter("replica_preemptions_total", "sequences that had to make room")
        self._blocks_total = metrics.gauge("replica_blocks", "KV blocks there are")
        self._blocks_free = metrics.gauge("replica_blocks_free", "KV blocks free, cached ones included")
        self._running = metrics.gauge("replica_running", "sequences in the batch")
        self._waiting = metrics.gauge("replica_waiting", "sequences waiting in the engine")
        self._waiting_tokens = metrics.gauge("replica_waiting_tokens", "tokens not yet computed", ("tier",))
        self._accepting = metrics.gauge("replica_accepting", "1 while dispatches are taken")
        self._attempts_held = metrics.gauge("replica_attempts_held", "attempts not yet over")
        self._append_s = metrics.gauge("replica_append_seconds_smoothed", "what an append takes, as the pace sees it")

    def step(self, report: StepReport) -> None:
        """A step's figures."""
        if report.stats.step_s > 0:
            self._step_s.observe(report.stats.step_s)
        self._sampled.inc(sum(len(tokens.ids) for tokens in report.tokens))
        self._cached.inc(sum(tokens.cached_tokens or 0 for tokens in report.tokens))
        if report.preempted:
            self._preempted.inc(len(report.preempted))

    def beat(self, health: ReplicaHealth, *, attempts: int, append_s: float) -> None:
        """What the heartbeat says."""
        self._blocks_total.set(health.blocks_total)
        self._blocks_free.set(health.blocks_free)
        self._running.set(health.running)
        self._waiting.set(health.waiting)
        for tier, tokens in health.waiting_tokens.items():
            self._waiting_tokens.labels(tier).set(tokens)
        self._accepting.set(int(health.accepting))
        self._attempts_held.set(attempts)
        self._append_s.set(append_s)
