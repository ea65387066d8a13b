"""Writes small tokenizer folders as Hugging Face lays them out."""

import json
from pathlib import Path
from typing import Any

from tests.unit.shared.gguf_files import byte_vocabulary

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def byte_level(extra: list[str], merges: list[str]) -> dict[str, Any]:
    """tokenizer.json: byte letters, merged tokens, then three control tokens that only `added_tokens` knows."""
    tokens = byte_vocabulary(extra, merges)["tokenizer.ggml.tokens"][: -len(CONTROL)]
    added = [
        {"id": len(tokens) + at, "content": token, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for at, token in enumerate(CONTROL)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: at for at, token in enumerate(tokens)}, "merges": merges},
    }


def sentence_pieces() -> dict[str, Any]:
    """tokenizer.json of a model with spaces as U+2581 and bytes for what it has no letters for."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello"]
    merges = ["h e", "l l", "he ll", "hell o", "\u2581 hello"]
    made = byte_level([], [])
    made["added_tokens"] = [made["added_tokens"][0] | {"id": at, "content": words[at]} for at in range(3)]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]}
    made |= {"pre_tokenizer": None, "decoder": None}
    made["model"] = {
        "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
        "vocab": {word: at for at, word in enumerate(words)}, "merges": merges,
    }  # fmt: skip
    return made


def write_folder(folder: Path, tokenizer: dict[str, Any], **others: Any) -> Path:
    """`others` are JSON files without their endings; a text becomes the chat template's own file."""
    folder.mkdir(exist_ok=True)
    files: dict[str, Any] = {
        "config": {"eos_token_id": len(tokenizer["model"]["vocab"]) + 2, "vocab_size": 300},
        "tokenizer_config": {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}},
        **others,
        "tokenizer": tokenizer,
    }
    for name, content in files.items():
        path = folder / ("chat_template.jinja" if isinstance(content, str) else f"{name}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
