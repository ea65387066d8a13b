"""JSON from outside -> `SendMessage`. Everything is checked here, once; nobody behind the gateway checks again. Pure.

Unknown fields are ignored, as clients of many versions send them; known ones that would change the answer and that
we cannot honour (tools, images, n > 1) are refused by name, never silently dropped.
"""

import hashlib
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.bodies import Items, Many, Metadata, Name, Text, bound_texts, clean, decode, item_of
from services.gateway.http import bad_request, no_branch, no_conversation, not_found
from shared.catalog import Catalog
from shared.errors import RefusedError
from shared.ids import is_conversation_id, reply_place
from shared.limits import (
    LOGIT_BIAS_MAX,
    STOP_CHARS_MAX,
    STOP_SEQUENCES_MAX,
    TOP_LOGPROBS_MAX,
)
from shared.messages import ROOT, InputItem, Principal, RequestEcho, Sampling, SendMessage
from shared.outcomes import Refusal, RefusalKind
from shared.tiers import SERVICE_TIERS

TOKEN_IDS = "chorus.token_ids"  # noqa: S105 - an `include` value, no secret
LOGPROBS = "message.output_text.logprobs"  # another one

_SEED_BITS = (1 << 63) - 1

# --- what clients may say --------------------------------------------------------------------------------

_Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both doors know. `None` is what a client sends for "your default"."""

    model: Name | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=LOGIT_BIAS_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=_SEED_BITS)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=STOP_SEQUENCES_MAX)] | None = None
    ignore_eos: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    store: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    include: Annotated[list[Name], Meta(max_length=32)] | None = None
    n: int | None = None
    tools: Many | None = None
    tool_choice: Any = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None


class _TextFormat(msgspec.Struct):
    type: str = "text"


class _TextConfig(msgspec.Struct):
    format: _TextFormat | None = None


class _ConversationRef(msgspec.Struct):
    id: Name


class _ResponsesBody(_Body, kw_only=True):
    input: Text | Items
    instructions: Text | None = None
    max_output_tokens: _Count | None = None
    previous_response_id: Name | None = None
    conversation: Name | _ConversationRef | None = None
    branch_from: Name | None = None
    background: bool | None = None
    truncation: str | None = None
    text: _TextConfig | None = None
    prompt: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None
    logprobs: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: Items
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    functions: Many | None = None
    function_call: Any = None
    response_format: _TextFormat | None = None
    logprobs: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None


_responses_decoder = msgspec.json.Decoder(_ResponsesBody)
_chat_decoder = msgspec.json.Decoder(_ChatBody)

# The whole range, as a decoder names only the end that was passed.
_MUST_BE = {
    "temperature": "a number from 0 to 2",
    "top_p": "a number above 0, at most 1",
    "top_k": "an integer from 0 (off) to 1000000",
    "min_p": "a number from 0 to 1",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "repetition_penalty": "a number above 0, at most 10",
    "logit_bias": f"at most {LOGIT_BIAS_MAX} token ids, each with a number from -100 to 100",
    "seed": f"an integer from {-(1 << 63)} to {_SEED_BITS}",
    "stop": f"a string of 1 to {STOP_CHARS_MAX} characters, or at most {STOP_SEQUENCES_MAX} of them",
    "top_logprobs": f"an integer from 0 to {TOP_LOGPROBS_MAX}",
    "ignore_eos": "true or false",
    "logprobs": "true or false",
    "n": "1: one choice per request",
    "max_tokens": f"an integer from 1 to {1 << 31}",
    "max_completion_tokens": f"an integer from 1 to {1 << 31}",
    "max_output_tokens": f"an integer from 1 to {1 << 31}",
}


# What chat completions call otherwise: to ignore it would be to give another answer than was asked for.
_OF_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs, or include: ['message.output_text.logprobs']",
}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what goes to conversation, and how the client wants to hear of it."""

    model: str
    items: tuple[InputItem, ...]
    sampling: Sampling
    echo: RequestEcho
    branch_from: str | None = None
    body_hash: bytes  # SHA-256 of all of the above, in one canonical form
    stream: bool
    include_usage: bool
    token_ids: bool

    def message(self, principal: Principal, request_id: str, key: str) -> SendMessage:
        return SendMessage(
            principal=principal,
            request_id=request_id,
            model=self.model,
            items=self.items,
            sampling=self.sampling,
            echo=self.echo,
            idempotency_key=key,
            body_hash=self.body_hash,
            branch_from=self.branch_from,
        )


# --- the doors -------------------------------------------------------------------------------------------


def parse_response(data: bytes, catalog: Catalog) -> Asked:
    """The body of `POST /v1/responses`; raises RefusedError naming the field."""
    body = _decode(_responses_decoder, data)
    _refuse_unsupported(body)
    for name, ours in _OF_CHAT.items():
        if getattr(body, name) not in (None, False):
            raise bad_request(f"{name} is a parameter of chat completions; here it is {ours}.", name)
    if body.text is not None and body.text.format is not None:
        _refuse_format(body.text.format, "text.format")
    if body.prompt is not None:
        raise bad_request("Prompt templates are not supported.", "prompt")
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_request("truncation must be 'auto' or 'disabled'.", "truncation")
    if body.background and body.store is False:
        raise bad_request("A background response must be stored.", "store")
    if body.previous_response_id is not None and body.conversation is not None:
        raise bad_request("Give previous_response_id or conversation, not both.", "conversation")
    if body.previous_response_id is not None and reply_place(body.previous_response_id) is None:
        raise not_found(f"No response with id {body.previous_response_id!r}.", "previous_response_id")
    if isinstance(body.input, str):
        items: tuple[InputItem, ...] = (InputItem(role="user", text=clean(body.input, "input")),)
    else:
        items = tuple(item_of(item, f"input[{at}]") for at, item in enumerate(body.input))
    conversation = body.conversation.id if isinstance(body.conversation, _ConversationRef) else body.conversation
    _check_place(conversation, body.branch_from)
    echo = _echo(
        body,
        catalog,
        door="responses",
        instructions=None if body.instructions is None else clean(body.instructions, "instructions"),
        previous_response_id=body.previous_response_id,
        conversation_id=conversation,
        most=body.max_output_tokens,
        background=bool(body.background),
        store=body.store is not False,
    )
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return _asked(body, items, echo, "input", logprobs=logprobs, branch_from=body.branch_from)


def parse_chat(data: bytes, catalog: Catalog) -> Asked:
    """The body of `POST /v1/chat/completions`; raises RefusedError naming the field."""
    body = _decode(_chat_decoder, data)
    _refuse_unsupported(body)
    if body.response_format is not None:
        _refuse_format(body.response_format, "response_format")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    for given, param in ((body.functions, "functions"), (body.function_call, "function_call"), (body.audio, "audio")):
        if given:
            raise bad_request(f"{param} is not supported.", param)
    if body.modalities is not None and body.modalities != ["text"]:
        raise bad_request("Only text is produced: modalities must be ['text'].", "modalities")
    items = tuple(item_of(item, f"messages[{at}]") for at, item in enumerate(body.messages))
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    echo = _echo(body, catalog, door="chat", most=limit, store=bool(body.store))
    return _asked(body, items, echo, "messages", logprobs=bool(body.logprobs))


_B = TypeVar("_B", bound=_Body)


def _decode(decoder: msgspec.json.Decoder[_B], data: bytes) -> _B:
    """As `bodies.decode`, and what is out of its range is told the whole range."""
    try:
        return decode(decoder, data)
    except RefusedError as error:
        param = error.refusal.param or ""
        name = param.partition("[")[0]
        if name not in _MUST_BE:
            raise
        raise bad_request(f"{name} must be {_MUST_BE[name]}.", param) from None


def _refuse_unsupported(body: _Body) -> None:
    if body.n not in (None, 1):
        raise bad_request(f"n must be {_MUST_BE['n']}.", "n")
    if body.tools:
        raise bad_request("Tools are not supported.", "tools")
    if body.tool_choice not in (None, "auto", "none"):
        raise bad_request("Tools are not supported: tool_choice may be 'auto' or 'none'.", "tool_choice")
    if body.service_tier is not None and body.service_tier not in SERVICE_TIERS:
        raise bad_request(f"service_tier must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")


def _refuse_format(wanted: _TextFormat, param: str) -> None:
    if wanted.type != "text":
        raise bad_request(f"Only plain text is produced: {param}.type must be 'text'.", f"{param}.type")


def _echo(body: _Body, catalog: Catalog, *, most: int | None, **fields: Any) -> RequestEcho:
    """`most` output tokens, as far as the model writes as many: the echo says what holds."""
    model = body.model or catalog.default.id
    card = catalog.get(model)
    if most is not None and card is not None:
        most = min(most, card.output_tokens_max)
    for key, value in (body.metadata or {}).items():
        clean(key + value, "metadata")
    return RequestEcho(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        metadata=dict(sorted((body.metadata or {}).items())),
        service_tier=body.service_tier or "auto",
        top_logprobs=body.top_logprobs or 0,
        requested_model=model,
        max_output_tokens=most,
        **fields,
    )


def _check_place(conversation: str | None, branch_from: str | None) -> None:
    """Raises RefusedError for a place in a conversation that cannot be one."""
    if conversation is not None and not is_conversation_id(conversation):
        raise no_conversation(conversation, "conversation")
    if branch_from is None:
        return
    if conversation is None:
        raise bad_request("branch_from needs a conversation.", "branch_from")
    if branch_from != ROOT and reply_place(branch_from) is None:
        raise no_branch(branch_from, "branch_from")


def _asked(
    body: _Body,
    items: tuple[InputItem, ...],
    echo: RequestEcho,
    param: str,
    *,
    logprobs: bool,
    branch_from: str | None = None,
) -> Asked:
    bound_texts([item.text for item in items] + [echo.instructions or ""], param)
    if all(not item.text for item in items):
        raise bad_request(f"{param} must hold some text.", param)
    sampling = _sampling(body, logprobs=logprobs)
    said = [echo.requested_model, items, sampling, echo]  # its maps are sorted
    canonical = msgspec.msgpack.encode(said if branch_from is None else [*said, branch_from])
    return Asked(
        model=echo.requested_model,
        items=items,
        sampling=sampling,
        echo=echo,
        branch_from=branch_from,
        body_hash=hashlib.sha256(canonical).digest(),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        token_ids=TOKEN_IDS in (body.include or ()),
    )


def check_model(model: str, catalog: Catalog) -> None:
    """Raises RefusedError for a model that this region does not serve."""
    if catalog.get(model) is None:
        message = f"The model {model!r} does not exist here."
        raise RefusedError(Refusal(kind=RefusalKind.UNKNOWN_MODEL, message=message, param="model"))


# --- pieces ----------------------------------------------------------------------------------------------


def _sampling(body: _Body, *, logprobs: bool) -> Sampling:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    for text in stop:
        clean(text, "stop")
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "ignore_eos",
        )
        if (value := getattr(body, name)) is not None
    }
    if body.seed is not None:
        given["seed"] = body.seed & _SEED_BITS
    if logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return Sampling(stop=stop, logit_bias=_logit_bias(body.logit_bias or {}), **given)


def _logit_bias(said: dict[str, float]) -> dict[int, float]:
    for token in said:
        if re.fullmatch(r"[0-9]{1,9}", token) is None:
            raise bad_request(f"logit_bias names {token[:32]!r}, which is no token id.", "logit_bias")
    return {int(token): said[token] for token in sorted(said, key=int)}
