"""Paged attention in plain torch: decodes and prompt chunks of one step, over block tables.

Decodes of similar length are gathered and padded together (their block counts within a factor of two); each chunk of a
prompt is computed alone, with a causal mask that lets row i see the keys before and at its position. Everything that
depends on the plan only is built once a step, not once a layer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.replica.core.plan import SeqChunk, blocks_for
from services.replica.model.kv_cache import KvCache
from shared.limits import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences computed in one go: `count` rows each. `hidden` marks the keys that a row may not see."""

    rows: torch.Tensor  # [sequences x count]
    sequences: int
    count: int
    blocks: torch.Tensor  # [sequences x blocks], tables padded with block 0
    hidden: torch.Tensor  # [sequences, 1, count, keys]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A plan's rows: what to compute, where to write it, who attends to what."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]: where keys and values go
    groups: tuple[Group, ...]
    last_rows: torch.Tensor  # [sampled chunks]: rows whose logits are wanted


def lay_out(chunks: Sequence[SeqChunk]) -> StepLayout:
    """The layout of a plan's chunks, rows in their order."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: list[int] = []
    decodes: dict[int, list[tuple[int, SeqChunk]]] = defaultdict(list)
    prompts: list[tuple[int, SeqChunk]] = []
    for chunk in chunks:
        row = len(tokens)
        if len(chunk.ids) == 1:
            decodes[blocks_for(chunk.end).bit_length()].append((row, chunk))
        else:
            prompts.append((row, chunk))
        tokens += chunk.ids
        positions += range(chunk.start, chunk.end)
        slots += (
            chunk.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(chunk.start, chunk.end)
        )
        if chunk.sample is not None:
            last_rows.append(len(tokens) - 1)
    groups = [*map(_group, decodes.values()), *(_group([prompt]) for prompt in prompts)]
    return StepLayout(_long(tokens), _long(positions), _long(slots), tuple(groups), _long(last_rows))


def _long(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long)  # also when there are none


def _group(members: Sequence[tuple[int, SeqChunk]]) -> Group:
    """One group of chunks of equal row count, given with their first rows."""
    count = len(members[0][1].ids)
    width = max(blocks_for(chunk.end) for _, chunk in members)
    tables = [[*chunk.blocks[:width], *[0] * (width - len(chunk.blocks))] for _, chunk in members]
    starts = _long([chunk.start for _, chunk in members])
    visible_to = starts[:, None] + torch.arange(count)[None, :]  # [sequences, count]: last key each row sees
    hidden = torch.arange(width * BLOCK_TOKENS)[None, None, :] > visible_to[:, :, None]
    return Group(
        rows=_long([row + at for row, _ in members for at in range(count)]),
        sequences=len(members),
        count=count,
        blocks=torch.tensor(tables).flatten(),
        hidden=hidden.unsqueeze(1),
    )


def attend(layout: StepLayout, cache: KvCache, layer: int, queries: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] queries, keys and values already written -> [rows, heads, head_dim]."""
    mixed = torch.empty_like(queries)
    for group in layout.groups:
        mixed[group.rows] = _attend_group(group, cache, layer, queries[group.rows])
    return mixed


def _attend_group(group: Group, cache: KvCache, layer: int, queries: torch.Tensor) -> torch.Tensor:
    heads, head_dim = queries.shape[1:]
    keys, values = cache.read(layer, group.blocks)
    kv_heads = keys.shape[0]
    shared = heads // kv_heads  # query heads that read the same keys
    # [sequences, kv_heads, shared x count, head_dim] against [sequences, kv_heads, keys, head_dim]
    q = queries.view(group.sequences, group.count, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(group.sequences, kv_heads, shared * group.count, head_dim)
    k = keys.view(kv_heads, group.sequences, -1, head_dim).transpose(0, 1)
    v = values.view(kv_heads, group.sequences, -1, head_dim).transpose(0, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5
    scores.masked_fill_(group.hidden.repeat(1, 1, shared, 1), float("-inf"))
    out = torch.matmul(scores.softmax(dim=-1), v)
    out = out.view(group.sequences, kv_heads, shared, group.count, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(group.sequences * group.count, heads, head_dim)
