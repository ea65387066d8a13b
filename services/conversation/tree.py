"""A conversation's items as a tree, from its turns. Pure.

turns    A ──> B ──> C            items   a1 ── A ── b1 ── B ── c1 ── C
          ├──> B'  regenerated                   │     └── B'             the same message, another reply
          └──> E   edited                        └── e1 ── E              another message

A regenerated reply's turn holds the items of the first one under the same ids, so they are one node here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.ids import output_item_id


@dataclass(frozen=True)
class TurnNode:
    """One row of the conversation: ids only."""

    reply_id: str
    parent_id: str | None
    created_s: float
    item_ids: Sequence[str]
    replied: bool = True  # False: items only


@dataclass(frozen=True)
class Node:
    """One item. `position` is its place in the turn's message; None is what the model wrote."""

    item_id: str
    parent_id: str | None
    reply_id: str
    position: int | None
    created_s: float
    active: bool


def active_path(turns: Sequence[TurnNode], head: str | None) -> list[str]:
    """Reply ids from the root to `head`."""
    parents = {turn.reply_id: turn.parent_id for turn in turns}
    path: list[str] = []
    at = head
    while at is not None and at in parents and len(path) < len(turns):
        path.append(at)
        at = parents[at]
    return path[::-1]


def nodes(turns: Sequence[TurnNode], head: str | None) -> list[Node]:
    """Every item once, oldest turn first, a message before the reply to it."""
    path = set(active_path(turns, head))
    shown = {item for turn in turns if turn.reply_id in path for item in turn.item_ids}
    last: dict[str, str | None] = {}  # of each turn: what follows it hangs there
    known: set[str] = set()
    made: list[Node] = []
    for turn in _in_order(turns):
        above = None if turn.parent_id is None else last.get(turn.parent_id)
        for position, item_id in enumerate(turn.item_ids):
            if item_id not in known:
                known.add(item_id)
                made.append(Node(item_id, above, turn.reply_id, position, turn.created_s, item_id in shown))
            above = item_id
        if turn.replied:
            written = output_item_id(turn.reply_id)
            made.append(Node(written, above, turn.reply_id, None, turn.created_s, turn.reply_id in path))
            above = written
        last[turn.reply_id] = above  # a turn whose items were deleted adds nothing
    return made


def _in_order(turns: Sequence[TurnNode]) -> list[TurnNode]:
    """By time, but never before its parent, whatever the clocks of two machines said."""
    by_id = {turn.reply_id: turn for turn in turns}
    keys: dict[str, tuple[float, int]] = {}
    for turn in turns:
        above: list[TurnNode] = []
        at: TurnNode | None = turn
        while at is not None and at.reply_id not in keys and len(above) < len(turns):
            above.append(at)
            at = by_id.get(at.parent_id or "")
        time_s, depth = (0.0, 0) if at is None else keys.get(at.reply_id, (0.0, 0))
        for one in reversed(above):
            time_s, depth = max(time_s, one.created_s), depth + 1
            keys[one.reply_id] = (time_s, depth)
    return sorted(turns, key=lambda one: (*keys[one.reply_id], one.reply_id))


def page(every: Sequence[Node], *, after: str | None, limit: int, ascending: bool, branches: bool) -> list[Node] | None:
    """Up to `limit` + 1 nodes (one more says that there is more); None when `after` names none of them."""
    shown = [node for node in every if branches or node.active]
    if not ascending:
        shown.reverse()
    start = 0
    if after is not None:
        start = next((at + 1 for at, node in enumerate(shown) if node.item_id == after), -1)
        if start < 0:
            return None
    return shown[start : start + limit + 1]
