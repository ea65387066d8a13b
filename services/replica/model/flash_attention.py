"""Attention by the flash-attn library over block tables: every chunk of a step, prompts and decodes, in one call.

    keys, values   [layers, blocks, 16, kv_heads, head_dim]     bfloat16 or float16

Two generations of the library are spoken to. The third (`flash_attn_interface`, for Hopper) reads pages of any size
where they lie. The second (`flash_attn`) takes pages of 256 tokens and their multiples only, so that ours, of 16, are
gathered for it, a copy a layer. Both are imported here and nowhere else, and only when a GPU is to be used.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.replica.core.plan import SeqChunk, blocks_for
from services.replica.model.attention import Attend, StepRows
from services.replica.model.config import ModelConfig
from services.replica.model.kv_cache import numbers
from shared.limits import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Ragged:
    """A step's sequences as the library wants them; int32 on the device. n sequences, their rows and keys in order."""

    row_ends: torch.Tensor  # [n + 1]: 0, then where each sequence's rows end
    key_ends: torch.Tensor  # [n + 1]: the same of its keys, this step's included
    keys: torch.Tensor  # [n]: how many
    tables: torch.Tensor  # [n, most blocks], padded with block 0
    key_slots: torch.Tensor  # [all keys], int64: block x 16 + offset of each
    rows_most: int
    keys_most: int


class Library(Protocol):
    """Causal attention of ragged rows, aligned to the end of each sequence's keys."""

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Ragged, window: tuple[int, int]
    ) -> torch.Tensor:
        """[rows, heads, head_dim], a layer's [blocks, 16, kv_heads, head_dim] twice -> [rows, heads, head_dim].

        `window`: keys before and after its own that a row sees; (-1, -1): no bound but causality.
        """
        ...


class Flash3:
    """`flash_attn_with_kvcache` with page tables. One split of the keys, so that a row does not depend on the batch."""

    def __init__(self, with_kvcache: Callable[..., torch.Tensor]) -> None:
        self._with_kvcache = with_kvcache

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Ragged, window: tuple[int, int]
    ) -> torch.Tensor:
        return self._with_kvcache(
            queries,
            keys,
            values,
            cache_seqlens=step.keys,
            page_table=step.tables,
            cu_seqlens_q=step.row_ends,
            max_seqlen_q=step.rows_most,
            softmax_scale=queries.shape[-1] ** -0.5,
            causal=True,
            window_size=window,
            num_splits=1,
        )


class Flash2:
    """`flash_attn_varlen_func` over gathered keys and values."""

    def __init__(self, varlen: Callable[..., torch.Tensor]) -> None:
        self._varlen = varlen

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Ragged, window: tuple[int, int]
    ) -> torch.Tensor:
        return self._varlen(
            queries,
            keys.flatten(0, 1).index_select(0, step.key_slots),
            values.flatten(0, 1).index_select(0, step.key_slots),
            step.row_ends,
            step.key_ends,
            step.rows_most,
            step.keys_most,
            softmax_scale=queries.shape[-1] ** -0.5,
            causal=True,
            window_size=window,
        )


def find_library(load: Callable[[str], Any] = importlib.import_module) -> Library | None:
    """The newest generation that is installed; None: neither."""
    for module, function, adapter in (
        ("flash_attn_interface", "flash_attn_with_kvcache", Flash3),
        ("flash_attn", "flash_attn_varlen_func", Flash2),
    ):
        try:
            return adapter(getattr(load(module), function))
        except (ImportError, AttributeError):
            continue
    return None


class FlashAttention:
    """`AttentionBackend` by the library."""

    def __init__(
        self, config: ModelConfig, blocks: int, dtype: torch.dtype, *, library: Library, device: torch.device
    ) -> None:
        shape = (config.layers, blocks, BLOCK_TOKENS, config.kv_heads, config.head_dim)
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._library, self._device = library, device
        self._window = (config.window - 1, 0) if config.window else (-1, -1)

    @property
    def blocks(self) -> int:
        return self._keys.shape[1]

    def prepare(self, chunks: Sequence[SeqChunk], rows: StepRows) -> Attend:
        step = ragged(chunks, self._device)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            for cache, new in ((self._keys[layer], keys), (self._values[layer], values)):
                cache.view(-1, *new.shape[1:]).index_copy_(0, rows.slots, numbers(new))
            return self._library.attend(queries, self._keys[layer], self._values[layer], step, self._window)

        return attend


def ragged(chunks: Sequence[SeqChunk], device: torch.device) -> Ragged:
    width = max(blocks_for(chunk.end) for chunk in chunks)
    tables = [[*chunk.blocks[:width], *[0] * (width - len(chunk.blocks))] for chunk in chunks]
    slots = [
        chunk.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        for chunk in chunks
        for at in range(chunk.end)
    ]

    def ends(lengths: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)

    return Ragged(
        row_ends=ends([len(chunk.ids) for chunk in chunks]),
        key_ends=ends([chunk.end for chunk in chunks]),
        keys=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
        tables=torch.tensor(tables, dtype=torch.int32, device=device),
        key_slots=torch.tensor(slots, device=device),
        rows_most=max(len(chunk.ids) for chunk in chunks),
        keys_most=max(chunk.end for chunk in chunks),
    )
