"""Which log bucket a new reply gets: any that has room."""

from services.conversation.queueing import LOG_FULL
from shared import clock
from shared.bus import Bus
from shared.errors import RefusedError
from shared.limits import LOG_ADMIT_SHARE, LOG_BUCKET_BYTES
from shared.subjects import Names

FILL_CHECK_S = 2.0


class Shards:
    """Buckets past LOG_ADMIT_SHARE of their bytes take no new reply; those they have can still grow."""

    def __init__(self, bus: Bus, names: Names, count: int) -> None:
        self._bus, self._names, self._count = bus, names, count
        self._open = list(range(count))

    async def look(self) -> None:
        """Read how full the buckets are; raises BusError, and what was known stays."""
        most = LOG_ADMIT_SHARE * LOG_BUCKET_BYTES
        sizes = [await self._bus.stream_bytes(self._names.log_stream(shard)) for shard in range(self._count)]
        self._open = [shard for shard, size in enumerate(sizes) if size <= most]

    def new_reply_id(self) -> str:
        """Raises RefusedError (LOG_FULL) when no bucket has room."""
        if not self._open:
            raise RefusedError(LOG_FULL)
        shard = self._open[int(clock.random_unit() * len(self._open))]
        return clock.new_reply_id(self._names.region, shard)
