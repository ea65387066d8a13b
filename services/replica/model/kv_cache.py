"""The memory behind the block numbers: keys and values of every layer, in blocks of 16 tokens.

    keys, values   [layers, kv_heads, blocks, 16, head_dim]

Opaque to everyone but attention. What stands in a slot is meaningless until a step wrote it; the scheduler never lets
a sequence read what was not written for its tokens.
"""

import torch

from services.replica.model.config import ModelConfig
from shared.limits import BLOCK_TOKENS


class KvCache:
    def __init__(self, config: ModelConfig, blocks: int, dtype: torch.dtype) -> None:
        self.blocks = blocks
        shape = (config.layers, config.kv_heads, blocks, BLOCK_TOKENS, config.head_dim)
        # Zeroed, not empty: a padded row is masked, but 0 x NaN would still be NaN.
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [rows, kv_heads, head_dim] to their slots (block x 16 + offset)."""
        self._slots(self._keys, layer).index_copy_(1, slots, keys.transpose(0, 1))
        self._slots(self._values, layer).index_copy_(1, slots, values.transpose(0, 1))

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] block numbers -> keys and values [kv_heads, n x 16, head_dim], in that order."""
        keys, values = self._keys[layer].index_select(1, blocks), self._values[layer].index_select(1, blocks)
        return keys.flatten(1, 2), values.flatten(1, 2)

    @staticmethod
    def _slots(cache: torch.Tensor, layer: int) -> torch.Tensor:
        return cache[layer].flatten(1, 2)  # a view
