"""Reads one reply's log beside its stream, in windows, and acts on what is flagged.

    flagged while it runs ──> `end` (reason safety) in the log, then control.cancel makes it fast
    flagged after the end ──> conversation withdraws the stored text; the journal says how much was shown

Another's `end` may stand first: then the flag came after the end.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

import msgspec

from services.safety.classifier import Classifier
from services.safety.verdicts import Passage
from services.safety.windows import Windows
from shared import clock
from shared.bus import Bus
from shared.errors import BusTimeoutError, NoRespondersError
from shared.limits import CATCH_UP_BATCH, REQUEST_TIMEOUT_S, SAFETY_WITHDRAW_S
from shared.log_store import LogStore
from shared.messages import (
    Cancel,
    Chunk,
    Done,
    End,
    Refused,
    SequencedEntry,
    Verdict,
    WithdrawReply,
    decoder,
    encode,
)
from shared.outcomes import EndReason
from shared.subjects import Names
from shared.telemetry import Journal
from shared.token_log import LogView

_RETRY_S = 0.5  # before conversation is told again; it may not have stored the reply yet
_answer: msgspec.msgpack.Decoder[Done | Refused] = decoder(Done | Refused)  # type: ignore[arg-type]


class Outcome(StrEnum):
    """What became of a watch; the metric label."""

    CLEAN = "clean"
    ENDED = "ended"  # this service ended the reply
    WITHDRAWN = "withdrawn"
    STOPPED = "stopped"  # somebody else ended it as `safety` first
    UNHEARD = "unheard"  # flagged after the end, and conversation did not answer


class Watch:
    """One reply, read to its end."""

    def __init__(
        self,
        reply_id: str,
        *,
        by: str,
        bus: Bus,
        store: LogStore,
        names: Names,
        classifier: Classifier,
        journal: Journal,
        on_window: Callable[[float, Verdict], None],
    ) -> None:
        """`on_window` is told each window's seconds from its text's arrival to its verdict, and the verdict."""
        self._reply_id, self._by = reply_id, by
        self._bus, self._store, self._names = bus, store, names
        self._classifier, self._journal, self._on_window = classifier, journal, on_window
        self._windows = Windows()
        self._tokens = 0  # read so far: shown, or about to be

    async def run(self) -> Outcome:
        """Raises LogGoneError, TokenLogError and BusError."""
        async with self._store.follow(self._reply_id) as entries:
            async for item in entries:
                batch = [item, *entries.take_ready(CATCH_UP_BATCH)]
                flag = await self._read(batch)
                last = batch[-1].entry
                if isinstance(last, End):
                    return await self._flagged_late(flag, last) if flag.flagged else Outcome.CLEAN
                if flag.flagged:
                    return await self._flagged(flag)
        return Outcome.CLEAN

    async def _read(self, batch: list[SequencedEntry]) -> Verdict:
        """The first flagged window of what a batch adds, or the last clean verdict."""
        since_s = clock.now_s()
        self._tokens += sum(item.entry.count for item in batch if isinstance(item.entry, Chunk))
        for item in batch:
            passage = self._passage(item)
            if passage is not None:
                verdict = await self._classifier.judge(passage)
                self._on_window(clock.now_s() - since_s, verdict)
                if verdict.flagged:
                    return verdict
        return Verdict(flagged=False)

    def _passage(self, item: SequencedEntry) -> Passage | None:
        if isinstance(item.entry, Chunk):
            return self._windows.feed(item.entry.text)
        return self._windows.finish() if isinstance(item.entry, End) else None

    async def _flagged(self, flag: Verdict) -> Outcome:
        """End it, unless somebody has; `end` is the cancel, the control message only makes it fast."""
        end = End(reason=EndReason.SAFETY, by=self._by, detail=flag.category, ended_s=clock.wall_s())
        view = await self._ended(end)
        self._tokens = len(view.ids)
        if view.ended != end:
            return await self._flagged_late(flag, view.ended)
        await self._bus.publish(
            self._names.cancel(self._reply_id), encode(Cancel(reply_id=self._reply_id, reason=EndReason.SAFETY))
        )
        self._note("safety_ended", flag)
        return Outcome.ENDED

    async def _ended(self, end: End) -> LogView:
        """A flagged reply must not run on because the bus was away: try until the watch's own deadline."""
        while True:
            try:
                return await self._store.end(self._reply_id, end)
            except BusTimeoutError:
                self._journal.note("safety_end_delayed", self._reply_id, by=self._by)

    async def _flagged_late(self, flag: Verdict, end: End | None) -> Outcome:
        if end is not None and end.reason is EndReason.SAFETY:
            return Outcome.STOPPED
        withdraw = WithdrawReply(reply_id=self._reply_id, category=flag.category, shown_tokens=self._tokens)
        heard = await self._tell(encode(withdraw))
        self._note("safety_withdrawn" if heard else "safety_withdraw_unheard", flag)
        return Outcome.WITHDRAWN if heard else Outcome.UNHEARD

    async def _tell(self, data: bytes) -> bool:
        """Until conversation has done it, at most SAFETY_WITHDRAW_S; the archive may be a moment behind the log."""
        give_up_s = clock.now_s() + SAFETY_WITHDRAW_S
        while clock.now_s() < give_up_s:
            try:
                answer = await self._bus.request(
                    self._names.conversation("withdraw"), data, timeout_s=REQUEST_TIMEOUT_S
                )
                if isinstance(_answer.decode(answer.data), Done):
                    return True
            except (BusTimeoutError, NoRespondersError, msgspec.DecodeError):
                pass  # nobody there, or somebody who cannot: the same as a no
            await asyncio.sleep(_RETRY_S)
        return False

    def _note(self, kind: str, flag: Verdict) -> None:
        self._journal.note(
            kind, self._reply_id, category=flag.category, rule=flag.rule, shown_tokens=self._tokens, by=self._by
        )
