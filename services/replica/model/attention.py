"""Attention over paged keys and values: the port, and its reference in plain torch.

A backend owns the KV memory and its layout. It is handed a step's chunks once, and then each layer's queries, keys and
values. The flash-attn backend stands in `flash_attention`; the native kernels have theirs inside.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from services.replica.core.plan import SeqChunk, blocks_for
from services.replica.model.config import ModelConfig
from services.replica.model.kv_cache import KvCache
from services.replica.model.kv_size import KvType
from shared.limits import BLOCK_TOKENS

# (layer, queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]) -> [rows, heads, head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan's rows, in the order of its chunks. Long tensors on the model's device."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]: where keys and values go
    last_rows: torch.Tensor  # [sampled chunks]: rows whose logits are wanted


class AttentionBackend(Protocol):
    """Keys and values written by one step are there for all later ones. Not thread-safe."""

    @property
    def blocks(self) -> int: ...

    def prepare(self, chunks: Sequence[SeqChunk], rows: StepRows) -> Attend:
        """A step's attention: called once for each layer, it writes the rows' keys and values, then attends.

        Row i of a chunk sees the keys of its sequence up to its own position, the last `window` of them where the model
        has a window.
        """
        ...


def lay_out(chunks: Sequence[SeqChunk], device: torch.device | None = None) -> StepRows:
    """The rows of a plan's chunks."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.ids
        positions += range(chunk.start, chunk.end)
        slots += (
            chunk.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(chunk.start, chunk.end)
        )
        if chunk.sample is not None:
            last_rows.append(len(tokens) - 1)
    return StepRows(*(longs(numbers, device) for numbers in (tokens, positions, slots, last_rows)))


def longs(numbers: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)  # also when there are none


# --- the reference ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences computed in one go: `count` rows each. `mask` is added to scores: 0, or -inf at keys not to be seen."""

    rows: torch.Tensor  # [sequences x count]
    sequences: int
    count: int
    blocks: torch.Tensor  # [sequences x blocks], tables padded with block 0
    mask: torch.Tensor  # [sequences, 1, count, keys]


class PaddedAttention:
    """`AttentionBackend` in torch's own operations, on any device.

    Decodes of similar length are gathered and padded together (their block counts within a factor of two); each chunk
    of a prompt is computed alone. What depends on the plan only is built once a step, not once a layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        dtype: torch.dtype,
        *,
        kind: KvType | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`dtype` is that of queries, keys and values; `kind` what is kept of the latter, None: all of it."""
        self._window, self._dtype, self._device = config.window, dtype, device
        self._cache = KvCache(config, blocks, dtype, kind=kind, device=device)

    @property
    def blocks(self) -> int:
        return self._cache.blocks

    def prepare(self, chunks: Sequence[SeqChunk], rows: StepRows) -> Attend:
        groups = self._groups(chunks)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self._cache.write(layer, rows.slots, keys, values)
            if len(groups) == 1:  # its rows are all there are, in their order
                return _attend(groups[0], *self._cache.read(layer, groups[0].blocks), queries)
            mixed = torch.empty_like(queries)
            for group in groups:
                mixed[group.rows] = _attend(group, *self._cache.read(layer, group.blocks), queries[group.rows])
            return mixed

        return attend

    def _groups(self, chunks: Sequence[SeqChunk]) -> list[_Group]:
        decodes: dict[int, list[tuple[int, SeqChunk]]] = defaultdict(list)
        prompts: list[tuple[int, SeqChunk]] = []
        row = 0
        for chunk in chunks:
            if len(chunk.ids) == 1:
                decodes[blocks_for(chunk.end).bit_length()].append((row, chunk))
            else:
                prompts.append((row, chunk))
            row += len(chunk.ids)
        return [*map(self._group, decodes.values()), *(self._group([prompt]) for prompt in prompts)]

    def _group(self, members: Sequence[tuple[int, SeqChunk]]) -> _Group:
        """One group of chunks of equal row count, given with their first rows."""
        count = len(members[0][1].ids)
        width = max(blocks_for(chunk.end) for _, chunk in members)
        tables = [[*chunk.blocks[:width], *[0] * (width - len(chunk.blocks))] for _, chunk in members]
        starts = longs([chunk.start for _, chunk in members])
        own = (starts[:, None] + torch.arange(count)[None, :])[:, :, None]  # [sequences, count, 1]: each row's position
        keys = torch.arange(width * BLOCK_TOKENS)[None, None, :]
        hidden = keys > own
        if self._window:
            hidden |= keys <= own - self._window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        return _Group(
            rows=longs([row + at for row, _ in members for at in range(count)], self._device),
            sequences=len(members),
            count=count,
            blocks=torch.tensor(tables, device=self._device).flatten(),
            mask=mask.unsqueeze(1).to(self._device),
        )


def _attend(group: _Group, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """[kv_heads, sequences x keys, head_dim] twice and [sequences x count, heads, head_dim] -> the latter's shape.

    Views all the way: what was gathered is not copied once more.
    """
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    q = queries.view(group.sequences, group.count, -1, head_dim).transpose(1, 2)
    k, v = (one.view(kv_heads, group.sequences, -1, head_dim).transpose(0, 1) for one in (keys, values))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)
