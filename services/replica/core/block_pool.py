"""The block pool: the one owner of every KV block, and of the prefix cache.

A block is in exactly one of three states; a hash names at most one block, a block bears at most one hash:

                      take                         release (last reference)
      free, empty ───────────> held by r sequences ───────────────────────> free, cached   (it bears a hash)
          ^                     │  ^   r = refs                                │   │
          │   release, no hash  │  └──────────────── share, by its hash ───────┘   │
          └─────────────────────┘                                                  │
          ^                                                                        │
          └────────────── evict: taken for something new, its hash forgotten ──────┘

    free list, handed out from the left:   [ empty … | cached, least recently freed … most recently freed ]

Who may write: only the sequence that took a block, and only until it is full. A hash is published when every slot of
its block is computed, never before, so that nobody reads what is not there; shared blocks are full and never written.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class BlockChanges(NamedTuple):
    """Hashes stored and evicted since they were last taken; net, so their order does not matter."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class BlockPool:
    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._refs = [0] * total
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    @property
    def free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, held or free."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def take(self, count: int) -> tuple[int, ...]:
        """`count` blocks to write in, for one holder; what they cached is evicted. ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked of {len(self._free)} free ones")
        taken = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        for block in taken:
            self._evict(block)
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of blocks that were found by their hash."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less, given in table order. The tail is freed first, so that it is also evicted first."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is released twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Every slot of a held block is computed: it may be found by its hash. The first block with a hash keeps it."""
        if self._refs[block] == 0:
            raise ValueError(f"block {block} is published by nobody")
        if block_hash in self._by_hash or block in self._hash_of:
            return
        self._by_hash[block_hash], self._hash_of[block] = block, block_hash
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._by_hash[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = None

    def take_changes(self) -> BlockChanges:
        """What the cache gained and lost since the last call."""
        changes = BlockChanges(tuple(self._stored), tuple(self._evicted))
        self._stored, self._evicted = {}, {}
        return changes

    def cached(self) -> tuple[bytes, ...]:
        """Every hash that can be found now."""
        return tuple(self._by_hash)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Audit against the block tables of all holders; AssertionError names what does not hold."""
        held = Counter(block for table in tables for block in table)
        for block in range(self.total):
            refs = self._refs[block]
            assert refs == held[block], f"block {block} counts {refs} holders and has {held[block]}"
            assert (block in self._free) == (refs == 0), f"block {block} with {refs} holders is on the wrong side"
        assert held.keys() <= set(range(self.total)), "a table names a block that does not exist"
        assert {h: b for b, h in self._hash_of.items()} == self._by_hash, "hashes and blocks disagree"
        seen_cached = False
        for block in self._free:
            cached = block in self._hash_of
            assert cached or not seen_cached, f"empty block {block} waits behind cached ones"
            seen_cached = seen_cached or cached
