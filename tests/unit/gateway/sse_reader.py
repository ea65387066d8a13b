"""An independent reading of the event-stream format (WHATWG), for comparison with what the gateway writes."""

from dataclasses import dataclass


@dataclass
class SseEvent:
    id: str | None
    name: str | None
    data: str
    data_lines: int = 1


def parse_sse(raw: bytes) -> list[SseEvent]:
    """Events in order; comments and `retry` left out, an event without data never dispatched."""
    found: list[SseEvent] = []
    fields: dict[str, list[str]] = {}
    last_id: str | None = None
    for line in raw.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if line == "":
            if "data" in fields:
                last_id = fields.get("id", [last_id])[-1]
                data = fields["data"]
                found.append(SseEvent(last_id, fields.get("event", [None])[-1], "\n".join(data), len(data)))
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
    return found
