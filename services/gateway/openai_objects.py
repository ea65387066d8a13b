"""Replies, messages, models and errors as OpenAI's JSON has them. Pure: plain dicts, encoded by the caller."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.catalog import ModelCard
from shared.ids import chat_id, output_item_id
from shared.messages import Accepted, InputItem, ReplyView, RequestEcho, TokenLogprob, Usage, unpack_ids
from shared.outcomes import CANCELLED_ENDS, EndReason
from shared.tiers import Tier

Json = dict[str, Any]

REFUSAL_TEXT = "This reply was stopped by the content filter."
_FAILED_TEXT = {
    EndReason.FAILED: "The reply could not be finished. What was written is kept; send the message again.",
    EndReason.EXPIRED: "The reply was not finished within its deadline. Send the message again.",
}
_SERVED_TIER = {Tier.PAID: "priority", Tier.FREE: "default", Tier.BACKGROUND: "flex"}
_FINISH = {EndReason.MAX_TOKENS: "length", EndReason.SAFETY: "content_filter"}


# --- the Responses API -----------------------------------------------------------------------------------


def reason_of(view: ReplyView) -> EndReason | None:
    """Why the reply ended, as a client is told: text that was withdrawn later counts as a safety stop."""
    return EndReason.SAFETY if view.withdrawn and view.reason is not None else view.reason


def response_status(reason: EndReason | None, tokens: int) -> str:
    if reason is None:
        return "in_progress" if tokens else "queued"
    if reason in CANCELLED_ENDS:
        return "cancelled"
    if reason in _FAILED_TEXT:
        return "failed"
    return "completed" if _completed(reason) else "incomplete"


def _completed(reason: EndReason) -> bool:
    return reason.natural and reason is not EndReason.MAX_TOKENS


def has_item(reason: EndReason | None, tokens: int) -> bool:
    """Whether the reply's message stands in the output: once there is a token, or an end that is an answer."""
    return tokens > 0 or (reason is not None and (reason.natural or reason is EndReason.SAFETY))


def text_part(text: str, logprobs: Iterable[TokenLogprob] = ()) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": logprob_list(logprobs), "text": text}


def logprob_list(logprobs: Iterable[TokenLogprob]) -> list[Json]:
    """As both doors have them. A token without bytes of its own, as the one that ends a reply, is not in the text."""
    return [
        {**_logprob(odds.token, odds.logprob), "top_logprobs": [_logprob(*other) for other in odds.top]}
        for odds in logprobs
        if odds.token
    ]


def _logprob(token: bytes, logprob: float) -> Json:
    """Part of a character shows as U+FFFD; the bytes say what it is."""
    return {"token": token.decode(errors="replace"), "bytes": list(token), "logprob": logprob}


def refusal_part(text: str) -> Json:
    return {"type": "refusal", "refusal": text}


def message_item(reply_id: str, status: str, parts: Sequence[Json]) -> Json:
    return {"id": output_item_id(reply_id), "type": "message", "status": status, "role": "assistant", "content": parts}


def output_items(view: ReplyView) -> list[Json]:
    """The output of a reply that has begun; parts as the events announced them."""
    reason = reason_of(view)
    tokens = _tokens(view)
    if not has_item(reason, tokens):
        return []
    parts = [text_part("") if view.withdrawn else text_part(view.text, view.logprobs)]
    if reason is EndReason.SAFETY:
        parts.append(refusal_part(REFUSAL_TEXT))
    return [message_item(view.accepted.reply_id, item_status(reason), parts)]


def item_status(reason: EndReason | None) -> str:
    if reason is None:
        return "in_progress"
    return "completed" if _completed(reason) else "incomplete"


def response_object(view: ReplyView, *, status: str | None = None, token_ids: bool = False) -> Json:
    """The response object of a reply, running or ended. `status` overrides what the view alone can say."""
    accepted, reason = view.accepted, reason_of(view)
    made = response_base(accepted)
    made["status"] = status or response_status(reason, _tokens(view))
    if reason is None:
        return made
    made["output"] = output_items(view)
    made["usage"] = response_usage(view.usage or Usage(input_tokens=accepted.input_tokens, output_tokens=0))
    if made["status"] == "completed":
        made["completed_at"] = int(view.ended_s or 0)
    elif reason in _FAILED_TEXT:
        code = "server_error" if reason is EndReason.FAILED else "expired"
        made["error"] = {"code": code, "message": view.detail or _FAILED_TEXT[reason]}
    else:
        made["incomplete_details"] = {"reason": _incomplete_reason(reason)}
    if token_ids:
        made["chorus"] = {
            "token_ids": [] if view.withdrawn else unpack_ids(view.ids),
            "end_reason": reason.value,
            "checked": view.checked,
        }
    return made


def _incomplete_reason(reason: EndReason) -> str:
    if reason is EndReason.MAX_TOKENS:
        return "max_output_tokens"
    return "content_filter" if reason is EndReason.SAFETY else reason.value


def response_base(accepted: Accepted) -> Json:
    """A response object with nothing written yet."""
    echo = accepted.echo
    return {
        "id": accepted.reply_id,
        "object": "response",
        "created_at": int(accepted.created_s),
        "completed_at": None,
        "status": "queued",
        "background": echo.background,
        "error": None,
        "incomplete_details": None,
        "instructions": echo.instructions,
        "max_output_tokens": echo.max_output_tokens,
        "max_tool_calls": None,
        "model": accepted.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": echo.previous_response_id,
        "conversation": None if echo.conversation_id is None else {"id": echo.conversation_id},
        "reasoning": {"effort": None, "summary": None},
        "service_tier": _SERVED_TIER[accepted.tier],
        "store": echo.store,
        "temperature": echo.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": echo.top_logprobs,
        "top_p": echo.top_p,
        "truncation": "auto",
        "usage": None,
        "user": None,
        "metadata": metadata_of(echo, accepted.model),
    }


def metadata_of(echo: RequestEcho, model: str) -> dict[str, str]:
    """The client's metadata, and the word about another model answering where there is one."""
    said = dict(echo.metadata)
    if echo.notice is not None:
        said["notice"] = echo.notice
        if echo.requested_model and echo.requested_model != model:
            said["requested_model"] = echo.requested_model
    return said


def response_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def deleted_object(reply_id: str) -> Json:
    return {"id": reply_id, "object": "response", "deleted": True}


def input_item(item: InputItem) -> Json:
    kind = "output_text" if item.role == "assistant" else "input_text"
    part = text_part(item.text) if kind == "output_text" else {"type": kind, "text": item.text}
    return {"id": item.id, "type": "message", "status": "completed", "role": item.role, "content": [part]}


def input_items_page(items: Sequence[InputItem], *, after: str | None, limit: int, ascending: bool) -> Json:
    """One page of a reply's input items; an unknown `after` begins at the start."""
    ordered = list(items) if ascending else list(reversed(items))
    start = next((at + 1 for at, item in enumerate(ordered) if item.id == after), 0) if after else 0
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": [input_item(item) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + limit < len(ordered),
    }


def _tokens(view: ReplyView) -> int:
    return view.usage.output_tokens if view.usage is not None else len(view.ids) // 4


# --- chat completions ------------------------------------------------------------------------------------


def finish_reason(reason: EndReason) -> str:
    """Of an end that is no failure: a stopped reply ends like any other, with what was written."""
    return _FINISH.get(reason, "stop")


def chat_base(accepted: Accepted, kind: str) -> Json:
    return {
        "id": chat_id(accepted.reply_id),
        "object": kind,
        "created": int(accepted.created_s),
        "model": accepted.model,
        "service_tier": _SERVED_TIER[accepted.tier],
        "system_fingerprint": None,
    }


def chat_completion(view: ReplyView, *, token_ids: bool = False) -> Json:
    """An ended reply as a chat completion."""
    reason = reason_of(view) or EndReason.STOP_TOKEN
    message: Json = {
        "role": "assistant",
        "content": "" if view.withdrawn else view.text,
        "refusal": REFUSAL_TEXT if reason is EndReason.SAFETY else None,
        "annotations": [],
    }
    shown = () if view.withdrawn else view.logprobs
    choice = {
        "index": 0,
        "message": message,
        "logprobs": chat_logprobs(shown),
        "finish_reason": finish_reason(reason),
    }
    made = chat_base(view.accepted, "chat.completion")
    made["choices"] = [choice]
    made["usage"] = chat_usage(view.usage or Usage(input_tokens=view.accepted.input_tokens, output_tokens=0))
    made["metadata"] = metadata_of(view.accepted.echo, view.accepted.model)
    if token_ids:
        made["chorus"] = {"token_ids": unpack_ids(view.ids), "end_reason": reason.value, "checked": view.checked}
    return made


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json | None:
    return {"content": logprob_list(logprobs), "refusal": None} if logprobs else None


def chat_usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def failure_of(view: ReplyView) -> Json | None:
    """The error of a reply that ended in one, for doors that have no response object to put it in."""
    reason = view.reason
    if reason not in _FAILED_TEXT:
        return None
    code = "reply_failed" if reason is EndReason.FAILED else "reply_expired"
    return error_object(view.detail or _FAILED_TEXT[reason], "server_error", None, code)


# --- models and errors -----------------------------------------------------------------------------------


def model_object(card: ModelCard) -> Json:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_s,
        "owned_by": card.owned_by,
        "context_tokens": card.context_tokens,
        "output_tokens_max": card.output_tokens_max,
        "role": card.role,
        "note": card.note,
    }


def model_list(cards: Sequence[ModelCard]) -> Json:
    return {"object": "list", "data": [model_object(card) for card in cards]}


def error_object(message: str, kind: str, param: str | None, code: str | None) -> Json:
    """OpenAI's error: all four keys, always."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def with_metadata(response: Json, more: Mapping[str, str]) -> Json:
    """A copy of a response object that says something more to whoever waits."""
    return {**response, "metadata": {**response["metadata"], **more}}
