"""What the safety rules say about a text: phrases by category, compared after normalisation. Pure.

A phrase is words, matched whole; a trailing `*` matches any ending of its last word ("detonat*"). Neither case, width,
accents' spelling, kinds of dashes, runs of whitespace nor invisible characters hide one.
"""

import re
import unicodedata
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

from shared.errors import ConfigError
from shared.limits import SAFETY_PHRASE_CHARS_MAX
from shared.messages import Verdict

CLEAN = Verdict(flagged=False)
_SPACES = re.compile(r"\s+")
_DASH = "-"
# Neither letters nor marks of their own: the variation selectors and the grapheme joiner. Format characters (Cf:
# zero-width spaces and joiners, soft hyphens, direction marks) go by their category.
_INVISIBLE_MARKS = frozenset([0x034F, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)])


class Stage(StrEnum):
    INPUT = "input"  # what a person sent
    OUTPUT = "output"  # what the model writes


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Phrases of one category; `name` is journalled, `stages` says where it holds."""

    category: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,40}$")]
    name: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,40}$")]
    phrases: tuple[str, ...]
    stages: tuple[Stage, ...] = (Stage.INPUT, Stage.OUTPUT)


class Passage(NamedTuple):
    """A text to judge. `opens` and `closes`: nothing of the whole stands before it, nothing comes after it.

    A hit at an edge where the whole goes on is not told: its word may be longer than what is seen. Windows overlap, so
    that it stands inside another one.
    """

    text: str
    stage: Stage
    opens: bool = True
    closes: bool = True


EDGE_CHARS = 8  # where a passage does not open the whole, a hit this near its start belongs to the one before


def visible(text: str) -> str:
    """`text` without invisible characters."""
    if text.isascii():
        return text
    return "".join(char for char in text if not _hidden(char))


def _hidden(char: str) -> bool:
    return unicodedata.category(char) == "Cf" or ord(char) in _INVISIBLE_MARKS


def normalise(text: str) -> str:
    """The form in which texts and phrases are compared."""
    folded = visible(text).casefold()
    if not folded.isascii():
        folded = visible(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", folded).casefold()))
        folded = "".join(_DASH if unicodedata.category(char) == "Pd" else char for char in folded)
    return _SPACES.sub(" ", folded)


class Rules:
    """Compiled rules: one expression per rule and stage, tried in the order given."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_stage: dict[Stage, list[tuple[Rule, re.Pattern[str]]]] = {stage: [] for stage in Stage}
        for rule in rules:
            pattern = re.compile("|".join(_expression(rule, phrase) for phrase in rule.phrases))
            for stage in rule.stages:
                self._by_stage[stage].append((rule, pattern))

    def check(self, passage: Passage) -> Verdict:
        """The first rule that a passage breaks, or CLEAN."""
        text = normalise(passage.text)
        first = 0 if passage.opens else EDGE_CHARS
        last = len(text) if passage.closes else len(text) - 1
        for rule, pattern in self._by_stage[passage.stage]:
            for hit in pattern.finditer(text):
                if hit.start() >= first and hit.end() <= last:
                    return Verdict(flagged=True, category=rule.category, rule=rule.name)
        return CLEAN


def _expression(rule: Rule, phrase: str) -> str:
    """A phrase as a regular expression, whole words only; no part of a rule is read as an expression."""
    words = normalise(phrase).strip()
    open_ended = words.endswith("*")
    words = words.removesuffix("*")
    if not words or not 0 < len(phrase) <= SAFETY_PHRASE_CHARS_MAX:
        raise ConfigError(
            f"safety rule {rule.name!r}: a phrase has 1..{SAFETY_PHRASE_CHARS_MAX} characters: {phrase!r}"
        )
    before = r"(?<!\w)" if _is_word(words[0]) else ""
    after = r"(?!\w)" if _is_word(words[-1]) and not open_ended else ""
    return before + re.escape(words) + after


def _is_word(char: str) -> bool:
    return re.match(r"\w", char) is not None


_rules_file = msgspec.json.Decoder(list[Rule])


def parse_rules(data: bytes) -> list[Rule]:
    """A JSON list of rules; raises ConfigError with the first thing that is wrong."""
    try:
        rules = _rules_file.decode(data)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the safety rules are not valid: {error}") from error
    Rules(rules)
    return rules
