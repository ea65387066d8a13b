"""What every tokenizer from a file shares: two builds of one vocabulary by the `tokenizers` library."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.bytes_of_tokens import decode_bytes, printable

# One text at a time: a pool of threads for many would only stand by.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class LibraryTokenizer:
    """`Tokenizer` of shared.tokenizer, once a subclass has read these from its file."""

    name: str
    revision: str
    chat_template: str
    token_bytes: Sequence[bytes]
    special_ids: Mapping[str, int]
    stop_ids: frozenset[int]
    _plain: Any  # a `tokenizers.Tokenizer` that knows no control tokens: for people's text
    _template: Any  # one that does

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        return _encoded(self._plain, text)

    def encode_template(self, text: str) -> list[int]:
        return _encoded(self._template, text)

    def decode(self, ids: Iterable[int]) -> str:
        return decode_bytes(self.token_bytes, ids)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """As a batch of one: only for batches does the library let other threads run meanwhile."""
    (found,) = tokenizer.encode_batch([printable(text)], add_special_tokens=False)
    return list(found.ids)
