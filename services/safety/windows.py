"""Output windows: a reply's text, as it is written, in overlapping passages for the classifier. Pure.

    text      ......................................................
    window 1  [..................]        a sentence ended, or SAFETY_WINDOW_CHARS of new text
    window 2              [overlap|..............]
    window 3                          [overlap|.............]   the last one closes the reply

The overlap is longer than any phrase of a rule, so whatever is cut by one window stands whole in another.
"""

import re

from services.safety.verdicts import Passage, Stage, visible
from shared.limits import SAFETY_OVERLAP_CHARS, SAFETY_WINDOW_CHARS

_SENTENCE_END = re.compile("[.!?。!?…\n]")
_SPACES = re.compile(r"\s+")


class Windows:
    """One reply's windows. Feed it the text in order; `finish` once the reply has ended."""

    def __init__(self, window_chars: int = SAFETY_WINDOW_CHARS, overlap_chars: int = SAFETY_OVERLAP_CHARS) -> None:
        self._window_chars, self._overlap_chars = window_chars, overlap_chars
        self._tail = ""  # judged already; context for what comes
        self._new = ""
        self._opens = True

    def feed(self, text: str) -> Passage | None:
        """More of the reply; a passage when there is enough to judge."""
        self._new += _condensed(text, after=self._new or self._tail)
        if len(self._new) >= self._window_chars or _SENTENCE_END.search(self._new) is not None:
            return self._cut(closes=False)
        return None

    def finish(self) -> Passage:
        """The last passage: whatever was not judged, and the edge of what was."""
        return self._cut(closes=True)

    def _cut(self, *, closes: bool) -> Passage:
        text = self._tail + self._new
        passage = Passage(text, Stage.OUTPUT, opens=self._opens, closes=closes)
        if len(text) > self._overlap_chars:
            text, self._opens = text[-self._overlap_chars :], False
        self._tail, self._new = text, ""
        return passage


def _condensed(text: str, after: str) -> str:
    """Without invisible characters and runs of whitespace, so that no padding pushes a phrase out of the overlap."""
    seen = _SPACES.sub(lambda run: "\n" if "\n" in run.group() else " ", visible(text))
    return seen[1:] if seen[:1].isspace() and after[-1:].isspace() else seen
