"""The port to whatever judges a text, and its first adapter: the rules.

A learned classifier takes its place behind the same port. It may take long and fail; the caller sets the deadline and
says "unchecked" when it passes.
"""

from pathlib import Path
from typing import Protocol

from services.safety.rules import DEFAULT_RULES
from services.safety.verdicts import Passage, Rules, parse_rules
from shared.errors import ConfigError
from shared.messages import Verdict


class Classifier(Protocol):
    async def judge(self, passage: Passage) -> Verdict: ...


class RuleClassifier:
    """Phrases by category: tens of microseconds a passage, so it answers in place."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    async def judge(self, passage: Passage) -> Verdict:
        return self._rules.check(passage)


def rule_classifier(file: Path | None) -> RuleClassifier:
    """The built-in rules, or those of `file`; raises ConfigError when it cannot be read or is not valid."""
    if file is None:
        return RuleClassifier(Rules(DEFAULT_RULES))
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the safety rules {file}: {error.strerror}") from error
    return RuleClassifier(Rules(parse_rules(data)))
