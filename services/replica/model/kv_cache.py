"""The memory behind the block numbers, in plain torch: keys and values of every layer, in blocks of 16 tokens.

    keys, values   [layers, kv_heads, blocks, 16, head_dim]   in the cache's own number type
    scales         [layers, kv_heads, blocks, 16]             of int8 and float8 rows: value = code x scale

Opaque to everyone but attention. What stands in a slot is meaningless until a step wrote it; the scheduler never lets
a sequence read what was not written for its tokens.
"""

import torch

from services.replica.model.config import ModelConfig
from services.replica.model.kv_size import SCALED, KvType
from shared.limits import BLOCK_TOKENS

_MOST = 1e18  # of a number: no product of it with a query's is infinite
_CODE_MAX = {KvType.INT8: 127, KvType.FLOAT8: 448}
_TYPES = {
    KvType.FLOAT32: torch.float32,
    KvType.BFLOAT16: torch.bfloat16,
    KvType.FLOAT16: torch.float16,
    KvType.INT8: torch.int8,
    KvType.FLOAT8: torch.float8_e4m3fn,
}


def numbers(rows: torch.Tensor) -> torch.Tensor:
    """What is no number becomes 0, what is too large less: who has the block next multiplies it by 0, and adds it."""
    return rows.nan_to_num(0.0).clamp(-_MOST, _MOST)


class Store:
    """Keys, or values. Rows go in and come out in the model's number type."""

    def __init__(self, shape: tuple[int, ...], kind: KvType | None, dtype: torch.dtype, device: torch.device) -> None:
        # Zeroed, not empty: a padded row is masked, but 0 x NaN would still be NaN.
        self._dtype, self._kept = dtype, dtype if kind is None else _TYPES[kind]
        # Bytes stand for the eight-bit types: not every operation that moves rows knows all of those.
        stored = torch.uint8 if kind in SCALED else self._kept
        self._rows = torch.zeros(shape, dtype=stored, device=device)
        self._scales = torch.zeros(shape[:-1], device=device) if kind in SCALED else None
        self._firsts = torch.arange(shape[1], device=device).unsqueeze(1) * shape[2]  # each head's first block of all
        self._code_max = _CODE_MAX[kind] if kind in SCALED else 0

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """[kv_heads, rows, head_dim] to their slots. What a row becomes depends on that row alone."""
        rows = numbers(rows)
        if self._scales is not None:
            scales = rows.abs().amax(dim=-1).float() / self._code_max
            rows = rows / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
            self._scales[layer].flatten(1, 2).index_copy_(1, slots, scales)
        elif self._kept == torch.float16:
            rows = rows.float().clamp(-65504, 65504)  # in bfloat16 the bound itself would be rounded up, to infinity
        kept = (rows.round() if self._kept == torch.int8 else rows).to(self._kept).view(self._rows.dtype)
        self._rows[layer].flatten(1, 2).index_copy_(1, slots, kept)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """[n] block numbers -> [kv_heads, n x 16, head_dim], in that order."""
        every = (self._firsts + blocks).flatten()  # of all heads in one dimension: half as long in the copying
        heads, size, width = len(self._firsts), *self._rows.shape[-2:]
        rows = self._rows[layer].view(-1, size * width).index_select(0, every).view(self._kept).to(self._dtype)
        rows = rows.view(heads, -1, width)
        if self._scales is not None:
            rows *= self._scales[layer].view(-1, size).index_select(0, every).view(heads, -1, 1)
        return rows


class KvCache:
    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        dtype: torch.dtype,
        *,
        kind: KvType | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`dtype` is what rows are given and read in; `kind` what they are kept as, None: the same."""
        self.blocks = blocks
        shape = (config.layers, config.kv_heads, blocks, BLOCK_TOKENS, config.head_dim)
        device = device or torch.device("cpu")
        self._keys, self._values = Store(shape, kind, dtype, device), Store(shape, kind, dtype, device)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [rows, kv_heads, head_dim] to their slots (block x 16 + offset)."""
        self._keys.write(layer, slots, keys.transpose(0, 1))
        self._values.write(layer, slots, values.transpose(0, 1))

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] block numbers -> keys and values [kv_heads, n x 16, head_dim], in that order."""
        return self._keys.read(layer, blocks), self._values.read(layer, blocks)
