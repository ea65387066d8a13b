"""A conversation's title from its first message. Pure."""

from collections.abc import Iterable

from shared.limits import TITLE_CHARS_MAX
from shared.messages import InputItem

_MORE = "…"


def title_of(items: Iterable[InputItem]) -> str:
    """The beginning of what a person said, on one line, cut between words; empty when nobody said anything."""
    said = next((item.text for item in items if item.role == "user" and item.text.strip()), "")
    words = " ".join(said[: 8 * TITLE_CHARS_MAX].replace("\0", " ").split())
    if len(words) <= TITLE_CHARS_MAX:
        return words
    cut = words[: TITLE_CHARS_MAX - len(_MORE)]
    return (cut.rpartition(" ")[0] or cut) + _MORE
