"""The tokenizer of a Hugging Face folder: tokenizer.json through the `tokenizers` library, its template beside it.

Two builds of the same file, as everywhere here: one that knows no control tokens, for people's text, and one that does,
for templates. What the file wants to add around a text (a first token, say) is left to the template.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from shared.bytes_of_tokens import byte_level_bytes
from shared.errors import ModelFileError
from shared.hf_files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    parse_json,
    read_bytes,
    read_json,
)
from shared.library_tokenizer import LibraryTokenizer
from shared.limits import VOCABULARY_MAX


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    type: str = ""
    byte_fallback: bool = False


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


class _Ends(msgspec.Struct):
    """Of config.json or generation_config.json."""

    eos_token_id: int | list[int] | None = None
    vocab_size: int = 0


class _Named(msgspec.Struct):
    name: str
    template: str


class _Token(msgspec.Struct):
    content: str


class _Settings(msgspec.Struct):
    """Of tokenizer_config.json."""

    chat_template: str | list[_Named] | None = None
    eos_token: str | _Token | None = None


class HfTokenizer(LibraryTokenizer):
    """BPE with byte-level letters or with SentencePiece's spaces and byte tokens; `Tokenizer` of shared.tokenizer."""

    def __init__(self, folder: Path, end_names: frozenset[str]) -> None:
        """`end_names`: control tokens that end a reply whatever the folder says. Raises ModelFileError."""
        data = read_bytes(folder / TOKENIZER)
        file = parse_json(data, _File, folder / TOKENIZER)
        if file.model.type not in ("", "BPE"):
            raise ModelFileError(f"{folder / TOKENIZER}: its model is {file.model.type!r}, and only BPE is read.")
        settings = _optional(folder / TOKENIZER_CONFIG, _Settings)
        config, generation = _optional(folder / CONFIG, _Ends), _optional(folder / GENERATION_CONFIG, _Ends)
        self.name = folder.resolve().name
        self.special_ids = {token.content: token.id for token in file.added_tokens if token.special}
        self.token_bytes = _token_bytes(file, config.vocab_size, folder)
        ends = {*_listed(config.eos_token_id), *_listed(generation.eos_token_id)}
        named = end_names | {settings.eos_token if isinstance(settings.eos_token, str) else ""}
        named |= {settings.eos_token.content if isinstance(settings.eos_token, _Token) else ""}
        ends |= {index for token, index in self.special_ids.items() if token in named}
        self.stop_ids = frozenset(ends)
        if not ends or not all(0 <= end < len(self.token_bytes) for end in ends):
            raise ModelFileError(f"{folder}: its end tokens {sorted(ends)} are none, or outside its vocabulary.")
        self.chat_template = _template(folder, settings)
        self.revision = hashlib.blake2b(data + self.chat_template.encode(), digest_size=8).hexdigest()
        self._plain, self._template = (_build(data, folder, control=control) for control in (False, True))


def _optional(path: Path, type_: Any) -> Any:
    return read_json(path, type_) if path.exists() else type_()


def _listed(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def _token_bytes(file: _File, vocab_size: int, folder: Path) -> list[bytes]:
    """Of every id; empty for control tokens, and for ids that the model has and the vocabulary does not name."""
    added = {token.id: token for token in file.added_tokens}
    ids = [*file.model.vocab.values(), *added]
    size = max([vocab_size, *(index + 1 for index in ids)])
    if not ids or min(ids) < 0 or size > VOCABULARY_MAX:
        raise ModelFileError(f"{folder / TOKENIZER}: its ids are none, below 0, or more than {VOCABULARY_MAX}.")
    found = [b""] * size
    for piece, index in file.model.vocab.items():
        found[index] = _piece_bytes(piece) if file.model.byte_fallback else byte_level_bytes(piece)
    for index, token in added.items():
        found[index] = b"" if token.special else token.content.encode()
    return found


def _piece_bytes(token: str) -> bytes:
    """Of a SentencePiece token: U+2581 is a space, and <0x41> the byte itself."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def _template(folder: Path, settings: _Settings) -> str:
    """The file of its own goes before the setting; of several named ones, the default."""
    if (folder / CHAT_TEMPLATE).exists():
        return read_bytes(folder / CHAT_TEMPLATE).decode(errors="replace")
    if isinstance(settings.chat_template, list):
        return next((each.template for each in settings.chat_template if each.name == "default"), "")
    return settings.chat_template or ""


def _build(data: bytes, folder: Path, *, control: bool) -> Any:
    """A `tokenizers.Tokenizer` that adds and cuts nothing; without `control` it knows no control tokens."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - what serves stub models only runs without the library

    parts: dict[str, Any] = msgspec.json.decode(data)
    parts |= {"truncation": None, "padding": None, "post_processor": None}
    if not control:
        parts["added_tokens"] = [token for token in parts.get("added_tokens", []) if not token.get("special")]
    try:
        return Tokenizer.from_str(msgspec.json.encode(parts).decode())
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"{folder / TOKENIZER} cannot be used: {error}. Choose another model.") from error
