"""Each act becomes exactly one event with its ticket, whatever the bus does."""

import pytest

from services.router.hands import Hands
from services.router.lease_events import (
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
from shared.bus import BusMessage, StreamMessage
from shared.errors import BusTimeoutError, NoRespondersError, StreamFullError, WrongLastSequenceError
from shared.log_store import LogStore
from shared.messages import (
    Ask,
    Chunk,
    Dispatched,
    DispatchRefused,
    End,
    EndedReply,
    Holding,
    Open,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.subjects import Names
from shared.token_log import LogView
from tests.unit.replica_shell.test_attempt import REPLY, dispatch

NAMES = Names("local")
OPEN = Open(attempt=1, replica="replica-1", model_version="1", first_index=0, router="router-1")


class FakeBus:
    """Answers every call with what it was given, or raises it."""

    def __init__(self, answer: object) -> None:
        self.answer, self.calls = answer, []

    def _give(self, *call) -> object:
        self.calls.append(call)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def append(self, subject: str, data: bytes, **more) -> object:
        return self._give(subject, data, more)

    async def request(self, subject: str, data: bytes, **more) -> object:
        return BusMessage(subject, self._give(subject, data, more))

    async def read(self, stream: str, subject: str, *, from_seq: int, most: int) -> object:
        return self._give(stream, subject, from_seq)


async def act(command, answer: object):
    bus = FakeBus(answer)
    event = await Hands(bus, LogStore(bus, NAMES), NAMES, "router-1").do(command)
    assert (event.reply_id, event.ticket) == (REPLY, 7)
    return event, bus


OPENING = AppendOpen(reply_id=REPLY, ticket=7, expected_seq=1, entry=OPEN)
SENDING = SendDispatch(reply_id=REPLY, ticket=7, replica="replica-1", dispatch=dispatch())
ASKING = AskReplica(
    reply_id=REPLY, ticket=7, replica="replica-1", ask=Ask(reply_id=REPLY, router="router-1", ack_subject="a")
)
FAILING = AppendEnd(reply_id=REPLY, ticket=7, reason=EndReason.FAILED, detail="", after_seq=3)
READING = ReadLog(reply_id=REPLY, ticket=7)
TIMEOUT, NOBODY = BusTimeoutError("t"), NoRespondersError("n")


@pytest.mark.parametrize(
    ("command", "answer", "kind"),
    [
        (OPENING, WrongLastSequenceError("s"), OpenRefused),
        (OPENING, TIMEOUT, OpenUnknown),
        (OPENING, StreamFullError("full"), OpenUnknown),
        (SENDING, TIMEOUT, DispatchUnknown),
        (SENDING, NOBODY, DispatchUnknown),
        (SENDING, b"\xc1", DispatchUnknown),
        (ASKING, TIMEOUT, AskUnanswered),
        (ASKING, NOBODY, AskUnanswered),
        (ASKING, b"", AskUnanswered),
        (READING, TIMEOUT, ReadFailed),
        (AppendEnd(reply_id=REPLY, ticket=7, reason=EndReason.FAILED, detail=""), NOBODY, EndFailed),
        (FAILING, WrongLastSequenceError("s"), EndFailed),
        (FAILING, TIMEOUT, EndFailed),
    ],
)
async def test_what_goes_wrong_is_an_event_too(command, answer: object, kind: type):
    """Errors, timeouts and garbage never leave a lease waiting."""
    event, _ = await act(command, answer)
    assert type(event) is kind


async def test_a_failing_end_is_conditional():
    """It follows the entry that was read last, or it does not stand."""
    event, bus = await act(FAILING, 9)
    assert event == EndStands(reply_id=REPLY, ticket=7)
    assert bus.calls[0][2]["expected_last_seq"] == 3


async def test_an_open_is_conditional():
    """It names the entry it follows, and tells where it stands."""
    event, bus = await act(OPENING, 9)
    assert event == OpenAppended(reply_id=REPLY, ticket=7, seq=9)
    assert bus.calls[0][2]["expected_last_seq"] == 1


async def test_a_dispatch_is_answered():
    """Taken with the replica's count and whom it reports to, or refused with its word."""
    event, _ = await act(SENDING, encode(Dispatched(replica="replica-1", number=4, router="router-2")))
    assert event == DispatchTaken(reply_id=REPLY, ticket=7, router="router-2", number=4)
    event, _ = await act(SENDING, encode(DispatchRefused(replica="replica-1", reason="full", detail="d")))
    assert event == DispatchDeclined(reply_id=REPLY, ticket=7, reason="full", detail="d")


async def test_a_question_is_answered():
    """As the replica says it."""
    holding = Holding(replica="replica-1", reply_id=REPLY, running=True, attempt=2, router="router-1")
    event, _ = await act(ASKING, encode(holding))
    assert event == Answered(reply_id=REPLY, ticket=7, running=True, attempt=2, router="router-1")


def stored(*entries) -> list[StreamMessage]:
    return [StreamMessage("s", encode(entry), seq, 100.0 + seq) for seq, entry in enumerate(entries, 1)]


async def test_a_log_is_read_whole():
    """With the time its first token was stored; one without its head, or that breaks the rules, counts as no log."""
    accepted = dispatch().request.accepted
    chunk = Chunk(attempt=1, first_index=0, ids=pack_ids([5]), text="a", text_ends=(1,))
    event, _ = await act(READING, stored(accepted, OPEN, chunk))
    assert isinstance(event, LogRead)
    assert (event.view.ids, event.view.last_seq, event.view.first_token_s) == ([5], 3, 103.0)
    event, _ = await act(READING, stored(OPEN, chunk))
    assert isinstance(event, LogRead)
    assert event.view.accepted is None
    event, _ = await act(READING, stored(accepted, chunk))
    assert isinstance(event, LogRead)
    assert event.view.accepted is None


async def test_an_ended_reply_is_archived_once():
    """Under its own id, so that the stream keeps one; a failure is told."""
    view = LogView()
    chunk = Chunk(attempt=1, first_index=0, ids=pack_ids([5]), text="a", text_ends=(1,))
    end = End(reason=EndReason.MAX_TOKENS, by="replica-1#1")
    for seq, entry in enumerate((dispatch().request.accepted, OPEN, chunk, end), 1):
        view.apply(seq, entry)
    event, bus = await act(Archive(reply_id=REPLY, ticket=7, view=view), 1)
    assert isinstance(event, Archived)
    subject, data, more = bus.calls[0]
    assert (subject, more["message_id"]) == (NAMES.ended(REPLY), REPLY)
    assert decoder(EndedReply).decode(data).text == "a"
    event, _ = await act(Archive(reply_id=REPLY, ticket=7, view=view), StreamFullError("full"))
    assert isinstance(event, ArchiveFailed)
