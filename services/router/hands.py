"""What leases ask for, done on the bus: each ticketed command becomes exactly one event, errors and timeouts too."""

from typing import TypeAlias

import msgspec

from services.router.lease_events import (
    Answer,
    Answered,
    AppendEnd,
    AppendOpen,
    Archive,
    Archived,
    ArchiveFailed,
    AskReplica,
    AskUnanswered,
    DispatchDeclined,
    DispatchTaken,
    DispatchUnknown,
    EndFailed,
    EndStands,
    LogRead,
    OpenAppended,
    OpenRefused,
    OpenUnknown,
    ReadFailed,
    ReadLog,
    SendDispatch,
)
from shared import clock
from shared.bus import Bus
from shared.errors import BusError, LogGoneError, TokenLogError, WrongLastSequenceError
from shared.limits import APPEND_TIMEOUT_S, ASK_TIMEOUT_S, DISPATCH_TIMEOUT_S, REQUEST_TIMEOUT_S
from shared.log_store import LogStore
from shared.messages import Dispatched, DispatchRefused, End, Holding, decoder, encode
from shared.subjects import Names
from shared.token_log import LogView, ended_reply

Asked: TypeAlias = ReadLog | AppendOpen | SendDispatch | AskReplica | AppendEnd | Archive

_dispatch_answer: msgspec.msgpack.Decoder[Dispatched | DispatchRefused] = decoder(Dispatched | DispatchRefused)  # type: ignore[arg-type]  # msgspec reads unions
_holding = decoder(Holding)


class Hands:
    """One router's acts on the bus. Nothing here decides."""

    def __init__(self, bus: Bus, store: LogStore, names: Names, router: str) -> None:
        self._bus, self._store, self._names, self._router = bus, store, names, router

    async def do(self, command: Asked, known: LogView | None = None) -> Answer:
        """`known` is what the lease has read of the log already: only what follows is read again."""
        match command:
            case ReadLog():
                return await self._read(command, known)
            case AppendOpen():
                return await self._open(command)
            case SendDispatch():
                return await self._dispatch(command)
            case AskReplica():
                return await self._ask(command)
            case AppendEnd():
                return await self._end(command)
            case Archive():
                return await self._archive(command)

    async def _read(self, command: ReadLog, known: LogView | None) -> Answer:
        reply_id, ticket = command.reply_id, command.ticket
        try:
            return LogRead(reply_id=reply_id, ticket=ticket, view=await self._store.read(reply_id, known))
        except (LogGoneError, TokenLogError):
            # Without its head, or with an entry that may not stand there, it is no log: nothing can be written to it.
            return LogRead(reply_id=reply_id, ticket=ticket, view=LogView())
        except BusError:
            return ReadFailed(reply_id=reply_id, ticket=ticket)

    async def _open(self, command: AppendOpen) -> Answer:
        reply_id, ticket = command.reply_id, command.ticket
        try:
            seq = await self._store.append(reply_id, command.expected_seq, encode(command.entry), APPEND_TIMEOUT_S)
        except WrongLastSequenceError:
            return OpenRefused(reply_id=reply_id, ticket=ticket)
        except BusError:
            return OpenUnknown(reply_id=reply_id, ticket=ticket)
        return OpenAppended(reply_id=reply_id, ticket=ticket, seq=seq)

    async def _dispatch(self, command: SendDispatch) -> Answer:
        reply_id, ticket = command.reply_id, command.ticket
        subject = self._names.dispatch(command.replica)
        try:
            answer = await self._bus.request(subject, encode(command.dispatch), timeout_s=DISPATCH_TIMEOUT_S)
            said = _dispatch_answer.decode(answer.data)
        except (BusError, msgspec.DecodeError):
            return DispatchUnknown(reply_id=reply_id, ticket=ticket)
        if isinstance(said, DispatchRefused):
            return DispatchDeclined(reply_id=reply_id, ticket=ticket, reason=said.reason, detail=said.detail)
        return DispatchTaken(reply_id=reply_id, ticket=ticket, router=said.router, number=said.number)

    async def _ask(self, command: AskReplica) -> Answer:
        reply_id, ticket = command.reply_id, command.ticket
        subject = self._names.ask(command.replica)
        try:
            answer = await self._bus.request(subject, encode(command.ask), timeout_s=ASK_TIMEOUT_S)
            holding = _holding.decode(answer.data)
        except (BusError, msgspec.DecodeError):
            return AskUnanswered(reply_id=reply_id, ticket=ticket)
        return Answered(
            reply_id=reply_id, ticket=ticket, running=holding.running, attempt=holding.attempt, router=holding.router
        )

    async def _end(self, command: AppendEnd) -> Answer:
        reply_id, ticket = command.reply_id, command.ticket
        end = End(reason=command.reason, by=self._router, detail=command.detail, ended_s=clock.wall_s())
        try:
            if command.after_seq is None:
                await self._store.end(reply_id, end)
            else:
                await self._store.append(reply_id, command.after_seq, encode(end), APPEND_TIMEOUT_S)
        except (WrongLastSequenceError, BusError, LogGoneError, TokenLogError):
            return EndFailed(reply_id=reply_id, ticket=ticket)
        return EndStands(reply_id=reply_id, ticket=ticket)

    async def _archive(self, command: Archive) -> Answer:
        reply_id, ticket = command.reply_id, command.ticket
        subject, data = self._names.ended(reply_id), encode(ended_reply(command.view))
        try:
            await self._bus.append(subject, data, message_id=reply_id, timeout_s=REQUEST_TIMEOUT_S)
        except BusError:
            return ArchiveFailed(reply_id=reply_id, ticket=ticket)
        return Archived(reply_id=reply_id, ticket=ticket)
