"""JSON from outside -> `SendMessage`. Everything is checked here, once; nobody behind the gateway checks again. Pure.

Unknown fields are ignored, as clients of many versions send them; known ones that would change the answer and that
we cannot honour (tools, images, log probabilities, n > 1) are refused by name, never silently dropped.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.http import bad_request, not_found
from shared.catalog import Catalog
from shared.errors import RefusedError
from shared.ids import reply_place
from shared.limits import (
    INPUT_BYTES_MAX,
    INPUT_CHARS_MAX,
    INPUT_ITEMS_MAX,
    JSON_DEPTH_MAX,
    LOGIT_BIAS_MAX,
    METADATA_KEY_CHARS_MAX,
    METADATA_KEYS_MAX,
    METADATA_VALUE_CHARS_MAX,
    STOP_CHARS_MAX,
    STOP_SEQUENCES_MAX,
)
from shared.messages import InputItem, Principal, RequestEcho, Sampling, SendMessage
from shared.outcomes import Refusal, RefusalKind
from shared.tiers import SERVICE_TIERS

TOKEN_IDS = "chorus.token_ids"  # noqa: S105 - an `include` value, no secret

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")
_SEED_BITS = (1 << 63) - 1

# --- what clients may say --------------------------------------------------------------------------------

_Name = Annotated[str, Meta(max_length=256)]
_Text = Annotated[str, Meta(max_length=INPUT_CHARS_MAX)]
_Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
_Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=METADATA_KEY_CHARS_MAX)],
        Annotated[str, Meta(max_length=METADATA_VALUE_CHARS_MAX)],
    ],
    Meta(max_length=METADATA_KEYS_MAX),
]
_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Many = Annotated[list[Any], Meta(max_length=INPUT_ITEMS_MAX)]


class _Part(msgspec.Struct):
    type: str
    text: _Text | None = None
    refusal: _Text | None = None


class _Item(msgspec.Struct):
    """An input item of the Responses API, or a message of a chat."""

    role: str | None = None
    content: _Text | Annotated[list[_Part], Meta(max_length=INPUT_ITEMS_MAX)] | None = None
    type: str = "message"
    tool_calls: _Many | None = None
    function_call: Any = None
    audio: Any = None


_Items = Annotated[list[_Item], Meta(min_length=1, max_length=INPUT_ITEMS_MAX)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both doors know. `None` is what a client sends for "your default"."""

    model: _Name | None = None
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
    metadata: _Metadata | None = None
    service_tier: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    store: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    include: Annotated[list[_Name], Meta(max_length=32)] | None = None
    tools: _Many | None = None
    tool_choice: Any = None
    top_logprobs: int | None = None


class _TextFormat(msgspec.Struct):
    type: str = "text"


class _TextConfig(msgspec.Struct):
    format: _TextFormat | None = None


class _ConversationRef(msgspec.Struct):
    id: _Name


class _ResponsesBody(_Body, kw_only=True):
    input: _Text | _Items
    instructions: _Text | None = None
    max_output_tokens: _Count | None = None
    previous_response_id: _Name | None = None
    conversation: _Name | _ConversationRef | None = None
    background: bool | None = None
    truncation: str | None = None
    text: _TextConfig | None = None
    prompt: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: _Items
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    n: int | None = None
    functions: _Many | None = None
    function_call: Any = None
    response_format: _TextFormat | None = None
    logprobs: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None


_responses_decoder = msgspec.json.Decoder(_ResponsesBody)
_chat_decoder = msgspec.json.Decoder(_ChatBody)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what goes to conversation, and how the client wants to hear of it."""

    model: str
    items: tuple[InputItem, ...]
    sampling: Sampling
    echo: RequestEcho
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
        )


# --- the doors -------------------------------------------------------------------------------------------


def parse_response(data: bytes, catalog: Catalog) -> Asked:
    """The body of `POST /v1/responses`; raises RefusedError naming the field."""
    body = _decode(_responses_decoder, data)
    _refuse_unsupported(body)
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
        items: tuple[InputItem, ...] = (InputItem(role="user", text=_clean(body.input, "input")),)
    else:
        items = tuple(_input_item(item, f"input[{at}]") for at, item in enumerate(body.input))
    conversation = body.conversation
    echo = _echo(
        body,
        catalog,
        door="responses",
        instructions=None if body.instructions is None else _clean(body.instructions, "instructions"),
        previous_response_id=body.previous_response_id,
        conversation_id=conversation.id if isinstance(conversation, _ConversationRef) else conversation,
        max_output_tokens=body.max_output_tokens,
        background=bool(body.background),
        store=body.store is not False,
    )
    return _asked(body, items, echo, "input")


def parse_chat(data: bytes, catalog: Catalog) -> Asked:
    """The body of `POST /v1/chat/completions`; raises RefusedError naming the field."""
    body = _decode(_chat_decoder, data)
    _refuse_unsupported(body)
    if body.response_format is not None:
        _refuse_format(body.response_format, "response_format")
    if body.n not in (None, 1):
        raise bad_request("n must be 1: one choice per request.", "n")
    if body.logprobs:
        raise bad_request("Log probabilities are not supported.", "logprobs")
    for given, param in ((body.functions, "functions"), (body.function_call, "function_call"), (body.audio, "audio")):
        if given:
            raise bad_request(f"{param} is not supported.", param)
    if body.modalities is not None and body.modalities != ["text"]:
        raise bad_request("Only text is produced: modalities must be ['text'].", "modalities")
    items = tuple(_input_item(item, f"messages[{at}]") for at, item in enumerate(body.messages))
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    echo = _echo(body, catalog, door="chat", max_output_tokens=limit, store=bool(body.store))
    return _asked(body, items, echo, "messages")


def _refuse_unsupported(body: _Body) -> None:
    if body.tools:
        raise bad_request("Tools are not supported.", "tools")
    if body.tool_choice not in (None, "auto", "none"):
        raise bad_request("Tools are not supported: tool_choice may be 'auto' or 'none'.", "tool_choice")
    if body.top_logprobs:
        raise bad_request("Log probabilities are not supported.", "top_logprobs")
    if body.include is not None and "message.output_text.logprobs" in body.include:
        raise bad_request("Log probabilities are not supported.", "include")
    if body.service_tier is not None and body.service_tier not in SERVICE_TIERS:
        raise bad_request(f"service_tier must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")


def _refuse_format(wanted: _TextFormat, param: str) -> None:
    if wanted.type != "text":
        raise bad_request(f"Only plain text is produced: {param}.type must be 'text'.", f"{param}.type")


def _echo(body: _Body, catalog: Catalog, **fields: Any) -> RequestEcho:
    model = body.model or catalog.default.id
    for key, value in (body.metadata or {}).items():
        _clean(key + value, "metadata")
    return RequestEcho(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        metadata=dict(sorted((body.metadata or {}).items())),
        service_tier=body.service_tier or "auto",
        requested_model=model,
        **fields,
    )


def _asked(body: _Body, items: tuple[InputItem, ...], echo: RequestEcho, param: str) -> Asked:
    _bound_input(items, echo, param)
    if all(not item.text for item in items):
        raise bad_request(f"{param} must hold some text.", param)
    sampling = _sampling(body)
    canonical = msgspec.msgpack.encode([echo.requested_model, items, sampling, echo])  # its maps are sorted
    return Asked(
        model=echo.requested_model,
        items=items,
        sampling=sampling,
        echo=echo,
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


def _sampling(body: _Body) -> Sampling:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    for text in stop:
        _clean(text, "stop")
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
    return Sampling(stop=stop, logit_bias=_logit_bias(body.logit_bias or {}), **given)


def _logit_bias(said: dict[str, float]) -> dict[int, float]:
    for token in said:
        if re.fullmatch(r"[0-9]{1,9}", token) is None:
            raise bad_request(f"logit_bias names {token[:32]!r}, which is no token id.", "logit_bias")
    return {int(token): said[token] for token in sorted(said, key=int)}


def _input_item(item: _Item, param: str) -> InputItem:
    if item.type != "message":
        raise bad_request(f"Items of type {item.type[:64]!r} are not supported, only messages.", f"{param}.type")
    if item.role not in _ROLES:
        raise bad_request(f"role must be one of {', '.join(_ROLES)}.", f"{param}.role")
    for given, name in (
        (item.tool_calls, "tool_calls"),
        (item.function_call, "function_call"),
        (item.audio, "audio"),
    ):
        if given:
            raise bad_request(f"{name} is not supported.", f"{param}.{name}")
    if item.content is None:
        raise bad_request("content must be a text or a list of text parts.", f"{param}.content")
    if isinstance(item.content, str):
        return InputItem(role=item.role, text=_clean(item.content, f"{param}.content"))
    parts = (_part_text(part, f"{param}.content[{at}]") for at, part in enumerate(item.content))
    return InputItem(role=item.role, text="".join(parts))


def _part_text(part: _Part, param: str) -> str:
    if part.type in _TEXT_PARTS and part.text is not None:
        return _clean(part.text, f"{param}.text")
    if part.type == "refusal" and part.refusal is not None:
        return _clean(part.refusal, f"{param}.refusal")
    if part.type in (*_TEXT_PARTS, "refusal"):
        raise bad_request("A text part must hold its text.", param)
    raise bad_request(f"Content of type {part.type[:64]!r} is not supported, only text.", f"{param}.type")


def _clean(text: str, param: str) -> str:
    """Text as it can be stored: PostgreSQL holds no NUL character."""
    if "\0" in text:
        raise bad_request("Text must not contain the NUL character.", param)
    return text


def _bound_input(items: Sequence[InputItem], echo: RequestEcho, param: str) -> None:
    texts = [item.text for item in items] + [echo.instructions or ""]
    chars = sum(len(text) for text in texts)
    if chars > INPUT_CHARS_MAX:
        raise bad_request(f"The input has {chars} characters; at most {INPUT_CHARS_MAX} are taken.", param)
    size = sum(len(text.encode()) for text in texts)
    if size > INPUT_BYTES_MAX:
        raise bad_request(f"The input has {size} bytes; at most {INPUT_BYTES_MAX} are taken.", param)


# --- decoding --------------------------------------------------------------------------------------------

_B = TypeVar("_B")
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
# Possessive, so that an unclosed string costs one pass.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def _decode(decoder: msgspec.json.Decoder[_B], data: bytes) -> _B:
    _bound_depth(data)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None


def _invalid(said: str) -> RefusedError:
    """What the decoder said, with the place as `param`: it stands only in its text, and decides nothing."""
    missing = _MISSING.search(said)
    if missing:
        return bad_request(f"Missing required parameter: '{missing[1]}'.", missing[1])
    at = _AT.search(said)
    message = _AT.sub("", said).replace("`", "'")
    return bad_request(f"Invalid value for '{at[1]}': {message}.", at[1]) if at else bad_request(f"{message}.")


def _bound_depth(data: bytes) -> None:
    """Raises RefusedError for JSON nested deeper than JSON_DEPTH_MAX."""
    if data.count(b"[") + data.count(b"{") > JSON_DEPTH_MAX and depth_of(data) > JSON_DEPTH_MAX:
        raise bad_request(f"The JSON is nested deeper than {JSON_DEPTH_MAX} levels.")


def depth_of(data: bytes) -> int:
    """The deepest nesting of brackets outside strings, in one pass."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        piece = match[0]
        if piece in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif piece in (b"]", b"}"):
            depth -= 1
    return deepest
