"""The relay: wires the streams' state to the bus. Every event is a call on `Streams`; one writer says the results.

    relay.open, credit.<relay>, queue.>  ──┐                          ┌──> answers, presence, closings ─┐
    followers (one per reply)            ──┼──> Streams ──commands──> ├──> Follow, Leave ──> Fanout     ├──> bus
    the tick                             ──┘                          └──> frames, as credits allow ────┘

There is no task per stream. The name a relay is known by is new at each start: a gateway whose relay was restarted
then misses the old one's `RelayAlive` and opens its streams again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from services.relay.fanout import Fanout
from services.relay.settings import RelaySettings
from services.relay.streams import Closed, Command, Follow, Leave, Say, SayFrame, Streams
from shared import clock
from shared.bus import Bus, Subscription
from shared.errors import BusError
from shared.limits import RELAY_ALIVE_S
from shared.log_store import LogStore
from shared.messages import Credit, OpenStream, QueueView, RelayAlive, SequencedEntry, decoder, encode
from shared.subjects import Names
from shared.telemetry import TOKEN_BUCKETS_S, Log, Metrics

_FRAMES_AT_ONCE = 256  # then answers and closings have their turn

_open = decoder(OpenStream)
_credit = decoder(Credit)
_view = decoder(QueueView)
T = TypeVar("T")


class RelayService:
    """See `shared.service.Service` for the doors."""

    def __init__(self, settings: RelaySettings, bus: Bus, store: LogStore, metrics: Metrics, log: Log) -> None:
        self._names = Names(settings.region)
        self.relay = f"{settings.name}-{clock.random_token(4)}"
        self._bus, self._store, self._log = bus, store, log
        self._streams = Streams(
            self.relay,
            self._names,
            streams_max=settings.streams_max,
            presence_s=settings.presence_s,
            slow_s=settings.slow_reader_s,
        )
        self._fanout = Fanout(store, self, metrics, log)
        self._outbox: deque[Say | SayFrame] = deque()  # bounded by the streams: a few for each, and one batch of frames
        self._wake = asyncio.Event()
        self._said_all = asyncio.Event()
        self._start_task: Callable[..., asyncio.Task[None]] | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._lost_seen = 0  # losses of the connection, and of what was said meanwhile
        self._draining = False
        self._count = _Counts(metrics)

    # --- the doors --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if not self._subscriptions:
            self._subscriptions = {
                "credit": await self._bus.subscribe(self._names.credit(self.relay)),
                "queue": await self._bus.subscribe(self._names.queue_filter),
                "open": await self._bus.subscribe(self._names.relay_open, queue="relay"),
            }

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._start_task = group.create_task
            group.create_task(self._hear_opens(), name="relay.opens")
            group.create_task(self._hear_credits(), name="relay.credits")
            group.create_task(self._hear_queues(), name="relay.queues")
            group.create_task(self._tick(), name="relay.tick")
            group.create_task(self._write(), name="relay.writer")

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new and send every gateway to another relay; it goes on from the entry it has."""
        self._draining = True
        if "open" in self._subscriptions:
            await self._subscriptions["open"].close()
        self._perform(self._streams.drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._said_all.wait()

    def ready(self) -> str | None:
        if not self._subscriptions:
            return "not yet subscribed"
        return None if self._bus.connected else "the bus is away"

    # --- what comes in ----------------------------------------------------------------------------------------

    async def _hear_opens(self) -> None:
        async for message in self._subscriptions["open"]:
            request = self._decoded(_open, message.data, message.subject)
            if request is not None:
                self._count.opens.inc()
                self._perform(self._streams.opened(request, message.reply, clock.now_s()))

    async def _hear_credits(self) -> None:
        async for message in self._subscriptions["credit"]:
            credit = self._decoded(_credit, message.data, message.subject)
            if credit is not None:
                self._perform(self._streams.credit(credit))

    async def _hear_queues(self) -> None:
        async for message in self._subscriptions["queue"]:
            view = self._decoded(_view, message.data, message.subject)
            if view is not None:
                self._streams.queue_view(view, clock.now_s())
                self._perform(())

    def _decoded(self, kind: msgspec.msgpack.Decoder[T], data: bytes, subject: str) -> T | None:
        try:
            return kind.decode(data)
        except msgspec.DecodeError as error:
            self._count.undecodable.inc()
            self._log.warning("message_undecodable", subject=subject, error=str(error))
            return None

    # --- what the followers say (fanout.Listener) ---------------------------------------------------------------

    def news(self, reply_id: str, items: Sequence[SequencedEntry]) -> None:
        self._count.entries.inc(len(items))
        self._perform(self._streams.news(reply_id, items, clock.now_s()))

    def absent(self, reply_id: str) -> None:
        self._perform(self._streams.absent(reply_id, clock.wall_s()))

    def unreadable(self, reply_id: str) -> None:
        self._perform(self._streams.unreadable(reply_id))

    def gone(self, reply_id: str) -> None:
        self._perform(self._streams.gone(reply_id))

    # --- commands -----------------------------------------------------------------------------------------------

    def _perform(self, commands: Iterable[Command]) -> None:
        """Queue what is to be said, in order, and do the rest; never waits."""
        for command in commands:
            if isinstance(command, Say | SayFrame):
                self._outbox.append(command)
            elif isinstance(command, Follow):
                assert self._start_task is not None, "opens are heard inside run()"
                self._fanout.follow(command.reply_id, self._start_task)
            elif isinstance(command, Leave):
                self._fanout.leave(command.reply_id)
            else:
                self._closed(command)
        if self._outbox or self._streams.has_frames:
            self._said_all.clear()
            self._wake.set()
        else:
            self._said_all.set()

    def _closed(self, closed: Closed) -> None:
        self._count.closed.labels(closed.why or "client_left").inc()

    async def _write(self) -> None:
        """Say what is to be said, then frames, for as long as there are any; one writer keeps them in order."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._bus.connected and (self._outbox or self._streams.has_frames):
                if not self._outbox:
                    self._perform(self._streams.next_frames(clock.now_s(), _FRAMES_AT_ONCE))
                while self._outbox:
                    await self._say(self._outbox.popleft())
                await asyncio.sleep(0)  # publishing may never wait; followers and credits must have their turn
            if not self._outbox:
                self._said_all.set()

    async def _say(self, said: Say | SayFrame) -> None:
        try:
            await self._bus.publish(said.subject, said.data)
        except BusError as error:  # its gateway misses a number, or an answer, and opens again
            self._log.warning("not_said", subject=said.subject, error=str(error))
            return
        if isinstance(said, SayFrame):
            self._count.frames.inc()
            self._count.frame_delay.observe(clock.now_s() - said.news_s)

    async def _tick(self) -> None:
        """Twice a second: alive, presence, slow clients, and what a lost connection left behind."""
        alive = encode(RelayAlive(relay=self.relay))
        while True:
            if self._bus.connected:
                if self._frames_lost():
                    self._perform(self._streams.reopen_all())
                if not self._draining:
                    await self._bus.publish(self._names.relay_alive, alive)
                self._perform(self._streams.tick(clock.now_s()))
            self._count.levels(self._streams, self._fanout, self._store)
            await asyncio.sleep(RELAY_ALIVE_S)

    def _frames_lost(self) -> bool:
        """Whether something we said since the last look may not have arrived: a loss may be over before it is seen."""
        seen, counts = self._lost_seen, self._bus.counts
        self._lost_seen = counts.disconnects + counts.published_dropped
        return self._lost_seen != seen


class _Counts:
    """The relay's metrics; docs/metrics.md defines them."""

    def __init__(self, metrics: Metrics) -> None:
        self.opens = metrics.counter("relay_opens_total", "streams asked for by gateways")
        self.closed = metrics.counter("relay_streams_closed_total", "streams that are over, by why", ("why",))
        self.entries = metrics.counter("relay_entries_total", "log entries taken from followed replies")
        self.frames = metrics.counter("relay_frames_total", "frames sent to gateways")
        self.frame_delay = metrics.histogram(
            "relay_frame_delay_seconds",
            "newest entry of a frame came to the relay -> the frame was handed to the bus",
            buckets=TOKEN_BUCKETS_S,
        )
        self.undecodable = metrics.counter("relay_undecodable_total", "messages that could not be read")
        self._fetches = metrics.counter(
            "relay_log_fetches_total", "batched reads of logs: first looks, holes, silences"
        )
        self._live_lost = metrics.counter("relay_live_lost_total", "live entries dropped by a full inbox, and fetched")
        self._streams = metrics.gauge("relay_streams", "open streams")
        self._followers = metrics.gauge("relay_followers", "replies followed that have not ended")
        self._fetches_seen = self._live_lost_seen = 0

    def levels(self, streams: Streams, fanout: Fanout, store: LogStore) -> None:
        self._streams.set(len(streams))
        self._followers.set(len(fanout))
        self._fetches.inc(store.counts.fetches - self._fetches_seen)
        self._live_lost.inc(store.counts.live_lost - self._live_lost_seen)
        self._fetches_seen, self._live_lost_seen = store.counts.fetches, store.counts.live_lost
