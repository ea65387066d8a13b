"""What every JSON body has in common: decoded once, bounded, and said no to with the field's name. Pure."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.http import bad_request
from shared.errors import RefusedError
from shared.limits import (
    INPUT_BYTES_MAX,
    INPUT_CHARS_MAX,
    INPUT_ITEMS_MAX,
    JSON_DEPTH_MAX,
    METADATA_KEY_CHARS_MAX,
    METADATA_KEYS_MAX,
    METADATA_VALUE_CHARS_MAX,
)
from shared.messages import InputItem

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")

Text = Annotated[str, Meta(max_length=INPUT_CHARS_MAX)]
Name = Annotated[str, Meta(max_length=256)]
Many = Annotated[list[Any], Meta(max_length=INPUT_ITEMS_MAX)]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=METADATA_KEY_CHARS_MAX)],
        Annotated[str, Meta(max_length=METADATA_VALUE_CHARS_MAX)],
    ],
    Meta(max_length=METADATA_KEYS_MAX),
]


class Part(msgspec.Struct):
    type: str
    text: Text | None = None
    refusal: Text | None = None


class Item(msgspec.Struct):
    """An input item of the Responses API, or a message of a chat."""

    role: str | None = None
    content: Text | Annotated[list[Part], Meta(max_length=INPUT_ITEMS_MAX)] | None = None
    type: str = "message"
    tool_calls: Many | None = None
    function_call: Any = None
    audio: Any = None


Items = Annotated[list[Item], Meta(min_length=1, max_length=INPUT_ITEMS_MAX)]


# --- items ---


def item_of(item: Item, param: str) -> InputItem:
    """A message's text and role; raises RefusedError naming the field."""
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
        return InputItem(role=item.role, text=clean(item.content, f"{param}.content"))
    parts = (_part_text(part, f"{param}.content[{at}]") for at, part in enumerate(item.content))
    return InputItem(role=item.role, text="".join(parts))


def _part_text(part: Part, param: str) -> str:
    if part.type in _TEXT_PARTS and part.text is not None:
        return clean(part.text, f"{param}.text")
    if part.type == "refusal" and part.refusal is not None:
        return clean(part.refusal, f"{param}.refusal")
    if part.type in (*_TEXT_PARTS, "refusal"):
        raise bad_request("A text part must hold its text.", param)
    raise bad_request(f"Content of type {part.type[:64]!r} is not supported, only text.", f"{param}.type")


def clean(text: str, param: str) -> str:
    """Text as it can be stored: PostgreSQL holds no NUL character."""
    if "\0" in text:
        raise bad_request("Text must not contain the NUL character.", param)
    return text


def bound_texts(texts: Sequence[str], param: str) -> None:
    """Raises RefusedError for more than one request may say."""
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
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`")
# Possessive, so that an unclosed string costs one pass.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def decode(decoder: msgspec.json.Decoder[_B], data: bytes) -> _B:
    if not data.strip():
        raise bad_request("The body is empty: it must be a JSON object.")
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
    unknown = _UNKNOWN.search(said)
    if unknown:
        return bad_request(f"Unknown parameter: '{unknown[1]}'.", unknown[1])
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
