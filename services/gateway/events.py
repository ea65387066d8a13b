"""A reply's log -> events: numbered ones of the Responses API, or chunks of chat completions. Pure.

    number  0        1..989          990          998, 999    1000 + 16 i      1000 + 16 (budget + 1) + 0..7
            created  queued notices  in_progress  item, part  delta that ends  text done, part done, [refusal],
                     (ephemeral)                  added       with token i     item done, completed | ...

Numbers are a function of the log alone, so every gateway gives the same token the same number, however chunks were
cut or joined on the way. Notices after the opening (another replica goes on) take the gaps, and are not replayed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from services.gateway.openai_objects import (
    REFUSAL_TEXT,
    Json,
    chat_base,
    chat_logprobs,
    chat_usage,
    failure_of,
    finish_reason,
    has_item,
    item_status,
    logprob_list,
    message_item,
    reason_of,
    refusal_part,
    response_base,
    response_object,
    text_part,
    with_metadata,
)
from services.gateway.reply import ReplyFold, ids_from, logprobs_from, text_from
from shared.ids import output_item_id
from shared.limits import EVENT_GAP
from shared.messages import Chunk, End, Notice, Open, SequencedEntry, TokenLogprob
from shared.outcomes import EndReason
from shared.token_log import (
    EVENT_BASE,
    EVENT_CREATED,
    EVENT_NOTICE_LAST,
    EVENT_OPENING,
    closing_event,
    event_of_token,
    tokens_seen,
)

EVENT_ITEM_ADDED = EVENT_BASE - 2
EVENT_PART_ADDED = EVENT_BASE - 1
_TEXT_DONE, _PART_DONE, _REFUSAL_ADDED, _REFUSAL_DELTA, _REFUSAL_DONE, _REFUSED_DONE, _ITEM_DONE, _TERMINAL = range(8)

FROM_START = -1  # `after` of a client that has seen nothing: event 0 is one it has not seen

assert EVENT_GAP > _TERMINAL

_json = msgspec.json.Encoder().encode


class Event(NamedTuple):
    """One server-sent event; `number` and `name` are None on the chat door, which has neither."""

    number: int | None
    name: str | None
    data: bytes


class Events(Protocol):
    """What a door makes of one reply's log."""

    fold: ReplyFold

    def feed(self, items: Sequence[SequencedEntry]) -> list[Event]: ...

    def notice(self, notice: Notice) -> list[Event]: ...

    def broken(self, code: str, message: str) -> list[Event]:
        """The last word when the stream cannot go on, though the reply may."""
        ...


def terminal_event(budget: int) -> int:
    """The number of the last event of a reply that may have `budget` tokens."""
    return closing_event(budget) + _TERMINAL


class ResponseEvents:
    """The Responses API's events after number `after`. `token_ids`: each delta also names its tokens."""

    def __init__(self, *, after: int = FROM_START, token_ids: bool = False) -> None:
        self.fold = ReplyFold(keep_ids=token_ids)
        self._after = after
        self._token_ids = token_ids
        self._shown = tokens_seen(after)  # tokens the client has
        self._last = max(after, EVENT_CREATED)  # the highest number given so far
        self._item_added = False
        self._text: list[str] = []  # released, not yet in a delta
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._head = b""

    def feed(self, items: Sequence[SequencedEntry]) -> list[Event]:
        """The events of the next entries; neighbouring chunks become one delta."""
        events: list[Event] = []
        for item in items:
            entry = item.entry
            if self.fold.end is not None:
                break
            self.fold.add(item)
            if isinstance(entry, Chunk):
                self._take(entry)
                continue
            self._flush(events)
            if isinstance(entry, Open):
                self._lifecycle(events, EVENT_OPENING, "response.in_progress", "in_progress")
            elif isinstance(entry, End):
                self._close(events)
            elif not self._head:
                self._begin(events)
        self._flush(events)
        return events

    def notice(self, notice: Notice) -> list[Event]:
        """A word to whoever waits: a known event type repeated, with the word in its metadata. May have no room."""
        accepted = self.fold.accepted
        number = self._last + 1
        opened = self.fold.attempts > 0
        if accepted is None or self.fold.end is not None or not _free_for_notice(number, opened=opened):
            return []
        more = {"notice": notice.message or notice.kind}
        if notice.position is not None:
            more["position"] = str(notice.position)
        if notice.eta_s is not None:
            more["eta_s"] = f"{notice.eta_s:.1f}"
        status = "in_progress" if opened else "queued"
        body = with_metadata({**response_base(accepted), "status": status}, more)
        events: list[Event] = []
        self._emit(events, number, f"response.{status}", {"response": body})
        return events

    def broken(self, code: str, message: str) -> list[Event]:
        events: list[Event] = []
        self._emit(events, self._last + 1, "error", {"code": code, "message": message, "param": None})
        return events

    def _begin(self, events: list[Event]) -> None:
        accepted = self.fold.accepted
        assert accepted is not None
        item = _json(output_item_id(accepted.reply_id))
        self._head = b',"item_id":' + item + b',"output_index":0,"content_index":0,"delta":'
        self._lifecycle(events, EVENT_CREATED, "response.created", "queued")

    def _lifecycle(self, events: list[Event], number: int, name: str, status: str) -> None:
        accepted = self.fold.accepted
        assert accepted is not None
        if number > self._after and (number > self._last or number == EVENT_CREATED):
            self._emit(events, number, name, {"response": {**response_base(accepted), "status": status}})

    def _take(self, chunk: Chunk) -> None:
        text = text_from(chunk, self._shown)
        if text:
            self._text.append(text)
        if self._token_ids:
            self._ids += ids_from(chunk, self._shown)
        if chunk.logprobs:
            self._logprobs += logprobs_from(chunk, self._shown)
        self._shown = max(self._shown, self.fold.tokens)

    def _flush(self, events: list[Event], *, last: bool = False) -> None:
        """One delta of what was released; tokens that released nothing wait for one that does, or for the end."""
        if self.fold.tokens and not self._item_added:
            self._add_item(events)
        logprobs = logprob_list(self._logprobs) if self._text or last else []
        if not self._text and not (last and (self._ids or logprobs)):
            return
        number = event_of_token(self.fold.tokens - 1)
        tail = b',"logprobs":' + _json(logprobs)
        self._logprobs.clear()
        if self._token_ids:
            tail += b',"token_ids":' + _json(self._ids)
            self._ids = []
        data = b'{"type":"response.output_text.delta","sequence_number":%d%s%s%s}' % (
            number,
            self._head,
            _json("".join(self._text)),
            tail,
        )
        self._text.clear()
        self._last = number
        events.append(Event(number, "response.output_text.delta", data))

    def _add_item(self, events: list[Event]) -> None:
        self._item_added = True
        reply_id = self._reply_id
        self._lifecycle(events, EVENT_OPENING, "response.in_progress", "in_progress")
        item = message_item(reply_id, "in_progress", [])
        self._emit(events, EVENT_ITEM_ADDED, "response.output_item.added", {"output_index": 0, "item": item})
        self._emit(events, EVENT_PART_ADDED, "response.content_part.added", self._part(0, {"part": text_part("")}))

    def _close(self, events: list[Event]) -> None:
        self._flush(events, last=True)
        view = self.fold.view
        reason = reason_of(view)
        assert reason is not None
        first = closing_event(view.accepted.budget)
        if has_item(reason, self.fold.tokens):
            if not self._item_added:
                self._add_item(events)
            self._close_item(events, first, text_part(view.text, view.logprobs), reason)
        response = response_object(view, token_ids=self._token_ids)
        kind = {"completed": "completed", "failed": "failed"}.get(response["status"], "incomplete")
        self._emit(events, first + _TERMINAL, f"response.{kind}", {"response": response})

    def _close_item(self, events: list[Event], first: int, text: Json, reason: EndReason) -> None:
        parts = [text]
        done = self._part(0, {"text": text["text"], "logprobs": text["logprobs"]})
        self._emit(events, first + _TEXT_DONE, "response.output_text.done", done)
        self._emit(events, first + _PART_DONE, "response.content_part.done", self._part(0, {"part": parts[0]}))
        if reason is EndReason.SAFETY:
            parts.append(refusal_part(REFUSAL_TEXT))
            empty = self._part(1, {"part": refusal_part("")})
            self._emit(events, first + _REFUSAL_ADDED, "response.content_part.added", empty)
            delta = self._part(1, {"delta": REFUSAL_TEXT})
            self._emit(events, first + _REFUSAL_DELTA, "response.refusal.delta", delta)
            whole = self._part(1, {"refusal": REFUSAL_TEXT})
            self._emit(events, first + _REFUSAL_DONE, "response.refusal.done", whole)
            closed = self._part(1, {"part": parts[1]})
            self._emit(events, first + _REFUSED_DONE, "response.content_part.done", closed)
        item = message_item(self._reply_id, item_status(reason), parts)
        self._emit(events, first + _ITEM_DONE, "response.output_item.done", {"output_index": 0, "item": item})

    @property
    def _reply_id(self) -> str:
        accepted = self.fold.accepted
        assert accepted is not None
        return accepted.reply_id

    def _part(self, index: int, body: Json) -> Json:
        return {"item_id": output_item_id(self._reply_id), "output_index": 0, "content_index": index, **body}

    def _emit(self, events: list[Event], number: int, name: str, body: Json) -> None:
        if number > self._after:
            events.append(Event(number, name, _json({"type": name, "sequence_number": number, **body})))
            self._last = max(self._last, number)


def _free_for_notice(number: int, *, opened: bool) -> bool:
    """Whether a notice may have this number: before the opening, between it and the item, or in a token's gap."""
    if not opened:
        return number <= EVENT_NOTICE_LAST
    if number < EVENT_BASE:
        return EVENT_OPENING < number < EVENT_ITEM_ADDED
    return (number - EVENT_BASE) % EVENT_GAP != 0


class ChatEvents:
    """Chat-completion chunks: the role first, text as it comes, the finish reason, usage when asked for, `[DONE]`."""

    def __init__(self, *, include_usage: bool = False, token_ids: bool = False) -> None:
        self.fold = ReplyFold(keep_ids=token_ids, keep_logprobs=False)
        self._include_usage = include_usage
        self._token_ids = token_ids
        self._base: Json = {}
        self._head = self._tail = b""

    def feed(self, items: Sequence[SequencedEntry]) -> list[Event]:
        events: list[Event] = []
        text: list[str] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for item in items:
            if self.fold.end is not None:
                break
            have = self.fold.tokens
            self.fold.add(item)
            if isinstance(item.entry, Chunk):
                text.append(text_from(item.entry, have))
                if self._token_ids:
                    ids += ids_from(item.entry, have)
                if item.entry.logprobs:
                    logprobs += logprobs_from(item.entry, have)
            elif not self._head:
                self._begin(events)
        self._delta(events, "".join(text), ids, logprobs)
        if self.fold.end is not None:
            self._close(events)
        return events

    def notice(self, notice: Notice) -> list[Event]:  # noqa: ARG002 - the chat wire has no word for it
        return []

    def broken(self, code: str, message: str) -> list[Event]:
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        return [Event(None, None, _json({"error": error}))]

    def _begin(self, events: list[Event]) -> None:
        accepted = self.fold.accepted
        assert accepted is not None
        self._base = chat_base(accepted, "chat.completion.chunk")
        opening = _json(self._base)[:-1]
        self._head = opening + b',"choices":[{"index":0,"delta":{"content":'
        self._tail = b',"finish_reason":null}]' + (b',"usage":null' if self._include_usage else b"")
        self._choice(events, {"role": "assistant", "content": "", "refusal": None}, None)

    def _delta(self, events: list[Event], text: str, ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        if text or ids or any(odds.token for odds in logprobs):
            more = b',"token_ids":' + _json(ids) if self._token_ids else b""
            odds = b'},"logprobs":' + (_json(chat_logprobs(logprobs)) if logprobs else b"null")
            events.append(Event(None, None, self._head + _json(text) + odds + self._tail + more + b"}"))

    def _choice(self, events: list[Event], delta: Json, finish: str | None) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        usage: Json = {"usage": None} if self._include_usage else {}
        events.append(Event(None, None, _json({**self._base, "choices": [choice], **usage})))

    def _close(self, events: list[Event]) -> None:
        view = self.fold.view
        failure = failure_of(view)
        if failure is not None:
            events.append(Event(None, None, _json(failure)))
            return
        reason = reason_of(view)
        assert reason is not None
        assert view.usage is not None
        if reason is EndReason.SAFETY:
            self._choice(events, {"refusal": REFUSAL_TEXT}, None)
        self._choice(events, {}, finish_reason(reason))
        if self._include_usage:
            usage = chat_usage(view.usage)
            events.append(Event(None, None, _json({**self._base, "choices": [], "usage": usage})))
        events.append(Event(None, None, b"[DONE]"))
