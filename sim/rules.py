"""Which code takes part: the real one, or one with a bug planted, so that the checkers are known to see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from services.router import lease_events as lease
from services.router.lease_table import LeaseTable
from services.router.leases import Lease
from shared.log_merge import Deliver, LogMerge
from shared.messages import Entry, Open, SequencedEntry


@dataclass(frozen=True)
class Rules:
    merge: Callable[[int], LogMerge] = LogMerge
    table: Callable[..., LeaseTable] = LeaseTable
    unconditional_append: bool = False


class _Verdict(Lease):
    """A redelivery is taken as a verdict: whoever ran the reply is taken for dead."""

    def _ask(self, opened: Open, now: float) -> list[lease.Command]:  # noqa: ARG002 - the rule's signature
        self._note_over(self.view.last_seq)
        return self._attempt_over(now)


class _TidyOldDelivery(Lease):
    """An older delivery is acked, to tidy up: one replaced by a newer, or one whose lease another router adopted."""

    def on(self, event: Any, now: float) -> list[lease.Command]:
        old = lease.Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)
        return ([old] if isinstance(event, lease.Delivered) else []) + super().on(event, now)

    def _let_go(self, event: Any, now: float) -> list[lease.Command]:
        return [*super()._let_go(event, now), lease.Ack(reply_id=self.reply_id, ack_subject=self._ack_subject)]


class _SkippingMerge(LogMerge):
    """Shows what comes next, whether or not something is missing before it."""

    def live(self, seq: int, previous_seq: int, entry: Entry) -> list[Any]:  # noqa: ARG002 - the rule's signature
        if seq <= self.last_seq:
            return []
        self.last_seq = seq
        return [Deliver(SequencedEntry(seq=seq, entry=entry))]


class _VerdictTable(LeaseTable):
    lease_type: ClassVar[type[Lease]] = _Verdict


class _TidyTable(LeaseTable):
    lease_type: ClassVar[type[Lease]] = _TidyOldDelivery


REAL = Rules()
PLANTED: Mapping[str, Rules] = {
    "an unconditional append": Rules(unconditional_append=True),
    "a redelivery taken as a verdict": Rules(table=_VerdictTable),
    "an ack from an old delivery": Rules(table=_TidyTable),
    "a hole skipped": Rules(merge=_SkippingMerge),
}
