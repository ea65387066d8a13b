"""Token logs on the bus: append, read, end, follow. The rules are `token_log`'s and `log_merge`'s; this is the I/O.

writer ──append (conditional)──> bucket ──republished──> follower's inbox ──┐
                                   └──────batched direct get───────────────┴──> LogMerge ──> in order, once
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import msgspec

from shared import clock
from shared.bus import Bus, BusMessage, StreamMessage, Subscription, wire
from shared.errors import (
    BusTimeoutError,
    ChorusError,
    LogGoneError,
    NoRespondersError,
    StreamFullError,
    TokenLogError,
    WrongLastSequenceError,
)
from shared.limits import APPEND_TIMEOUT_S, CATCH_UP_BATCH, FOLLOW_INBOX_MAX, LOG_END_S, READER_QUIET_S
from shared.log_merge import Command, Fetch, LogMerge
from shared.messages import Accepted, End, Entry, SequencedEntry, decoder, encode
from shared.subjects import Names
from shared.token_log import LogView, LogWriter, WriterState, end_move

_entry: msgspec.msgpack.Decoder[Entry] = decoder(Entry)  # type: ignore[arg-type]  # msgspec reads unions
_RETRY_S = 0.1  # before an append is tried again that a full bucket refused


class LogCounts(msgspec.Struct):
    undecodable: int = 0  # entries no version of us wrote
    refused: int = 0  # appends of a writer or canceller that found another entry in its place
    fetches: int = 0  # batched reads by followers
    live_lost: int = 0  # live messages dropped by a full inbox


class LogStore:
    """The logs of one region on one bus. Reply ids must be valid (`ids.reply_place`), or ValueError."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self.counts = LogCounts()
        self._bus = bus
        self._names = names

    # --- writing ---------------------------------------------------------------------------------------

    async def append(
        self,
        reply_id: str,
        expected_seq: int,
        data: bytes,
        timeout_s: float = APPEND_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Append an encoded entry after `expected_seq` (0: the log is empty); returns its sequence.

        `headers` are kept and republished with it, and mean nothing to the log.
        Raises WrongLastSequenceError, StreamFullError, or BusTimeoutError: then it may or may not stand.
        """
        subject = self._names.log_subject(reply_id)
        try:
            return await self._bus.append(
                subject, data, expected_last_seq=expected_seq, headers=headers, timeout_s=timeout_s
            )
        except WrongLastSequenceError:
            self.counts.refused += 1
            raise

    async def append_writer(self, reply_id: str, writer: LogWriter, deadline_s: float = LOG_END_S) -> WriterState:
        """Bring the writer's next append (or the one in flight) to a known outcome; returns the writer's state.

        The same bytes go again after a timeout. When one fails later than `deadline_s` from now, its
        BusTimeoutError or StreamFullError is raised with the append still in flight: calling again goes on with it.
        """
        sent = writer.in_flight or writer.next_append()
        if sent is None:
            return writer.state
        give_up_s = clock.now_s() + deadline_s
        while True:
            try:
                seq = await self.append(reply_id, sent.expected_seq, sent.data)
            except WrongLastSequenceError:
                return writer.refused(await self._standing(reply_id, give_up_s))
            except BusTimeoutError:
                if clock.now_s() >= give_up_s:
                    raise
                sent = writer.unknown()
            except StreamFullError:
                if clock.now_s() + _RETRY_S >= give_up_s:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                writer.acked(seq)
                return writer.state

    async def _standing(self, reply_id: str, give_up_s: float) -> SequencedEntry | None:
        """The last entry, asked for until there is an answer: a writer must not guess whether it was replaced."""
        while True:
            try:
                return await self.last(reply_id)
            except BusTimeoutError:
                if clock.now_s() >= give_up_s:
                    raise

    async def end(self, reply_id: str, end: End, deadline_s: float = LOG_END_S) -> LogView:
        """End the log: read and append again until an `end` stands, ours or another's; returns the ended log.

        It takes two round trips between two appends of the writer, which the chunk interval gives it.
        Raises BusTimeoutError past the deadline, LogGoneError, TokenLogError when nothing was accepted.
        """
        give_up_s = clock.now_s() + deadline_s
        view = LogView()
        while True:
            try:
                await self._advance(reply_id, view)
                move = end_move(view, end)
                if move is None:
                    return view
                expected, entry = move
                view.apply(await self.append(reply_id, expected, encode(entry)), entry)
            except WrongLastSequenceError:
                if clock.now_s() >= give_up_s:
                    raise BusTimeoutError(f"no end stands on {reply_id} after {deadline_s:g} s") from None
            except BusTimeoutError:
                if clock.now_s() >= give_up_s:
                    raise

    # --- reading ---------------------------------------------------------------------------------------

    async def read(self, reply_id: str, known: LogView | None = None) -> LogView:
        """The log as it stands now. An unknown or wholly expired one is empty: `accepted` is None, `last_seq` 0.

        `known` is what was read of it before: only what follows is read, if its last entry still stands; else all.
        Raises LogGoneError when its head is missing, TokenLogError when an entry may not stand where it does.
        """
        if known is not None and known.last_seq:
            view = known.copy()
            messages = await self._messages(reply_id, view.last_seq - 1)
            if messages and messages[0].seq == view.last_seq:
                self._fold(messages[1:], reply_id, view)
                return view
        view = LogView()
        await self._advance(reply_id, view)
        return view

    async def _advance(self, reply_id: str, view: LogView) -> None:
        """Fold what stands after the view's last entry."""
        self._fold(await self._messages(reply_id, view.last_seq), reply_id, view)

    def _fold(self, messages: Sequence[StreamMessage], reply_id: str, view: LogView) -> None:
        entries = self._decoded(messages)
        if entries and view.last_seq == 0:
            check_head(reply_id, entries[0])
        for message, item in zip(messages, entries, strict=True):
            view.apply(item.seq, item.entry, message.stored_s)

    async def read_entries(self, reply_id: str, after_seq: int = 0) -> list[SequencedEntry]:
        """All entries after `after_seq`, by batched reads until caught up."""
        return self._decoded(await self._messages(reply_id, after_seq))

    async def _messages(self, reply_id: str, after_seq: int) -> list[StreamMessage]:
        stream, subject = self._names.log_stream_of(reply_id), self._names.log_subject(reply_id)
        found: list[StreamMessage] = []
        while True:
            batch = await self._bus.read(stream, subject, from_seq=after_seq + 1, most=CATCH_UP_BATCH)
            found += batch
            if len(batch) < CATCH_UP_BATCH:
                return found
            after_seq = batch[-1].seq

    async def last(self, reply_id: str) -> SequencedEntry | None:
        message = await self._bus.last(self._names.log_stream_of(reply_id), self._names.log_subject(reply_id))
        return None if message is None else self._decoded([message])[0]

    def follow(self, reply_id: str, after_seq: int = 0) -> "LogFollower":
        """The entries after `after_seq` in order, live, until and with the `end`; see LogFollower."""
        return LogFollower(self, self._bus, self._names.live(reply_id), reply_id, after_seq)

    async def purge(self, reply_id: str) -> None:
        """Remove the log; its followers get LogGoneError."""
        await self._bus.purge(self._names.log_stream_of(reply_id), self._names.log_subject(reply_id))

    def decode_live(self, message: BusMessage) -> tuple[int, int, Entry] | None:
        """(sequence, previous sequence, entry) of a republished message; None when it is not one of ours.

        What is wrong with it will be seen, and raised, when it is fetched from the stream.
        """
        try:
            seq, previous = message.headers[wire.HEADER_SEQUENCE], message.headers[wire.HEADER_LAST_SEQUENCE]
            return int(seq), int(previous), _entry.decode(message.data)
        except (KeyError, ValueError, msgspec.DecodeError):
            self.counts.undecodable += 1
            return None

    def _decoded(self, messages: Iterable[StreamMessage]) -> list[SequencedEntry]:
        entries = []
        for message in messages:
            try:
                entries.append(SequencedEntry(seq=message.seq, entry=_entry.decode(message.data)))
            except msgspec.DecodeError as error:
                self.counts.undecodable += 1
                raise TokenLogError(f"entry {message.seq} of {message.subject} cannot be read: {error}") from None
        return entries


def check_head(reply_id: str, first: SequencedEntry) -> None:
    """Raises LogGoneError when a log's first entry is not its `accepted`: age or overflow took the head."""
    if not isinstance(first.entry, Accepted):
        raise LogGoneError(f"the head of {reply_id} is gone")


class LogFollower:
    """One reader of one log: `async with store.follow(reply) as entries: async for item in entries: ...`.

    Subscribes before it catches up, fills holes from the stream, asks again after a quiet second, and closes its
    subscription after the `end`, on an error, and at `aclose`. An empty log is waited for.

    Raises LogGoneError when the log's head, or what this reader already has, is no longer there; TokenLogError on
    an undecodable entry; BusTimeoutError when it cannot subscribe; BusClosedError. Once it follows, a bus that does
    not answer is waited for: whoever follows sets the deadline.
    """

    def __init__(self, store: LogStore, bus: Bus, live: str, reply_id: str, after_seq: int) -> None:
        self._store = store
        self._bus = bus
        self._live = live
        self._reply_id = reply_id
        self._merge = LogMerge(after_seq)
        self._out: deque[SequencedEntry] = deque()
        self._subscription: Subscription | None = None
        self._fetch: Fetch | None = None  # asked for by the merge, not yet done
        self._missed = False  # the last fetch did not find what this reader already has
        self._over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequencedEntry:
        try:
            while not self._out and not self._over:
                await self._more()
        except ChorusError:
            await self.aclose()
            raise
        if self._over:
            await self._leave()
        if not self._out:
            raise StopAsyncIteration
        return self._out.popleft()

    def take_ready(self, most: int) -> list[SequencedEntry]:
        """Further entries that are already here, in order, without waiting: one batch for a reader that is behind."""
        if self._subscription is not None:
            for message in self._subscription.take_ready(most):
                self._perform(self._merged(message))
        return [self._out.popleft() for _ in range(min(most, len(self._out)))]

    async def aclose(self) -> None:
        """The reader leaves: what it did not take is forgotten."""
        self._out.clear()
        await self._leave()

    async def _leave(self) -> None:
        self._over = True
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._store.counts.live_lost += subscription.dropped
            await subscription.close()

    async def _more(self) -> None:
        """One step towards the next entry: subscribe, or fetch what is asked for, or wait for something live."""
        if self._subscription is None:
            self._subscription = await self._bus.subscribe(self._live, inbox_max=FOLLOW_INBOX_MAX)
            self._perform(self._merge.start())
        elif self._fetch is not None:
            await self._do_fetch(self._fetch.after_seq)
        else:
            message = await self._subscription.next(READER_QUIET_S)
            self._perform(self._merge.quiet() if message is None else self._merged(message))

    def _merged(self, message: BusMessage) -> list[Command]:
        live = self._store.decode_live(message)
        return [] if live is None else self._merge.live(*live)

    def _perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Fetch):
                self._fetch = command
            elif not self._over:
                self._out.append(command.item)
                self._over = isinstance(command.item.entry, End)

    async def _do_fetch(self, after_seq: int) -> None:
        """Fetch from the entry this reader has last, that one included: if it is not there, nothing is certain."""
        self._fetch = None
        self._store.counts.fetches += 1
        try:
            found = await self._store.read_entries(self._reply_id, max(0, after_seq - 1))
        except (BusTimeoutError, NoRespondersError):
            self._merge.fetch_failed()  # the next live entry, or a quiet second, asks again
            return
        except asyncio.CancelledError:
            self._merge.fetch_failed()  # the reader looked away; it may come back
            raise
        if after_seq == 0 and found:
            check_head(self._reply_id, found[0])
        if after_seq and (not found or found[0].seq != after_seq):
            if self._missed:
                raise LogGoneError(f"entry {after_seq} of {self._reply_id} is gone")
            self._missed = True  # a copy that lags may not have it yet: ask once more
            self._merge.fetch_failed()
            return
        self._missed = False
        self._perform(self._merge.fetched(found))
