"""Windows miss nothing and add nothing: judged in pieces, a text gets the verdict it gets whole."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.safety.verdicts import Passage, Rule, Rules, Stage
from services.safety.windows import Windows
from shared.limits import SAFETY_OVERLAP_CHARS, SAFETY_PHRASE_CHARS_MAX, SAFETY_WINDOW_CHARS

LONG = ("a forbidden phrase of the greatest length there may be " * 2)[:SAFETY_PHRASE_CHARS_MAX].strip()
RULES = Rules([Rule(category="test", name="test", phrases=("rape", "flag me", LONG))])


SMALL = {"window_chars": 10, "overlap_chars": 32}  # so that a short text has many edges


def verdict_in_windows(pieces: list[str], **sizes: int) -> bool:
    windows = Windows(**sizes)
    passages = [passage for piece in pieces if (passage := windows.feed(piece)) is not None]
    return any(RULES.check(passage).flagged for passage in [*passages, windows.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


FILLER = st.text(st.sampled_from(" ab.\n\u200b\u0301\u00e9\u1100\u1161\ufb01-\u00a0"), max_size=12)
WORDS = st.sampled_from(
    ["rape", "flag me", "flag\u200b \u00adme", "grape", "rapes", "flagme", "flag", "me", " ", "word"]
)


@settings(max_examples=1500)
@given(parts=st.lists(st.one_of(FILLER, WORDS), max_size=24), places=st.lists(st.integers(0, 400), max_size=40))
@example(parts=["word grape " + "a" * 27], places=[])  # the overlap begins inside "grape"
def test_a_text_in_windows_gets_the_verdict_of_the_whole(parts, places):
    """Wherever chunks and windows cut, a phrase is caught, and half a word is not taken for one."""
    text = "".join(parts)
    whole = RULES.check(Passage(text, Stage.OUTPUT)).flagged
    assert verdict_in_windows(cut(text, places), **SMALL) == whole


@given(at=st.integers(0, 3 * SAFETY_WINDOW_CHARS), phrase=st.sampled_from(["flag me", LONG]), step=st.integers(1, 50))
def test_a_phrase_is_caught_wherever_it_stands(at, phrase, step):
    """A phrase anywhere in a long text of chunks of any size is caught, also with padding inside it."""
    text = ("word " * 300)[:at].rpartition(" ")[0] + " " + phrase.replace(" ", " \u200b" * 40 + " ") + " tail " * 100
    assert verdict_in_windows([text[i : i + step] for i in range(0, len(text), step)])


def test_a_window_is_cut_at_a_sentence_or_when_it_is_long_enough():
    """Nothing is judged token by token: a sentence's end or enough text makes a window."""
    windows = Windows()
    assert windows.feed("No end yet") is None
    passage = windows.feed(". And")
    assert passage is not None
    assert passage.text == "No end yet. And"
    assert windows.feed("x" * (SAFETY_WINDOW_CHARS - 1)) is None
    assert windows.feed("x") is not None


def test_windows_stay_small_however_long_the_reply():
    """A window holds its own text and the overlap, so judging a reply costs in proportion to its length."""
    windows = Windows()
    sizes = [len(passage.text) for _ in range(5000) if (passage := windows.feed("word ")) is not None]
    assert len(sizes) > 50
    assert max(sizes) <= SAFETY_WINDOW_CHARS + SAFETY_OVERLAP_CHARS + len("word ")
