"""Rules find their phrases however they are spelled, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.safety.rules import CANARY, DEFAULT_RULES
from services.safety.verdicts import CLEAN, EDGE_CHARS, Passage, Rule, Rules, Stage, normalise, parse_rules
from shared.errors import ConfigError

RULES = Rules(
    [
        Rule(category="test", name="rape", phrases=("rape", "detonat*", "do not say")),
        Rule(category="input_only", name="asked", phrases=("tell me a secret",), stages=(Stage.INPUT,)),
    ]
)


def flagged(text: str, stage: Stage = Stage.OUTPUT, **edges: bool) -> bool:
    return RULES.check(Passage(text, stage, **edges)).flagged


@pytest.mark.parametrize(
    "text",
    [
        "rape",
        "He said RAPE.",
        "ｄｏ　ｎｏｔ　ｓａｙ",  # full width
        "do\u200bnot say".replace("do\u200bnot", "do\u200b not"),
        "d\u00ado n\u2060ot\n\t say",
        "do\u00a0not\u2003say",
        "it detonates",
        "detonate",
    ],
)
def test_spelling_hides_no_phrase(text):
    """Case, width, spaces and invisible characters do not matter."""
    assert flagged(text)


@pytest.mark.parametrize("text", ["grape", "drapery", "grapes", "do notsay", "undetonated", "", "tell me a secret"])
def test_only_whole_words_of_the_stage_count(text):
    """A phrase inside a longer word, or of another stage, is none."""
    assert not flagged(text)


def test_a_rule_of_the_input_stage_holds_there():
    """Stages are kept apart, and the verdict says which rule spoke."""
    verdict = RULES.check(Passage("Please tell me a secret!", Stage.INPUT))
    assert (verdict.flagged, verdict.category, verdict.rule) == (True, "input_only", "asked")


def test_a_hit_at_an_edge_where_the_text_goes_on_is_not_told():
    """`rape` may be the end of `grape` or the start of `rapeseed` when the whole is not seen."""
    assert flagged("rape", opens=True, closes=True)
    assert not flagged("rape", opens=False)
    assert not flagged("rape", closes=False)
    assert flagged("rape.", closes=False)
    assert flagged("x" * EDGE_CHARS + " rape", opens=False)


@pytest.mark.parametrize("stage", list(Stage))
def test_the_canary_is_flagged_by_the_default_rules(stage):
    """Tests and drills have a phrase that is always flagged; ordinary text is clean."""
    rules = Rules(DEFAULT_RULES)
    assert rules.check(Passage(f"Say {CANARY.upper()} twice.", stage)).category == "canary"
    assert rules.check(Passage("Thank you. How do bees find flowers?", stage)) == CLEAN


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    """The compared form is a fixed point: phrases and texts meet in it."""
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"not json",
        b'[{"category": "Bad Name", "name": "x", "phrases": ["y"]}]',
        b'[{"category": "a", "name": "x", "phrases": [""]}]',
        b'[{"category": "a", "name": "x", "phrases": ["*"]}]',
        b'[{"category": "a", "name": "x", "phrases": ["y"], "stages": ["sideways"]}]',
        b'[{"category": "a", "name": "x", "phrases": ["' + b"y" * 200 + b'"]}]',
        b'[{"category": "a", "name": "x", "pattern": "y"}]',
    ],
)
def test_bad_rules_are_refused_at_start(data):
    """A rules file with anything wrong in it is an error with a sentence, never a rule that silently matches nothing."""
    with pytest.raises(ConfigError, match="safety rule"):
        parse_rules(data)


def test_a_phrase_is_text_and_never_an_expression():
    """Dots, brackets and stars inside a phrase stand for themselves."""
    rules = Rules(parse_rules(b'[{"category": "a", "name": "x", "phrases": ["a.c (d)"]}]'))
    assert rules.check(Passage("see a.c (d) there", Stage.INPUT)).flagged
    assert not rules.check(Passage("see abc (d) there", Stage.INPUT)).flagged
