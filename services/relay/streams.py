"""Who follows what: the streams of this relay, the replies they follow, and what is said to whom. Pure.

    opened() ──> the log is known?  yes ──> attached: StreamOpened, presence, frames
                                    no ───> Follow; the open waits ──news()──> attached
                                                                   ──absent()─> Refused (not found, gone)
    attached ──> frames, paid with credits ──> ended | slow | gone | draining | the client left
    the last stream of a reply leaves ──> Leave

One follower per reply, whatever the number of its streams. Commands come back as values; the shell performs them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.relay.merge import Closing, Outlet, Tape
from shared.ids import reply_made_s
from shared.limits import LOG_AGE_S, PRESENCE_S, RELAY_STREAMS_MAX, SLOW_READER_S
from shared.messages import (
    Credit,
    Notice,
    OpenStream,
    Presence,
    QueueView,
    Refused,
    SequencedEntry,
    StreamOpened,
    encode,
)
from shared.outcomes import Refusal, RefusalKind
from shared.subjects import Names

_LEFT_MAX = 8192


@dataclass(frozen=True, slots=True)
class Say:
    """Publish this."""

    subject: str
    data: bytes


@dataclass(frozen=True, slots=True)
class SayFrame:
    """Publish this frame; `news_s` is when its newest entry came to this relay."""

    subject: str
    data: bytes
    news_s: float


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow this reply's log from its start."""

    reply_id: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody follows this reply any more."""

    reply_id: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream is over; None: its gateway closed it."""

    reply_id: str
    why: Closing | None


Command = Say | SayFrame | Follow | Leave | Closed


@dataclass(eq=False)
class _Stream:
    """One client, through its gateway."""

    outlet: Outlet
    reply: "_Reply"
    inbox: str
    presence: bool


@dataclass(eq=False)
class _Reply:
    """A reply that is followed: its tape, its streams, and opens that wait for the first look at its log."""

    reply_id: str
    tape: Tape = field(default_factory=Tape)
    streams: dict[str, _Stream] = field(default_factory=dict)
    opens: list[tuple[OpenStream, str]] = field(default_factory=list)
    presence_due_s: float = 0.0
    news_s: float = 0.0

    @property
    def abandoned(self) -> bool:
        return not self.streams and not self.opens


class Streams:
    """All state of a relay. Every method is one event; `next_frames` is what the writer asks for."""

    def __init__(
        self,
        relay: str,
        names: Names,
        *,
        streams_max: int = RELAY_STREAMS_MAX,
        presence_s: float = PRESENCE_S,
        slow_s: float = SLOW_READER_S,
    ) -> None:
        self._relay, self._names, self._streams_max = relay, names, streams_max
        self._presence_s, self._slow_s = presence_s, slow_s
        self._replies: dict[str, _Reply] = {}
        self._streams: dict[str, _Stream] = {}
        self._ready: deque[_Stream] = deque()
        self._queued: set[_Stream] = set()  # those in `_ready`
        self._opens = 0  # waiting for the first look
        self._left: OrderedDict[str, None] = OrderedDict()  # streams that were closed when they did not stand (yet)
        self._draining = False

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def replies(self) -> int:
        return len(self._replies)

    @property
    def has_frames(self) -> bool:
        """`next_frames` would be worth asking."""
        return bool(self._ready)

    # --- opening ------------------------------------------------------------------------------------------

    def opened(self, request: OpenStream, answer_to: str, now: float) -> list[Command]:
        """A gateway asks for a stream; the answer goes to `answer_to`, now or after the first look at the log."""
        if self._draining or len(self._streams) + self._opens >= self._streams_max:
            return [_refused(answer_to, RefusalKind.UNAVAILABLE, "This relay takes no more streams.", 0.1)]
        try:
            self._names.live(request.reply_id)
        except ValueError:
            return [_refused(answer_to, RefusalKind.NOT_FOUND, "There is no such reply here.")]
        reply = self._replies.get(request.reply_id)
        if reply is None:
            reply = self._replies[request.reply_id] = _Reply(request.reply_id)
            reply.opens.append((request, answer_to))
            self._opens += 1
            return [Follow(request.reply_id)]
        if not len(reply.tape):
            reply.opens.append((request, answer_to))
            self._opens += 1
            return []
        return self._attach(reply, request, answer_to, now)

    def _attach(self, reply: _Reply, request: OpenStream, answer_to: str, now: float) -> list[Command]:
        """The answer stands before the first frame: the writer says both, in this order.

        A client that left while its stream was being opened gets none: nobody would ever close it, and meanwhile it
        would say that a client is there.
        """
        if request.stream_id in self._left:
            return [_refused(answer_to, RefusalKind.UNAVAILABLE, "This stream was closed before it stood.")]
        answer = Say(answer_to, encode(StreamOpened(relay=self._relay, credit_subject=self._names.credit(self._relay))))
        before = self._streams.get(request.stream_id)
        if before is not None and before.reply is reply and before.inbox == request.inbox:
            return [answer]  # the same open came twice: beginning again would number other frames alike
        outlet = Outlet(
            request.stream_id,
            reply.tape,
            after_seq=request.after_seq,
            window=request.credits,
            slow_s=self._slow_s,
        )
        stream = _Stream(outlet, reply, request.inbox, request.presence)
        reply.streams[request.stream_id] = self._streams[request.stream_id] = stream
        commands: list[Command] = [answer]
        if before is not None:  # another stream under the same id: the newer one counts
            commands += self._replaced(before, reply)
        if stream.presence:
            reply.presence_due_s = now + self._presence_s
            commands.append(self._presence(reply))
        self._wake(stream)
        return commands

    def _replaced(self, stream: _Stream, by_reply: _Reply) -> list[Command]:
        stream.outlet.close(Closing.DRAINING)
        if stream.reply is not by_reply:
            stream.reply.streams.pop(stream.outlet.stream_id, None)
        return [Closed(stream.reply.reply_id, None), *self._leave_if_abandoned(stream.reply)]

    def _presence(self, reply: _Reply) -> Say:
        return Say(self._names.presence(reply.reply_id), encode(Presence(reply_id=reply.reply_id)))

    # --- what the log says ----------------------------------------------------------------------------------

    def news(self, reply_id: str, items: Iterable[SequencedEntry], now: float) -> list[Command]:
        """The next entries of a followed reply."""
        reply = self._replies.get(reply_id)
        if reply is None:
            return []
        for item in items:
            reply.tape.append(item)
        reply.news_s = now
        for stream in reply.streams.values():
            self._wake(stream)
        commands: list[Command] = []
        for request, answer_to in self._take_opens(reply):
            commands += self._attach(reply, request, answer_to, now)
        return commands + self._leave_if_abandoned(reply)

    def absent(self, reply_id: str, wall_s: float) -> list[Command]:
        """There is no log: it was never accepted, or it has expired, which the age of the id tells apart."""
        expired = wall_s - reply_made_s(reply_id) > LOG_AGE_S
        return self._lost(reply_id, RefusalKind.GONE if expired else RefusalKind.NOT_FOUND)

    def unreadable(self, reply_id: str) -> list[Command]:
        """The log does not answer: the gateway is told so, and asks again."""
        return self._lost(reply_id, RefusalKind.UNAVAILABLE)

    def gone(self, reply_id: str) -> list[Command]:
        """The log was there and is no longer, or has lost its head."""
        return self._lost(reply_id, RefusalKind.GONE)

    def _lost(self, reply_id: str, kind: RefusalKind) -> list[Command]:
        reply = self._replies.get(reply_id)
        if reply is None:
            return []
        commands: list[Command] = [_refused(answer_to, kind, _WORDS[kind]) for _, answer_to in self._take_opens(reply)]
        why = Closing.DRAINING if kind is RefusalKind.UNAVAILABLE else Closing.GONE
        for stream in list(reply.streams.values()):
            commands += self._close(stream, why)
        return commands + self._leave_if_abandoned(reply)

    def _take_opens(self, reply: _Reply) -> list[tuple[OpenStream, str]]:
        taken, reply.opens = reply.opens, []
        self._opens -= len(taken)
        return taken

    # --- what gateways and routers say ------------------------------------------------------------------------

    def credit(self, credit: Credit) -> list[Command]:
        """Frames were written to a client, or the client left."""
        stream = self._streams.get(credit.stream_id)
        if stream is None:
            if credit.close:
                self._left[credit.stream_id] = None
                if len(self._left) > _LEFT_MAX:
                    self._left.popitem(last=False)
            return []
        if credit.close:
            return self._remove(stream, None)
        stream.outlet.credited(credit.count)
        self._wake(stream)
        return []

    def queue_view(self, view: QueueView, now: float) -> None:
        """Who waits, in order: each waiting client hears its place and an honest wait."""
        for position, reply_id in enumerate(view.reply_ids, start=1):
            reply = self._replies.get(reply_id)
            if reply is None or not reply.tape.waiting:
                continue
            eta_s = round(position / view.served_per_s, 1) if view.served_per_s > 0 else None
            notice = Notice(kind="queued", position=position, eta_s=eta_s)
            for stream in reply.streams.values():
                stream.outlet.notify(notice, now)
                self._wake(stream)

    # --- time -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Command]:
        """Presence that is due, one per reply; clients that took nothing for too long."""
        commands: list[Command] = []
        for reply in list(self._replies.values()):
            attached = False
            for stream in list(reply.streams.values()):
                if stream.outlet.slow(now):
                    commands += self._close(stream, Closing.SLOW)
                else:
                    attached = attached or stream.presence
            if attached and now >= reply.presence_due_s:
                reply.presence_due_s = now + self._presence_s
                commands.append(self._presence(reply))
        return commands

    def drain(self) -> list[Command]:
        """Take nothing new, and send every client elsewhere."""
        self._draining = True
        return self.reopen_all()

    def reopen_all(self) -> list[Command]:
        """Frames may have been lost: every gateway opens again, from the entry it has."""
        commands: list[Command] = []
        for reply in list(self._replies.values()):
            commands += self._lost(reply.reply_id, RefusalKind.UNAVAILABLE)
        return commands

    # --- what the writer asks for -------------------------------------------------------------------------------

    def next_frames(self, now: float, most: int) -> list[Command]:
        """About `most` frames of streams that have something to send and a credit for it, in turn."""
        commands: list[Command] = []
        for _ in range(min(most, len(self._ready))):
            stream = self._ready.popleft()
            self._queued.discard(stream)
            data = stream.outlet.next_frame(now)
            if data is None:
                continue
            commands.append(SayFrame(stream.inbox, data, stream.reply.news_s))
            if stream.outlet.closed is not None:
                commands += self._remove(stream, stream.outlet.closed)
            elif stream.outlet.behind:
                self._wake(stream)
        return commands

    def _wake(self, stream: _Stream) -> None:
        if stream not in self._queued and stream.outlet.behind:
            self._queued.add(stream)
            self._ready.append(stream)

    def _close(self, stream: _Stream, why: Closing) -> list[Command]:
        data = stream.outlet.close(why)
        said: list[Command] = [] if data is None else [Say(stream.inbox, data)]
        return said + self._remove(stream, why)

    def _remove(self, stream: _Stream, why: Closing | None) -> list[Command]:
        self._streams.pop(stream.outlet.stream_id, None)
        stream.reply.streams.pop(stream.outlet.stream_id, None)
        stream.outlet.close(why or Closing.DRAINING)  # one that stands in `_ready` says nothing more
        return [Closed(stream.reply.reply_id, why), *self._leave_if_abandoned(stream.reply)]

    def _leave_if_abandoned(self, reply: _Reply) -> list[Command]:
        if reply.abandoned and self._replies.pop(reply.reply_id, None) is not None:
            return [Leave(reply.reply_id)]
        return []


_WORDS = {
    RefusalKind.NOT_FOUND: "There is no such reply.",
    RefusalKind.GONE: "The stream of this reply has expired. Retrieve it without streaming.",
    RefusalKind.UNAVAILABLE: "The token log does not answer. Try again.",
}


def _refused(answer_to: str, kind: RefusalKind, message: str, retry_after_s: float | None = None) -> Say:
    return Say(answer_to, encode(Refused(refusal=Refusal(kind=kind, message=message, retry_after_s=retry_after_s))))
