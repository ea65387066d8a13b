"""How a trace names things: short enough that an interleaving reads like a story."""

import dataclasses
from typing import Any

from shared.messages import Accepted, Ask, Chunk, Dispatch, End, GenerateRequest, Open
from shared.token_log import LogView

_LEFT_OUT = frozenset({"reply_id", "request"})


def brief(thing: Any) -> str:  # noqa: PLR0911 - a table
    """An entry, event, command or view in a few words."""
    match thing:
        case Accepted():
            return "accepted"
        case Open():
            given_back = f", {thing.returned} given back" if thing.returned else ""
            return f"open {thing.attempt} on {thing.replica} from {thing.first_index} by {thing.router}{given_back}"
        case Chunk():
            return f"chunk of {thing.attempt} [{thing.first_index}, {thing.first_index + thing.count})"
        case End():
            return f"end {thing.reason.value} by {thing.by}"
        case LogView():
            end = f", {brief(thing.ended)}" if thing.ended else ""
            return f"log to {thing.last_seq}: {thing.attempts} opens, {len(thing.ids)} tokens{end}"
        case Dispatch():
            return f"attempt {thing.attempt} after seq {thing.open_seq}, {len(thing.written) // 4} tokens written"
        case Ask():
            return f"ask by {thing.router}, delivery {thing.delivered}"
        case GenerateRequest():
            return "request"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = [field.name for field in dataclasses.fields(thing) if field.name not in _LEFT_OUT]
        return f"{type(thing).__name__}({', '.join(f'{name}={brief(getattr(thing, name))}' for name in fields)})"
    return f"{thing:.2f}" if isinstance(thing, float) else str(thing)
