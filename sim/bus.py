"""What the bus keeps, for all replies of a region. It states what NATS does, and nothing of what we do with it.

- An append is conditional on its key's last sequence, and refused without a trace; keys share the stream's sequence.
- An accepted entry is republished to who follows it, with the sequence before: it may be lost, late or out of order.
- A queue's message comes back when nobody extended it for its ack wait, and whenever an election says so.
- Ack subjects carry no fence: an extension, a nak or an ack of any delivery does what it says.
- Everything is on disk: a crash of the server costs an absence, and nothing else.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from shared.limits import ACK_WAIT_S, ARCHIVE_ACK_WAIT_S
from shared.messages import EndedReply, Entry, GenerateRequest, SequencedEntry
from sim.world import Process

if TYPE_CHECKING:
    from sim.region import Region


class Follower(Protocol):
    """A relay, as the bus knows it."""

    def live(self, reply_id: str, item: SequencedEntry, previous: int) -> None: ...


class Taker(Protocol):
    """Whoever pulls from a queue."""

    @property
    def pulls(self) -> bool: ...

    def delivered(self, message: "Queued", number: int) -> None: ...


class Log:
    """The history of one key."""

    def __init__(self, reply_id: str) -> None:
        self.reply_id = reply_id
        self.entries: list[SequencedEntry] = []
        self.grew_s = 0.0

    @property
    def last_seq(self) -> int:
        return self.entries[-1].seq if self.entries else 0


class Queued:
    """One message of a work queue, until it is acked."""

    def __init__(self, queue: "Queue", name: str, payload: Any) -> None:
        self.queue, self.name, self.payload = queue, name, payload
        self.present = True
        self.delivered = 0
        self._due = 0.0
        self._held = False

    def offer(self) -> None:
        """To any that pulls."""
        if not self.present or self._held:
            return
        world, server = self.queue.region.world, self.queue.region.bus
        takers = [taker for taker in self.queue.takers() if taker.pulls]
        if not takers or not server.up:
            world.at(0.2, self.offer)
            return
        taker = world.random.choice(takers)
        self.delivered += 1
        self._held = True
        self.extend()
        world.say("{} delivers {} for the {}. time to {}", self.queue.name, self.name, self.delivered, taker.name)
        world.send(taker, taker.delivered, self, self.delivered)
        world.at(self.queue.ack_wait_s, self._lapse)

    def _lapse(self) -> None:
        world = self.queue.region.world
        if not self.present or not self._held:
            return
        if world.now < self._due:
            world.at(self._due - world.now, self._lapse)
        else:
            self.redeliver()

    def redeliver(self) -> None:
        """The ack wait is over, it was given back, or an election forgot who holds it."""
        if self.present:
            self._held = False
            self.offer()

    def extend(self) -> None:
        self._due = self.queue.region.world.now + self.queue.ack_wait_s

    def ack(self) -> None:
        if self.present:
            self.queue.region.world.say("{} removes {}", self.queue.name, self.name)
            self.queue.leaving(self)
            self.present = False
            self.queue.messages.remove(self)


class Queue:
    """A stream with work-queue retention and one consumer."""

    def __init__(
        self,
        region: "Region",
        name: str,
        ack_wait_s: float,
        takers: Callable[[], list[Any]],
        leaving: Callable[[Queued], None],
    ) -> None:
        self.region, self.name, self.ack_wait_s = region, name, ack_wait_s
        self.takers, self.leaving = takers, leaving
        self.messages: list[Queued] = []
        self._known: dict[str, float] = {}  # message ids and when they came: deduplicated

    def publish(self, name: str, payload: Any, *, again_after_s: float) -> None:
        world = self.region.world
        if name in self._known and world.now - self._known[name] < again_after_s:
            return
        self._known[name] = world.now
        message = Queued(self, name, payload)
        self.messages.append(message)
        message.offer()

    def election(self) -> None:
        """The consumer's new leader knows nothing of who holds what: all comes again."""
        for message in list(self.messages):
            message.redeliver()


class Bus(Process):
    """The server."""

    def __init__(self, region: "Region") -> None:
        super().__init__(region.world, "bus")
        self.region = region
        self.logs: dict[str, Log] = {}
        self.followers: dict[str, list[Any]] = {}
        self.archive: dict[str, EndedReply] = {}  # what ENDED has taken: each reply once
        self._stream_seq = 0
        checks = region.checks
        self.lane = Queue(region, "lane", ACK_WAIT_S, lambda: region.routers, checks.left_the_lane)
        self.ended = Queue(region, "ENDED", ARCHIVE_ACK_WAIT_S, lambda: region.conversations, lambda _: None)

    # --- token logs

    def append(self, reply_id: str, expected: int | None, entry: Entry, by: Process) -> int | None:
        """The new sequence, or None: another entry stands last (err_code 10071)."""
        log = self.logs.setdefault(reply_id, Log(reply_id))
        if expected is not None and expected != log.last_seq:
            self.world.say("log of {} refuses {}: {}", reply_id[-4:], by.name, entry)
            return None
        self._stream_seq += 1
        item, previous = SequencedEntry(seq=self._stream_seq, entry=entry), log.last_seq
        self.world.say("log of {} {} {}: {}", reply_id[-4:], item.seq, by.name, entry)
        self.region.checks.appended(reply_id, item, by)
        log.entries.append(item)
        log.grew_s = self.world.now
        for follower in self.followers.get(reply_id, ()):
            self.world.send(follower, follower.live, reply_id, item, previous)
        return item.seq

    def read(self, reply_id: str, after_seq: int = 0) -> list[SequencedEntry]:
        """Entries past `after_seq`; from a copy that lags, not the last ones. The head is never missing."""
        log = self.logs.get(reply_id)
        if log is None:
            return []
        upto = len(log.entries)
        if self.world.chance(self.region.swarm.stale):
            upto = max(1, upto - self.world.random.randint(1, 3))
        return [item for item in log.entries[:upto] if item.seq > after_seq]

    def follow(self, reply_id: str, follower: Any) -> None:
        self.followers.setdefault(reply_id, []).append(follower)

    def unfollow(self, reply_id: str, follower: Any) -> None:
        followers = self.followers.get(reply_id, [])
        if follower in followers:
            followers.remove(follower)

    # --- streams

    def enqueue(self, request: GenerateRequest) -> bool:
        """Into the lane, deduplicated for ten seconds."""
        self.lane.publish(request.reply_id, request, again_after_s=10.0)
        return True

    def store_ended(self, reply: EndedReply) -> bool | None:
        """Into ENDED, once; None when the write failed."""
        if self.world.chance(self.region.swarm.failures):
            return None
        reply_id = reply.accepted.reply_id
        self.region.checks.archived(reply)
        if reply_id not in self.archive:
            self.archive[reply_id] = reply
            self.ended.publish(reply_id, reply, again_after_s=float("inf"))
        return True
