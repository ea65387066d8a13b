"""Sampled ids to the text each of them releases.

    token bytes ──> UTF-8 ──> stop strings ──> text released by this token
                    │         └ holds back what could begin a stop string
                    └ holds back half characters

Text held back belongs to the token that releases it, so that the texts of a reply's tokens, joined, are its text, and
replaying the ids of a log brings a `ReplyText` to where the lost replica's stood. Nothing here depends on how the
characters were cut into tokens.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Vocabulary:
    """What the engine must know of the tokenizer: each token's bytes (special tokens: none) and which end a reply."""

    token_bytes: Sequence[bytes]
    stop_ids: frozenset[int]

    @cached_property
    def texts(self) -> list[str | None]:
        """Per token its text, where its bytes are whole characters; so that most tokens need no decoding."""
        return [_whole(data) for data in self.token_bytes]

    def __len__(self) -> int:
        return len(self.token_bytes)


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Released(NamedTuple):
    text: str
    stopped: bool  # a stop string is complete; it and all after it are not shown


class StopMatcher:
    """One stop string, followed character by character (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self.matched = 0  # characters of the stop string that the text now ends with
        self._stop = stop
        self._fallback = _fallbacks(stop)

    def push(self, character: str) -> bool:
        """True when the stop string is complete."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self._stop)


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is again a prefix."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        if stop[at] == stop[length]:
            length += 1
        table[at] = length
    return table


class ReplyText:
    """The text of one reply as it grows. After `stopped` or `flush` nothing may be pushed."""

    __slots__ = ("_held", "_matchers", "_partial", "clear")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._partial = b""  # the beginning of a character
        self._matchers = [StopMatcher(stop) for stop in stops if stop]
        self.clear = not self._matchers  # nothing is held, and nothing can be but half characters
        self._held = ""  # decoded, and possibly the beginning of a stop string

    def push(self, data: bytes) -> Released:
        """The text that the next token's bytes release."""
        text = self._decode(data, final=False)
        return self._match(text) if self._matchers else Released(text, stopped=False)

    def _decode(self, data: bytes, *, final: bool) -> str:
        if self._partial:
            data = self._partial + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        self.clear = not self._matchers and not self._partial
        return text

    def flush(self) -> str:
        """What is still held, when the reply ends without a stop string; half a character shows as U+FFFD."""
        tail = self._match(self._decode(b"", final=True))
        return tail.text if tail.stopped else tail.text + self._held

    def _match(self, text: str) -> Released:
        window = self._held + text
        seen = len(self._held)
        for character in text:
            seen += 1
            complete = [matcher.matched for matcher in self._matchers if matcher.push(character)]
            if complete:
                self._held = ""
                return Released(window[: seen - max(complete)], stopped=True)
        keep = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = window[len(window) - keep :]
        return Released(window[: len(window) - keep], stopped=False)
