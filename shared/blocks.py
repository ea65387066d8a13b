"""The block hash chain: a block's hash covers its tokens, all tokens before it, and a domain.

    domain ── h0 ── h1 ── h2 ── ...        h[i] = H(h[i-1] | ids of block i), h[-1] = H(domain)

Two prompts share a hash exactly when they share model, tenant salt and every token up to the block's end.
"""

import hashlib
from collections.abc import Sequence

from shared.limits import BLOCK_TOKENS
from shared.messages import pack_ids

HASH_BYTES = 16


def chain_root(domain: bytes) -> bytes:
    """The hash before the first block. `domain` names the model revision and, where isolation is on, the tenant."""
    return hashlib.blake2b(domain, digest_size=HASH_BYTES).digest()


def next_hash(before: bytes, ids: Sequence[int]) -> bytes:
    """The hash of a full block (BLOCK_TOKENS ids) that follows `before`."""
    return hashlib.blake2b(before + pack_ids(ids), digest_size=HASH_BYTES).digest()


def block_hashes(ids: Sequence[int], domain: bytes) -> list[bytes]:
    """Hashes of the full blocks of `ids`, in order; a partial last block has none."""
    hashes, last = [], chain_root(domain)
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        last = next_hash(last, ids[end - BLOCK_TOKENS : end])
        hashes.append(last)
    return hashes
