"""Writing a reply to a client while it is being written, and waiting for one whole.

ReplyStream ──Batch──> Events ──one write──> client ──> credits back
   │ silence ──> ping      │ end ──> done
   │ gone ──> the stored reply, as far as it continues what was shown
   │ no relay, or a client that takes nothing ──> the connection is dropped: it can resume
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

from aiohttp import web

from services.gateway.events import Event, Events
from services.gateway.http import PING, REPLY_ID, REQUEST_ID, SSE_HEADERS, encode_events, unavailable
from services.gateway.measures import Measures, StallCause, StreamMeter
from services.gateway.reply import ReplyFold, stored_entries
from services.gateway.streams import Batch, RelayGoneError, ReplyStream
from shared import clock
from shared.errors import RefusedError
from shared.limits import SLOW_READER_S
from shared.messages import Open, ReplyView
from shared.telemetry import Log

_FIRST_WORD_S = 0.1  # a stream that has nothing to say yet shows itself alive after this

Stored = Callable[[], Awaitable[ReplyView]]


class Outcome(StrEnum):
    """How a stream ended; the metric's label."""

    ENDED = "ended"
    BROKEN = "broken"  # said so in a last event
    CLIENT_LEFT = "client_left"
    SLOW = "slow"  # the client took nothing for SLOW_READER_S
    NO_RELAY = "no_relay"
    FAULT = "fault"  # ours; logged where it is answered


class LiveStream:
    """One client's connection: writes what a door makes of the log until there is nothing more."""

    def __init__(
        self,
        request: web.Request,
        stream: ReplyStream,
        events: Events,
        *,
        door: str,
        request_id: str,
        stored: Stored,
        measures: Measures,
        log: Log,
        ping_s: float,
        asked_s: float | None,
    ) -> None:
        self._request, self._stream, self._events = request, stream, events
        self._door, self._request_id, self._stored = door, request_id, stored
        self._measures, self._log, self._ping_s, self._asked_s = measures, log, ping_s, asked_s
        self._response = web.StreamResponse(headers={**SSE_HEADERS, REQUEST_ID: request_id, REPLY_ID: stream.reply_id})
        self._meter: StreamMeter | None = None
        self._shown = 0  # tokens whose time was taken
        self._written_events = 0
        self._written_s = 0.0

    async def run(self) -> web.StreamResponse:
        """Until the reply ends or the client is gone; the connection is dropped when it may be resumed."""
        outcome, began_s = Outcome.FAULT, clock.now_s()
        try:
            await self._response.prepare(self._request)
            outcome = await self._pump()
            if outcome in (Outcome.ENDED, Outcome.BROKEN):
                await self._response.write_eof()
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_LEFT
            raise
        except ConnectionError:
            outcome = Outcome.CLIENT_LEFT
        except TimeoutError:
            outcome = Outcome.SLOW
        except RelayGoneError:
            outcome = Outcome.NO_RELAY
        finally:
            if outcome not in (Outcome.ENDED, Outcome.BROKEN) and self._request.transport is not None:
                self._request.transport.abort()
            self._closed(outcome, clock.now_s() - began_s)
        return self._response

    async def _pump(self) -> Outcome:
        self._written_s = clock.now_s() - self._ping_s + min(self._ping_s, _FIRST_WORD_S)
        while True:
            batch = await self._stream.next(max(0.0, self._written_s + self._ping_s - clock.now_s()))
            if batch is None:
                self._measures.pings.inc()
                await self._write(PING)
                continue
            if batch.closing == "gone":
                if (outcome := await self._without_log()) is not None:
                    return outcome
                continue
            await self._show(batch)
            self._stream.written(batch.frames)
            if self._events.fold.end is not None:
                return Outcome.ENDED
            if batch.closing is not None:
                return await self._break("stream_lost", "The stream ended before the reply did.")

    async def _show(self, batch: Batch) -> None:
        events = self._events.feed(batch.items)
        if batch.notice is not None:
            events += self._events.notice(batch.notice)
            self._blame(StallCause.QUEUE)
        if any(isinstance(item.entry, Open) and item.entry.attempt > 1 for item in batch.items):
            self._blame(StallCause.FAILOVER)
        await self._send(events)

    async def _send(self, events: list[Event]) -> None:
        if not events:
            return
        await self._write(encode_events(events, first=self._written_events == 0))
        self._written_events += len(events)
        self._measure()

    async def _write(self, data: bytes) -> None:
        """One write. A client that takes nothing raises TimeoutError, one that has left ConnectionError."""
        began_s = clock.now_s()
        async with asyncio.timeout(SLOW_READER_S):
            await self._response.write(data)
        self._written_s = clock.now_s()
        if self._written_s - began_s > 1.0:
            self._blame(StallCause.CLIENT)

    async def _without_log(self) -> Outcome | None:
        """The log is gone. What is stored goes on where we are, when nothing or everything was shown.

        A reply that is still being written is written anew, from its beginning: None, and what comes again is skipped.
        """
        fold = self._events.fold
        try:
            view = await self._stored()
        except RefusedError as refused:
            return await self._break(refused.refusal.code, refused.refusal.message)
        if view.reason is None and await self._stream.start_over():
            return None
        tokens = view.usage.output_tokens if view.usage is not None else 0
        if view.reason is None or fold.tokens not in (0, tokens):
            return await self._break(
                "stream_expired", "The reply's log has expired: retrieve the reply without streaming."
            )
        await self._send(self._events.feed(stored_entries(view)))
        return Outcome.ENDED

    async def _break(self, code: str, message: str) -> Outcome:
        await self._send(self._events.broken(code, message))
        return Outcome.BROKEN

    # --- what is measured ------------------------------------------------------------------------------------

    def _blame(self, cause: StallCause) -> None:
        if self._meter is not None and self._meter.cause is StallCause.UNKNOWN:
            self._meter.cause = cause

    def _measure(self) -> None:
        fold = self._events.fold
        if self._meter is None and fold.accepted is not None:
            self._meter = StreamMeter(self._measures, fold.accepted, self._asked_s)
        if self._meter is not None and fold.tokens > self._shown:
            self._meter.wrote(fold.tokens - self._shown, self._written_s)
            self._shown = fold.tokens

    def _closed(self, outcome: Outcome, duration_s: float) -> None:
        if outcome is Outcome.ENDED and self._meter is not None:
            self._meter.finished()
        self._measures.closed.labels(self._door, outcome.value).inc()
        end = self._events.fold.end
        self._log.info(
            "stream_closed",
            request_id=self._request_id,
            reply_id=self._stream.reply_id,
            door=self._door,
            outcome=outcome.value,
            reason=None if end is None else end.reason.value,
            tokens=self._events.fold.tokens,
            events=self._written_events,
            stalls=self._meter.stalled if self._meter else 0,
            reopened=self._stream.reopened,
            resumed=self._asked_s is None,
            duration_s=round(duration_s, 3),
        )


async def whole_reply(stream: ReplyStream, fold: ReplyFold, stored: Stored) -> ReplyView:
    """The reply once it has ended. Raises RefusedError when it cannot be followed to its end."""
    try:
        while fold.end is None:
            batch = await stream.next(SLOW_READER_S)
            if batch is None:
                continue
            if batch.closing == "gone":
                view = await stored()
                if view.reason is not None:
                    return view
                if not await stream.start_over():
                    raise unavailable("The reply is still being written, but its log cannot be read.")
                continue
            for item in batch.items:
                if fold.end is None:
                    fold.add(item)
            stream.written(batch.frames)
            if batch.closing is not None and fold.end is None:
                raise unavailable("The stream ended before the reply did.")
    except RelayGoneError:
        raise unavailable("No relay answers. The reply is being written: retrieve it by its id.") from None
    return fold.view
