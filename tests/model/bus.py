"""A tiny model of what the bus keeps: one reply's log, the lane, the ENDED stream. It states what NATS does.

- An append is conditional on the key's last sequence, and refused without a trace on the republished subject.
- An accepted entry is republished with its sequence and the one before; republished messages may be lost or late.
- A lane message comes back when nobody extended it for ACK_WAIT_S, and whenever an election says so.
- Ack subjects carry no fence: an extension, a nak or an ack from any delivery does what it says.
- ENDED takes a reply once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.limits import ACK_WAIT_S
from shared.messages import EndedReply, Entry, SequencedEntry
from tests.model.checks import Checks
from tests.model.world import Process, World

if TYPE_CHECKING:
    from tests.model.actors import Router
    from tests.model.readers import Reader


class Log:
    """The history of one key. `captured` feeds readers from the captured subject instead: a rule taken away."""

    def __init__(self, world: World, checks: Checks, *, captured: bool) -> None:
        self.world, self.checks, self.captured = world, checks, captured
        self.entries: list[SequencedEntry] = []
        self.grew_s = 0.0
        self.readers: list[Reader] = []
        self._stream_seq = 0

    @property
    def last_seq(self) -> int:
        return self.entries[-1].seq if self.entries else 0

    def append(self, expected: int | None, entry: Entry, by: Process) -> int | None:
        """The new sequence, or None: another entry stands last (err_code 10071)."""
        if self.captured:
            self._republish(SequencedEntry(seq=self.last_seq + 1, entry=entry), self.last_seq)
        if expected is not None and expected != self.last_seq:
            self.world.say("log refuses {}: {}", by.name, entry)
            return None
        self._stream_seq += self.world.random.randint(1, 3)  # other keys share the stream
        item, previous = SequencedEntry(seq=self._stream_seq, entry=entry), self.last_seq
        self.world.say("log {} {}: {}", item.seq, by.name, entry)
        self.checks.appended(item, by)
        self.entries.append(item)
        self.grew_s = self.world.now
        if not self.captured:
            self._republish(item, previous)
        return item.seq

    def _republish(self, item: SequencedEntry, previous: int) -> None:
        for reader in self.readers:
            self.world.send(reader, reader.live, item, previous)

    def read(self, after_seq: int = 0) -> list[SequencedEntry]:
        """Entries past `after_seq`; from a copy that lags, not the last ones. The head is never missing."""
        upto = len(self.entries)
        if self.world.chance(self.world.swarm.stale):
            upto = max(1, upto - self.world.random.randint(1, 3))
        return [item for item in self.entries[:upto] if item.seq > after_seq]


class LaneMessage:
    """One message of the lane, until it is acked."""

    def __init__(self, lane: "Lane", name: str) -> None:
        self.lane, self.world, self.name = lane, lane.world, name
        self.present = True
        self.delivered = 0
        self._due = 0.0
        self._held = False

    def offer(self) -> None:
        """To any router that pulls."""
        if not self.present or self._held:
            return
        routers = [router for router in self.lane.routers if router.pulls]
        if not routers:
            self.world.at(0.2, self.offer)
            return
        router = self.world.random.choice(routers)
        self.delivered += 1
        self._held = True
        self._touch()
        self.world.say("lane delivers {} for the {}. time to {}", self.name, self.delivered, router.name)
        self.world.send(router, router.delivered, self, self.delivered)
        self.world.at(ACK_WAIT_S, self._lapse)

    def _touch(self) -> None:
        self._due = self.world.now + ACK_WAIT_S

    def _lapse(self) -> None:
        if not self.present or not self._held:
            return
        if self.world.now < self._due:
            self.world.at(self._due - self.world.now, self._lapse)
        else:
            self.redeliver()

    def redeliver(self) -> None:
        """The ack wait is over, it was given back, or an election forgot who holds it."""
        if self.present:
            self._held = False
            self.offer()

    def extend(self) -> None:
        self._touch()

    def ack(self) -> None:
        if self.present:
            self.world.say("lane removes {}", self.name)
            self.lane.checks.left_the_lane(self.lane.ended)
            self.present = False


class Lane:
    def __init__(self, world: World, checks: Checks, ended: "Ended") -> None:
        self.world, self.checks, self.ended = world, checks, ended
        self.routers: list[Router] = []
        self.messages: list[LaneMessage] = []

    def publish(self, name: str) -> None:
        message = LaneMessage(self, name)
        self.messages.append(message)
        message.offer()

    def election(self) -> None:
        """The consumer's new leader knows nothing of who holds what: all comes again."""
        for message in self.messages:
            message.redeliver()

    @property
    def empty(self) -> bool:
        return not any(message.present for message in self.messages)


class Ended:
    """The ENDED stream, for the one reply of this world."""

    def __init__(self, world: World, checks: Checks) -> None:
        self.world, self.checks = world, checks
        self.stored: EndedReply | None = None

    def store(self, make: Callable[[], EndedReply]) -> bool | None:
        """True when it is stored, now or before; None when the write failed."""
        if self.world.chance(self.world.swarm.failures):
            return None
        reply = make()
        self.checks.archived(reply)
        if self.stored is None:
            self.world.say("ENDED stores {} with {} tokens", reply.reason.value, len(reply.ids) // 4)
            self.stored = reply
        return True
