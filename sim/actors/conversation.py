"""Conversation, as far as a reply's life goes: rows and outbox in one transaction, `accepted`, the lane; the archive;
the guards that finish what a crash left half done. Its decisions here are those of the service's rules.

    send ──> claim? ──> end what is in flight ──> begin (rows, outbox, reservation) ──> accepted ──> lane ──> queued
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from services.conversation.replies import Event, State, never_written, step
from shared.ids import ENTROPY_BYTES, reply_id
from shared.limits import DEADLINE_GRACE_S
from shared.messages import (
    Accepted,
    End,
    EndedReply,
    Entry,
    GenerateRequest,
    RequestEcho,
    Sampling,
    SequencedEntry,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import LogView, ended_reply
from sim.actors.ender import READ_TIMEOUT_S, Ender
from sim.actors.replica import MODEL
from sim.bus import Queued
from sim.script import PROMPT
from sim.world import Process

if TYPE_CHECKING:
    from sim.actors.client import Client, Message
    from sim.region import Region

_DATABASE_S = 1.0
_OUTBOX_AGE_S, _OUTBOX_S, _SWEEP_S = 1.0, 0.5, 5.0
T = TypeVar("T")


@dataclass
class Row:
    accepted: Accepted
    conversation: str
    begun_s: float
    state: State = State.ACCEPTED
    ended: EndedReply | None = None


@dataclass
class Line:
    """A conversation object."""

    version: int = 0
    replies: list[str] = field(default_factory=list)


class Database(Process):
    """Rows, transactions and unique keys. What it has answered is on disk."""

    def __init__(self, region: "Region") -> None:
        super().__init__(region.world, "database")
        self.region = region
        self.rows: dict[str, Row] = {}
        self.claims: dict[str, str] = {}
        self.lines: dict[str, Line] = {}

    def in_flight(self, conversation: str) -> list[Accepted]:
        line = self.lines.setdefault(conversation, Line())
        return [self.rows[each].accepted for each in line.replies if self.rows[each].state is not State.ENDED]

    def begin(self, message: "Message", version: int) -> Accepted | None:
        """Reply, key, outbox and reservation in one transaction; None: the key is taken, or the line has moved on."""
        line = self.lines.setdefault(message.conversation, Line())
        if message.key in self.claims or (message.conversation and line.version != version):
            return None
        accepted = self._accepted(message)
        self.rows[accepted.reply_id] = Row(accepted, message.conversation, self.world.now)
        self.claims[message.key] = accepted.reply_id
        line.version += 1
        line.replies.append(accepted.reply_id)
        self.region.checks.reserved(accepted)
        return accepted

    def _accepted(self, message: "Message") -> Accepted:
        entropy = (len(self.rows) + 1).to_bytes(ENTROPY_BYTES, "big")
        return Accepted(
            reply_id=reply_id("local", 0, int(self.world.now * 1000), entropy),
            org="o",
            user=message.conversation or message.key,
            created_s=self.world.now,
            model=MODEL,
            tier=Tier.FREE,
            budget=message.budget,
            seed=message.seed,
            input_tokens=len(PROMPT),
            deadline_s=self.region.swarm.deadline_s,
            echo=RequestEcho(conversation_id=message.conversation or None),
        )

    def queued(self, reply: str) -> bool:
        row = self.rows[reply]
        if row.state is State.ACCEPTED:
            row.state = step(row.state, Event.QUEUED)
        return True

    def archive(self, ended: EndedReply) -> bool:
        """Once; again is harmless."""
        row = self.rows[ended.accepted.reply_id]
        if row.state is not State.ENDED:
            row.state, row.ended = step(row.state, Event.ENDED), ended
            self.region.checks.settled(ended)
        return True

    def outbox(self) -> list[Accepted]:
        age_s = self.world.now - _OUTBOX_AGE_S
        return [row.accepted for row in self.rows.values() if row.state is State.ACCEPTED and row.begun_s < age_s]

    def overdue(self) -> list[Accepted]:
        return [
            row.accepted
            for row in self.rows.values()
            if row.state is not State.ENDED
            and self.world.now > row.accepted.created_s + row.accepted.deadline_s + DEADLINE_GRACE_S
        ]


class Conversation(Process):
    def __init__(self, region: "Region", name: str) -> None:
        super().__init__(region.world, name)
        self.region, self.database = region, region.database
        self.started()

    @property
    def pulls(self) -> bool:
        return self.up

    def started(self) -> None:
        self._queueing: set[str] = set()
        self.world.at(_OUTBOX_S * self.world.random.random(), self._look_at_outbox, owner=self)
        self.world.at(_SWEEP_S * self.world.random.random(), self._sweep, owner=self)

    def _ask(self, serve: Callable[[], T], then: Callable[[T], None]) -> None:
        """The database; without an answer whoever asked is not answered either, and a guard comes by later."""

        def failing() -> tuple[T] | None:
            return None if self.world.chance(self.region.swarm.failures) else (serve(),)

        def answered(answer: tuple[T] | None) -> None:
            if answer is not None:
                then(answer[0])

        self.world.call(self, self.database, failing, answered, _DATABASE_S)

    # --- a message

    def send(self, message: "Message", client: "Client") -> None:  # noqa: C901 - one way, step by step
        def known(claim: str | None) -> None:
            if claim is not None:
                self.region.publish(client, client.sent, claim)
            elif message.conversation:
                self._ask(lambda: self._line(message.conversation), superseding)
            else:
                begin(0)

        def superseding(line: tuple[int, list[Accepted]]) -> None:
            version, flying = line
            if not flying:
                begin(version)
                return

            def ended(stands: bool) -> None:
                if stands:
                    superseding((version, flying[1:]))

            self._supersede(flying[0], ended)

        def begin(version: int) -> None:
            self._ask(lambda: self.database.begin(message, version), begun)

        def begun(accepted: Accepted | None) -> None:
            if accepted is None:
                self.send(message, client)  # another was faster
            else:
                self._queue(accepted, lambda: self.region.publish(client, client.sent, accepted.reply_id))

        self._ask(lambda: self.database.claims.get(message.key), known)

    def _line(self, conversation: str) -> tuple[int, list[Accepted]]:
        flying = self.database.in_flight(conversation)
        return self.database.lines[conversation].version, flying

    def _supersede(self, accepted: Accepted, then: Callable[[bool], None]) -> None:
        """End it. Stored a moment ago, it may have no log yet: it gets one, so that there is something to end."""

        def done(view: LogView | None) -> None:
            if view is not None:
                self.region.announce(accepted.reply_id, EndReason.SUPERSEDED)
            then(view is not None)

        def stands(_: tuple[int | None] | None) -> None:
            self.region.checks.asked_for(accepted.reply_id, EndReason.SUPERSEDED)
            end = End(reason=EndReason.SUPERSEDED, by=self.name)
            Ender(self.region, self, accepted.reply_id, end, done).go()

        self._append(accepted.reply_id, 0, accepted, stands)

    # --- into the lane

    def _append(
        self, reply: str, expected: int, entry: Entry, then: Callable[[tuple[int | None] | None], None]
    ) -> None:
        def serve() -> tuple[int | None]:
            return (self.region.bus.append(reply, expected, entry, self),)

        self.world.call(self, self.region.bus, serve, then, self.region.swarm.append_timeout_s)

    def _queue(self, accepted: Accepted, then: Callable[[], None]) -> None:
        """`accepted` into the log, unless it stands there; the request into the lane; the row says so."""
        reply = accepted.reply_id
        if reply in self._queueing:
            return
        self._queueing.add(reply)

        def read(_: tuple[int | None] | None) -> None:
            self.world.call(self, self.region.bus, lambda: self.region.bus.read(reply), publish, READ_TIMEOUT_S)

        def publish(items: list[SequencedEntry] | None) -> None:
            if not items:
                self._queueing.discard(reply)
                return  # the outbox comes by again
            if isinstance(items[-1].entry, End):
                self._queueing.discard(reply)
                self._ask(lambda: self.database.archive(ended_reply(LogView().apply_all(items))), lambda _: then())
                return
            request = GenerateRequest(
                accepted=accepted,
                accepted_seq=items[0].seq,
                prompt=pack_ids(PROMPT),
                block_hashes=b"",
                sampling=Sampling(seed=accepted.seed, ignore_eos=True),
            )
            serve = lambda: self.region.bus.enqueue(request)  # noqa: E731
            self.world.call(self, self.region.bus, serve, published, self.region.swarm.append_timeout_s)

        def published(taken: bool | None) -> None:
            self._queueing.discard(reply)
            if taken:
                self._ask(lambda: self.database.queued(reply), lambda _: then())

        self._append(reply, 0, accepted, read)

    # --- stop

    def cancel(self, reply: str) -> None:
        self.region.checks.asked_for(reply, EndReason.USER_STOP)

        def done(view: LogView | None) -> None:
            if view is not None:
                self.region.announce(reply, EndReason.USER_STOP)

        Ender(self.region, self, reply, End(reason=EndReason.USER_STOP, by=self.name), done).go()

    # --- the archive and the guards

    def delivered(self, message: Queued, number: int) -> None:
        ack = self.region.ack_subject(message, number)
        self._ask(lambda: self.database.archive(message.payload), lambda _: self.region.to_queue(ack, Queued.ack))

    def _look_at_outbox(self) -> None:
        def queue(rows: list[Accepted]) -> None:
            for accepted in rows:
                self._queue(accepted, lambda: None)

        self._ask(self.database.outbox, queue)
        self.world.at(_OUTBOX_S, self._look_at_outbox, owner=self)

    def _sweep(self) -> None:
        def end(rows: list[Accepted]) -> None:
            for accepted in rows:
                self._end_overdue(accepted)

        self._ask(self.database.overdue, end)
        self.world.at(_SWEEP_S, self._sweep, owner=self)

    def _end_overdue(self, accepted: Accepted) -> None:
        end = End(reason=EndReason.EXPIRED, by=self.name)

        def done(view: LogView | None) -> None:
            if view is not None:
                self.region.announce(accepted.reply_id, EndReason.EXPIRED)
                self._ask(lambda: self.database.archive(ended_reply(view)), lambda _: None)
            elif accepted.reply_id not in self.region.bus.logs:
                ended = never_written(accepted, EndReason.EXPIRED, "", self.world.now)
                self._ask(lambda: self.database.archive(ended), lambda _: None)

        Ender(self.region, self, accepted.reply_id, end, done).go()
