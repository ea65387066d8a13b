"""Text to token ids and back: the port, and its adapters.

`GgufTokenizer` builds a byte-level BPE from a model file's own vocabulary and merges; `HfTokenizer`, in a file of its
own, reads a folder's tokenizer.json; `StubTokenizer` needs no file and serves scripted replicas. `load_tokenizer` picks
one. None needs torch or numpy.

A person's text is encoded with `encode`, which knows no control tokens: whatever they type, `<|im_end|>` included,
becomes ordinary text tokens. Only a chat template's own pieces go through `encode_template`. Join ids, never strings.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shared.bytes_of_tokens import byte_level_bytes, decode_bytes
from shared.catalog import STUB_FILE
from shared.errors import ModelFileError
from shared.gguf import GgufFile
from shared.hf_tokenizer import HfTokenizer
from shared.library_tokenizer import LibraryTokenizer

STUB_WORDS = 1024
# Control tokens that end a reply wherever a vocabulary has them, besides the file's own end token.
_END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>"})
# How Llama 3 and Qwen cut text before they merge; they differ in how many digits stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer(Protocol):
    """What services may ask. `token_bytes[i]` is the text of token i as UTF-8 bytes, empty for special tokens."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str:
        """Changes when any id would mean something else, or the template does."""
        ...

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Control tokens by their text."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Control tokens that end a reply."""
        ...

    @property
    def chat_template(self) -> str:
        """Jinja source."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a person's text; never a control token."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Ids of a template's own piece: control tokens written in it become control tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole ids; what is not UTF-8 shows as the replacement character."""
        ...


def load_tokenizer(source: Path | str) -> Tokenizer:
    """The tokenizer of a model file or folder, or the stub's for `stub`; raises ModelFileError when it has none."""
    if str(source) == STUB_FILE:
        return StubTokenizer()
    if Path(source).is_dir():
        return HfTokenizer(Path(source), _END_NAMES)
    with GgufFile(Path(source)) as file:
        return GgufTokenizer(file)


# --- from a model file -----------------------------------------------------------------------------------

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # the file format's token types


class GgufTokenizer(LibraryTokenizer):
    """Byte-level BPE of a GGUF file (`tokenizer.ggml.model` = gpt2) through the `tokenizers` library.

    A byte that the vocabulary has no token for (in SmolLM2 a few ASCII controls) is dropped, as its authors do.
    """

    def __init__(self, file: GgufFile) -> None:
        """Raises ModelFileError when the file's vocabulary is of a kind that is not read."""
        tokens, types, merges = _read_vocabulary(file)
        self.name = file.text("general.name", file.path.stem)
        self.special_ids = {token: index for index, token in enumerate(tokens) if types[index] == _CONTROL}
        end = file.integer("tokenizer.ggml.eos_token_id")
        ends = {index for token, index in self.special_ids.items() if token in _END_NAMES}
        self.stop_ids = frozenset(ends | {end})
        self.chat_template = file.text("tokenizer.chat_template", "")
        self.token_bytes = [_bytes_of(token, kind) for token, kind in zip(tokens, types, strict=True)]
        self.revision = _revision(tokens, types, merges, self.chat_template)
        pre = file.text("tokenizer.ggml.pre", "gpt-2")
        visible = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
        try:
            # A rule that takes whole words from the vocabulary must not find a control token there.
            self._plain = _build(tokens, merges, pre, visible, (), hidden=frozenset(self.special_ids))
            self._template = _build(tokens, merges, pre, visible, tuple(self.special_ids))
        except ValueError as error:
            raise ModelFileError(
                f"{file.path}: its vocabulary cannot be used: {error}. Choose another file."
            ) from error


def _read_vocabulary(file: GgufFile) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """(token texts, token types, merges), checked to fit together."""
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(f"{file.path}: its tokenizer is {kind!r}, and only byte-level BPE (gpt2) is read.")
    tokens, types = file.texts("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelFileError(f"{file.path}: {len(tokens)} tokens, some twice or without one of {len(types)} types.")
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for line in file.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not left or not right or left + right not in known or left not in known or right not in known:
            raise ModelFileError(f"{file.path}: the merge {line!r} does not join two known tokens into a third.")
        merges.append((left, right))
    end = file.integer("tokenizer.ggml.eos_token_id")
    if not 0 <= end < len(tokens):
        raise ModelFileError(f"{file.path}: its end token {end} is outside its {len(tokens)} tokens.")
    return tokens, types, merges


def _build(
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    pre: str,
    visible: Sequence[str],
    control: Sequence[str],
    *,
    hidden: frozenset[str] = frozenset(),
) -> Any:
    """A `tokenizers.Tokenizer`; ValueError when the split rule `pre` is unknown."""
    # Imported here: what serves stub models only runs without the library.
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers  # noqa: PLC0415
    from tokenizers import Tokenizer as Library  # noqa: PLC0415

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def by_pattern(digits: str) -> Any:
        split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    splits = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": by_pattern(r"\p{N}{1,3}"),
        "qwen2": by_pattern(r"\p{N}"),
    }
    if pre not in splits:
        raise ValueError(f"its split rule {pre!r} is not one of {sorted(splits)}")
    whole_words = pre == "llama-bpe"
    vocabulary = {token: at for at, token in enumerate(tokens) if not (whole_words and token in hidden)}
    built = Library(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    built.pre_tokenizer = splits[pre]
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    if visible:
        built.add_tokens([AddedToken(token, normalized=False) for token in visible])
    if control:
        built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return built


def _bytes_of(token: str, kind: int) -> bytes:
    if kind == _NORMAL:
        return byte_level_bytes(token)
    return token.encode() if kind == _USER_DEFINED else b""


def _revision(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]], template: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (tokens, types, merges, template):
        digest.update(repr(part).encode())
    return digest.hexdigest()


# --- the stub --------------------------------------------------------------------------------------------

_STUB_SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
STUB_WORD_FIRST = 256 + len(_STUB_SPECIALS)
_STUB_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


class StubTokenizer:
    """Bytes in, words out: ids 0..255 are bytes, then the control tokens, then 1024 words like " w0017".

    Every word has a text of its own, so that a lost, repeated or swapped token shows in the text.
    """

    name = "stub"
    revision = "stub-1"
    chat_template = _STUB_TEMPLATE

    def __init__(self) -> None:
        self.special_ids: Mapping[str, int] = {token: 256 + place for place, token in enumerate(_STUB_SPECIALS)}
        self.stop_ids = frozenset({self.special_ids["<|im_end|>"], self.special_ids["<|endoftext|>"]})
        self.token_bytes: Sequence[bytes] = [
            *(bytes([byte]) for byte in range(256)),
            *(b"" for _ in _STUB_SPECIALS),
            *(f" w{word:04d}".encode() for word in range(STUB_WORDS)),
        ]
        self._specials = re.compile("(" + "|".join(re.escape(token) for token in _STUB_SPECIALS) + ")")

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def encode_template(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._specials.split(text):
            special = self.special_ids.get(piece)
            ids += self.encode(piece) if special is None else [special]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return decode_bytes(self.token_bytes, ids)
