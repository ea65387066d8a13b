"""Which prefix blocks this replica holds, told in numbered changes: many steps make one message. Pure."""

from collections.abc import Iterable

from shared.limits import SNAPSHOT_BLOCKS_MAX
from shared.messages import BlocksChanged, block_hash_list


class PrefixReport:
    """The set as the engine changes it, and what of it has been told.

    At most SNAPSHOT_BLOCKS_MAX blocks are told: a snapshot must fit a message, and an untold block only costs affinity.
    """

    def __init__(self, replica: str, boot_id: str) -> None:
        self._replica, self._boot_id = replica, boot_id
        self._held: set[bytes] = set()
        self._told: set[bytes] = set()
        self._changed: dict[bytes, None] = {}  # since the last telling, in order
        self._number = 0

    def __len__(self) -> int:
        return len(self._held)

    def step(self, stored: bytes, evicted: bytes) -> None:
        """A step's changes, 16 bytes a hash; what it stored is there even if it evicted the same before."""
        gone, come = block_hash_list(evicted), block_hash_list(stored)
        self._held.difference_update(gone)
        self._held.update(come)
        self._changed.update(dict.fromkeys([*gone, *come]))

    def changes(self) -> BlocksChanged | None:
        """What differs from what was told; None when nothing does."""
        stored, evicted = [], []
        for block in self._changed:
            if block not in self._held and block in self._told:
                self._told.discard(block)
                evicted.append(block)
            elif block in self._held and block not in self._told and len(self._told) < SNAPSHOT_BLOCKS_MAX:
                self._told.add(block)
                stored.append(block)
        self._changed.clear()
        if not stored and not evicted:
            return None
        self._number += 1
        return self._message(stored, evicted)

    def snapshot(self) -> BlocksChanged:
        """All that was told, as of the last number."""
        return self._message(self._told, ())

    def _message(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> BlocksChanged:
        return BlocksChanged(
            replica=self._replica,
            boot_id=self._boot_id,
            number=self._number,
            stored=b"".join(stored),
            evicted=b"".join(evicted),
        )
