"""How many attempts a reply has had, told from its `open` entries alone: what the checkers hold the code against."""

from collections.abc import Sequence
from itertools import zip_longest

from shared.limits import ATTEMPTS_LOST_MAX, ATTEMPTS_MAX, OPENS_MAX
from shared.messages import Open


def lost_in_a_row(opens: Sequence[Open], tokens: int) -> int:
    """Of the last attempts, how many wrote nothing; those given back among them do not count.

    `tokens` stand in the log by now.
    """
    count = 0
    for entry, later in reversed(list(zip_longest(opens, opens[1:]))):
        if (tokens if later is None else later.first_index) > entry.first_index:
            break
        count += later is None or later.returned == entry.returned
    return count


def too_many(opens: Sequence[Open], tokens: int) -> bool:
    """The last of these should not have been appended."""
    last = opens[-1]
    lost = lost_in_a_row(opens, tokens)
    return lost > ATTEMPTS_MAX or last.attempt - last.returned > ATTEMPTS_LOST_MAX or last.attempt > OPENS_MAX


def may_go_on(opens: Sequence[Open], tokens: int) -> bool:
    """All of these are over, and another one could follow."""
    lost = lost_in_a_row(opens, tokens)
    spent = len(opens) - (opens[-1].returned if opens else 0)
    return lost < ATTEMPTS_MAX and spent < ATTEMPTS_LOST_MAX and len(opens) < OPENS_MAX
