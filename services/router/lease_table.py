"""All leases of one router: events find theirs, timers ring, what is over leaves. Pure; the rules are in `leases`."""

import heapq
import itertools
from typing import Any, ClassVar

from services.router.lease_events import Command, Delivered, Drain, Event, Tick
from services.router.leases import Lease, State, Suspect
from shared.limits import HEARTBEAT_S, HEARTBEATS_MISSED_MAX, IDLE_END_S


class LeaseTable:
    """Every lease of this router, by reply id. `on` takes any event; what no lease concerns is dropped.

    The shell feeds it deliveries, answers, heartbeat verdicts and, at least every 50 ms, `on_tick`. How many it may
    hold while they wait is the shell's to bound (ROUTER_HELD_MAX): it pulls no more than it has room for.
    """

    lease_type: ClassVar[type[Lease]] = Lease

    def __init__(self, router: str, *, suspect: Suspect, now: float, idle_end_s: float = IDLE_END_S) -> None:
        self._router, self._idle_end_s = router, idle_end_s
        self._started = now
        self._fleet_suspect = suspect
        self._leases: dict[str, Lease] = {}
        self._timers: list[tuple[float, str]] = []
        self._tickets = itertools.count(1)
        self._due: dict[str, float] = {}  # per lease the one timer that counts; others in the heap are void
        self._draining = False

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def next_wake(self) -> float:
        """Nothing is due before this time."""
        return self._timers[0][0] if self._timers else float("inf")

    def get(self, reply_id: str) -> Lease | None:
        return self._leases.get(reply_id)

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def count(self, *states: State) -> int:
        return sum(lease.state in states for lease in self._leases.values())

    def on(self, event: Any, now: float) -> list[Command]:
        """Commands to perform, in order."""
        if isinstance(event, Tick):
            return self.on_tick(now)
        if isinstance(event, Delivered) and event.reply_id not in self._leases:
            return self._take(event, now)
        if isinstance(event, Event):
            lease = self._leases.get(event.reply_id)
            return self._step(lease, event, now) if lease else []
        if isinstance(event, Drain):
            self._draining = True
        commands: list[Command] = []
        for lease in self.leases():
            commands += self._step(lease, event, now)
        return commands

    def on_tick(self, now: float) -> list[Command]:
        """Whatever is due, each lease once."""
        due: list[Lease] = []
        while self._timers and self._timers[0][0] <= now:
            at, reply_id = heapq.heappop(self._timers)
            if self._due.get(reply_id) == at:
                del self._due[reply_id]
                due.append(self._leases[reply_id])
        commands: list[Command] = []
        for lease in due:
            commands += self._step(lease, Tick(), now)
        return commands

    def _take(self, event: Delivered, now: float) -> list[Command]:
        lease = self.lease_type(
            event,
            router=self._router,
            suspect=self._suspect,
            tickets=self._tickets,
            now=now,
            idle_end_s=self._idle_end_s,
        )
        self._leases[event.reply_id] = lease
        commands = lease.start(now)
        if self._draining:
            commands += lease.on(Drain(), now)
        self._schedule(lease)
        return commands

    def _step(self, lease: Lease, event: Any, now: float) -> list[Command]:
        commands = lease.on(event, now)
        if lease.state is State.GONE:
            del self._leases[lease.reply_id]
            self._due.pop(lease.reply_id, None)
        else:
            self._schedule(lease)
        return commands

    def _schedule(self, lease: Lease) -> None:
        """A timer that rings too early finds nothing to do; one that rings too late must not be."""
        if lease.wake_at < self._due.get(lease.reply_id, float("inf")):
            self._due[lease.reply_id] = lease.wake_at
            heapq.heappush(self._timers, (lease.wake_at, lease.reply_id))

    def _suspect(self, replica: str, now: float) -> bool:
        """Whoever just started has heard nobody yet: silence counts only once heartbeats could have come."""
        return now - self._started > HEARTBEAT_S * HEARTBEATS_MISSED_MAX and self._fleet_suspect(replica, now)
