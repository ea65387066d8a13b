"""`chorus log REPLY_ID`: a reply's token log, entry by entry, as the bus holds it."""

from ops.log_lines import table
from ops.reach import Reach, operator_bus
from shared.bus import StreamMessage
from shared.errors import ConfigError
from shared.ids import reply_of_chat, reply_place
from shared.limits import CATCH_UP_BATCH
from shared.subjects import Names


async def log_table(reach: Reach, given: str) -> list[str]:
    """Lines for a person. `given` is a reply id, or its name on the chat door. Raises ConfigError, BusError."""
    reply = reply_of_chat(given) if given.startswith("chatcmpl-") else given
    place = reply_place(reply)
    if place is None or place.region != reach.region:
        raise ConfigError(f"{given!r} is not the id of a reply of region {reach.region!r} (resp_{reach.region}...)")
    names = Names(reach.region)
    entries: list[StreamMessage] = []
    async with operator_bus(reach) as bus:
        while True:
            after = entries[-1].seq if entries else 0
            batch = await bus.read(
                names.log_stream_of(reply), names.log_subject(reply), from_seq=after + 1, most=CATCH_UP_BATCH
            )
            entries += batch
            if len(batch) < CATCH_UP_BATCH:
                break
    if not entries:
        raise ConfigError(f"there is no log of {reply}: it never was, has expired, or was deleted")
    return table(entries)
