"""The one file that reads a clock or draws randomness. Decisions are handed `now` instead."""

import os
import time

from shared import ids


def wall_s() -> float:
    """Seconds since the epoch: for what people and other machines read."""
    return time.time()


def now_s() -> float:
    """Monotonic seconds: for intervals and deadlines inside one process."""
    return time.monotonic()


def computed_s() -> float:
    """Seconds that the threads of this process have computed, added up: it stands while others have the cores."""
    return time.process_time()


def sleep(seconds: float) -> None:
    """Blocks this thread: for a process that has no event loop."""
    time.sleep(seconds)


def random_seed() -> int:
    """A sampling seed, drawn when the client gave none; 63 bits."""
    return int.from_bytes(os.urandom(8), "big") >> 1


def random_unit() -> float:
    """[0, 1): jitter."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


def random_token(n_bytes: int = 16) -> str:
    """Hex, for instance and stream names."""
    return os.urandom(n_bytes).hex()


def new_reply_id(region: str, shard: int) -> str:
    return ids.reply_id(region, shard, int(time.time() * 1000), os.urandom(ids.ENTROPY_BYTES))


def new_conversation_id() -> str:
    return ids.conversation_id(int(time.time() * 1000), os.urandom(ids.ENTROPY_BYTES))


def new_item_id() -> str:
    return ids.item_id(int(time.time() * 1000), os.urandom(ids.ENTROPY_BYTES))


def new_key_id() -> str:
    return ids.key_id(int(time.time() * 1000), os.urandom(ids.ENTROPY_BYTES))
