"""What conversation counts; docs/metrics.md defines each."""

from shared.messages import EndedReply
from shared.outcomes import Refusal
from shared.telemetry import Metrics


class Figures:
    def __init__(self, metrics: Metrics) -> None:
        reply = ("tier", "model")
        self._ended = metrics.counter("replies_ended_total", "replies archived, by why they ended", (*reply, "reason"))
        self._tokens = metrics.counter("reply_tokens_total", "tokens of archived replies", (*reply, "kind"))
        self._reply_s = metrics.histogram("reply_s", "accepted to ended", reply)
        self._refusals = metrics.counter("refusals_total", "demands that were said no to", ("kind",))
        self.verb_s = metrics.histogram("conversation_verb_s", "a verb received to its answer sent", ("verb",))
        self.in_progress = metrics.gauge("conversation_in_progress", "verbs being worked on")
        self.crashed = metrics.counter(
            "conversation_errors_total", "verbs and jobs that failed by our own fault", ("verb",)
        )
        self.attached = metrics.counter("sends_attached_total", "sends whose idempotency key had a reply already")
        self.turns_dropped = metrics.counter("turns_dropped_total", "oldest turns left out of a context")
        self.input_checks = metrics.counter("input_checks_total", "input checks by outcome", ("outcome",))
        self.requeued = metrics.counter("outbox_requeued_total", "requests queued from the outbox")
        self.swept = metrics.counter("replies_swept_total", "replies ended by the last guard", ("reason",))
        self.poison = metrics.counter("archive_poison_total", "ENDED records given up after several tries")
        self.purged = metrics.counter("logs_purged_total", "logs removed after a deletion or a withdrawal", ("cause",))
        self.quota_reserved = metrics.counter(
            "quota_reserved_total", "reservations of tokens, by what came of them", ("outcome",)
        )
        self.quota_settled = metrics.counter("quota_settled_total", "settlements of tokens, by outcome", ("outcome",))
        self.histories = metrics.counter(
            "history_cache_total", "histories asked of the cache, by what came of it", ("outcome",)
        )
        self.mini = metrics.counter("answered_by_mini_total", "replies of the mini model to users past a limit")
        self.valkey_away = metrics.gauge("conversation_valkey_away", "1 while Valkey does not answer")
        self.store_away = metrics.gauge("conversation_store_away", "1 while PostgreSQL does not answer")

    def refused(self, refusal: Refusal) -> None:
        self._refusals.labels(refusal.kind.value).inc()

    def ended(self, ended: EndedReply) -> None:
        labels = ended.accepted.tier.value, ended.accepted.model
        self._ended.labels(*labels, ended.reason.value).inc()
        self._tokens.labels(*labels, "input").inc(ended.usage.input_tokens)
        self._tokens.labels(*labels, "cached").inc(ended.usage.cached_tokens)
        self._tokens.labels(*labels, "output").inc(ended.usage.output_tokens)
        self._reply_s.labels(*labels).observe(max(0.0, ended.ended_s - ended.accepted.created_s))
