"""The JSON files of a model folder as Hugging Face lays it out, read with limits."""

from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import ModelFileError
from shared.limits import MIB, MODEL_JSON_BYTES_MAX

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_T = TypeVar("_T")


def read_bytes(path: Path) -> bytes:
    """Raises ModelFileError when it cannot be read, or is larger than any such file has a reason to be."""
    try:
        if path.stat().st_size > MODEL_JSON_BYTES_MAX:
            raise ModelFileError(f"{path} is larger than {MODEL_JSON_BYTES_MAX // MIB} MiB.")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error}. The folder of a model must hold it.") from error


def parse_json(data: bytes, type_: type[_T], path: Path) -> _T:
    """Raises ModelFileError with what is wrong; `path` is named in it."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path} cannot be used: {error}.") from error


def read_json(path: Path, type_: type[_T]) -> _T:
    return parse_json(read_bytes(path), type_, path)
