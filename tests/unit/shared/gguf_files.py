"""Writes small GGUF files, well-formed unless told otherwise."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIGNMENT = 32
FLOAT32, FLOAT16, Q4_0, Q4_1, Q8_0, BFLOAT16 = 0, 1, 2, 3, 8, 30
TEXT, ARRAY = 8, 9
_NUMBERS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "u64": (10, "Q"),
}


@dataclass(frozen=True)
class Typed:
    """A metadata number with its type in the file."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Tensor:
    """`shape` innermost first, as the file has it."""

    shape: tuple[int, ...]
    type: int
    data: bytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(item, str):
        return struct.pack("<I", TEXT) + text(item)
    if isinstance(item, list):
        inner = [value(element) for element in item] or [struct.pack("<I", TEXT)]
        return struct.pack("<I", ARRAY) + inner[0][:4] + struct.pack("<Q", len(item)) + b"".join(e[4:] for e in inner)
    kind, layout = _NUMBERS[item.kind]
    return struct.pack("<I" + layout, kind, item.value)


def gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        head += text(key) + value(item)
    data = b""
    for name, tensor in tensors.items():
        head += text(name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", tensor.type, len(data))
        data += tensor.data + b"\0" * (-len(tensor.data) % ALIGNMENT)
    return head + b"\0" * (-len(head) % ALIGNMENT) + data


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def byte_vocabulary(extra: list[str], merges: list[str]) -> dict[str, Any]:
    """Metadata of a tokenizer: the 256 byte letters, `extra` merged tokens, then three control tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, next_letter = [], 0x100
    for byte in range(0x100):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_letter))
            next_letter += 1
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*letters, *extra, *control]
    types = [Typed("i32", 1)] * (len(tokens) - len(control)) + [Typed("i32", 3)] * len(control)
    return {
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": Typed("u32", len(tokens) - 1),
        "tokenizer.chat_template": "{{ messages }}",
    }
