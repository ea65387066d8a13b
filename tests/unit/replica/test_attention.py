"""Attention backends on random ragged batches: the reference against a naive one, flash-attn's calls against both.

The library itself needs a GPU. In its place stand its two functions in plain torch, as strict about shapes and types.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from services.replica.core.plan import SeqChunk
from services.replica.model.attention import AttentionBackend, PaddedAttention, lay_out
from services.replica.model.config import ModelConfig
from services.replica.model.flash_attention import Flash2, Flash3, FlashAttention, find_library
from services.replica.model.kv_cache import Store
from services.replica.model.kv_size import KvType
from shared.limits import BLOCK_TOKENS

BLOCKS = 64
CPU = torch.device("cpu")


def config_of(*, heads: int = 6, kv_heads: int = 2, window: int = 0) -> ModelConfig:
    return ModelConfig(
        vocab=8, hidden=32, layers=2, heads=heads, kv_heads=kv_heads, head_dim=16, ffn=8, context=512, eps=1e-5,
        theta=1e4, window=window,
    )  # fmt: skip


# --- the library's functions --------------------------------------------------------------------------------


def one_sequence(q, k, v, scale: float, window: tuple[int, int]) -> torch.Tensor:
    """Causal, aligned to the last key: [rows, heads, dim], [keys, kv_heads, dim] twice -> [rows, heads, dim]."""
    rows, keys, shared = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    own = torch.arange(rows)[:, None] + keys - rows
    place = torch.arange(keys)[None, :]
    hidden = place > own if window[0] < 0 else (place > own + window[1]) | (place < own - window[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def checked_ends(ends: torch.Tensor, whole: int, longest: int) -> list[int]:
    assert ends.dtype == torch.int32
    assert ends.is_contiguous()
    found = ends.tolist()
    assert found[0] == 0
    assert found[-1] == whole
    assert max(b - a for a, b in pairwise(found)) == longest
    return found


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
           causal=False, window_size=(-1, -1), block_table=None):  # fmt: skip
    """flash_attn_varlen_func, second generation: no page table with pages of 16."""
    assert block_table is None or k.shape[1] % 256 == 0
    assert causal
    assert dropout_p == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    rows, keys = checked_ends(cu_seqlens_q, len(q), max_seqlen_q), checked_ends(cu_seqlens_k, len(k), max_seqlen_k)
    return torch.cat(
        [
            one_sequence(q[a:b], k[c:d], v[c:d], softmax_scale, window_size)
            for (a, b), (c, d) in zip(pairwise(rows), pairwise(keys), strict=True)
        ]
    )


def with_kvcache(q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q,
                 softmax_scale, causal, window_size, num_splits):  # fmt: skip
    """flash_attn_with_kvcache, third generation: ragged queries, paged keys."""
    assert causal
    assert num_splits == 1
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    assert page_table.stride(-1) == 1
    assert k_cache.shape == v_cache.shape == (BLOCKS, BLOCK_TOKENS, *k_cache.shape[2:])
    assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert 0 <= int(page_table.min()) <= int(page_table.max()) < BLOCKS
    rows = checked_ends(cu_seqlens_q, len(q), max_seqlen_q)
    out = []
    for at, (a, b) in enumerate(pairwise(rows)):
        keys, values = (cache[page_table[at].long()].flatten(0, 1)[: cache_seqlens[at]] for cache in (k_cache, v_cache))
        out.append(one_sequence(q[a:b], keys, values, softmax_scale, window_size))
    return torch.cat(out)


LIBRARIES = {"second generation": Flash2(varlen), "third generation": Flash3(with_kvcache)}


# --- batches ------------------------------------------------------------------------------------------------


class Play:
    """Sequences that grow by random chunks in shared steps; every row's numbers are kept for the naive attention."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.rng, self.config, self.dtype = random.Random(seed), config, dtype
        self.generator = torch.Generator().manual_seed(seed)
        free = self.rng.sample(range(BLOCKS), BLOCKS)
        self.tables = [
            tuple(free.pop() for _ in range(self.rng.randrange(1, 7))) for _ in range(self.rng.randrange(1, 8))
        ]
        self.at = [0] * len(self.tables)
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.tables]

    def chunks(self) -> Sequence[SeqChunk]:
        found = []
        for number, table in enumerate(self.tables):
            room = len(table) * BLOCK_TOKENS - self.at[number]
            count = min(room, self.rng.choice([0, 1, 1, 1, 2, 7, 16, 30]))
            if count:
                found.append(SeqChunk(str(number), 1, self.at[number], (0,) * count, table, None))
                self.at[number] += count
        return found

    def numbers(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, self.config.head_dim, generator=self.generator, dtype=self.dtype)

    def naive(self, chunks: Sequence[SeqChunk], queries, keys, values) -> torch.Tensor:
        out, row = [], 0
        window = (self.config.window - 1, 0) if self.config.window else (-1, -1)
        for chunk in chunks:
            mine = slice(row, row + len(chunk.ids))
            row = mine.stop
            kept = self.kept[int(chunk.sequence_id)]
            kept.append((keys[mine], values[mine]))
            k, v = (torch.cat([pair[place] for pair in kept]) for place in (0, 1))
            out.append(one_sequence(queries[mine], k, v, self.config.head_dim**-0.5, window))
        return torch.cat(out)


def play(backend: AttentionBackend, config: ModelConfig, seed: int, within: float, dtype=torch.float64) -> int:
    """Every step of both layers against the naive attention; how many steps mixed prompts and decodes."""
    games = [Play(config, seed, dtype), Play(config, seed, dtype)]
    mixed = 0
    for _ in range(8):
        chunks = games[0].chunks()
        if not chunks:
            continue
        mixed += len({len(chunk.ids) == 1 for chunk in chunks}) == 2
        rows = lay_out(chunks)
        attend = backend.prepare(chunks, rows)
        for layer, game in enumerate(games):
            drawn = [game.numbers(len(rows.tokens), n) for n in (config.heads, config.kv_heads, config.kv_heads)]
            found = attend(layer, *drawn)
            assert found.sub(game.naive(chunks, *drawn)).abs().max() < within
    return mixed


SHAPES = [{}, {"heads": 4, "kv_heads": 4}, {"heads": 5, "kv_heads": 1}, {"window": 9}, {"window": 40}]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_naive_attention(shape: dict):
    """Ragged batches of prompts' chunks and decodes over scattered blocks, with and without a window."""
    config = config_of(**shape)
    mixed = [play(PaddedAttention(config, BLOCKS, torch.float64), config, seed, 1e-12) for seed in range(12)]
    assert sum(mixed) > 5


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention_is_asked_for_the_same(library: str, shape: dict):
    """Whichever generation: block tables, ends and windows say what the reference computes, all chunks in one call."""
    config = config_of(**shape)
    for seed in range(12):
        backend = FlashAttention(config, BLOCKS, torch.float64, library=LIBRARIES[library], device=CPU)
        assert backend.blocks == BLOCKS
        play(backend, config, seed, 1e-12)


@pytest.mark.parametrize(
    ("kind", "within"), [(None, 1e-5), (KvType.FLOAT32, 1e-5), (KvType.FLOAT16, 0.01), (KvType.BFLOAT16, 0.05), (KvType.INT8, 0.1), (KvType.FLOAT8, 0.3)]
)  # fmt: skip
def test_the_reference_keeps_keys_and_values_in_each_type(kind: KvType | None, within: float):
    """Near what went in, in every type; a tenth of that would not do for int8, so it is what was kept."""
    config = config_of()
    for seed in range(6):
        play(PaddedAttention(config, BLOCKS, torch.float32, kind=kind), config, seed, within, torch.float32)
    if kind is KvType.INT8:
        with pytest.raises(AssertionError):
            play(PaddedAttention(config, BLOCKS, torch.float32, kind=kind), config, 0, within / 100, torch.float32)


def test_float8_keeps_three_bits_of_every_number_of_a_row():
    """Also of those a ten-thousandth of the greatest: the row is scaled to fill the type, whose exponent has four bits."""
    store = Store((1, 1, 4, BLOCK_TOKENS, 64), KvType.FLOAT8, torch.float32, CPU)
    rows = torch.logspace(-4, 0, 64)[None, None] * torch.tensor([1.0, -300.0])[None, :, None]
    store.write(0, torch.tensor([3, 17]), rows)
    kept = store.read(0, torch.tensor([0, 1]))[:, [3, 17]]
    assert ((kept - rows).abs() <= rows.abs() / 15).all()
    assert ((kept - rows).abs() > rows.abs() / 50).any()


def test_a_bfloat16_beyond_a_half_stays_finite():
    """The bound of a half is none of bfloat16's numbers."""
    store = Store((1, 1, 1, BLOCK_TOKENS, 2), KvType.FLOAT16, torch.bfloat16, CPU)
    store.write(0, torch.tensor([0]), torch.tensor([[[1e6, -1e6]]], dtype=torch.bfloat16))
    assert store.read(0, torch.tensor([0])).isfinite().all()


def test_the_newest_generation_that_is_there_is_taken():
    """Third, then second, then none; nothing else is imported."""
    asked: list[str] = []

    def load(name: str, there: dict[str, object]) -> object:
        asked.append(name)
        if name not in there:
            raise ImportError(name)
        return there[name]

    third = {"flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=with_kvcache)}
    second = {"flash_attn": SimpleNamespace(flash_attn_varlen_func=varlen)}
    assert isinstance(find_library(lambda name: load(name, third | second)), Flash3)
    assert isinstance(find_library(lambda name: load(name, second)), Flash2)
    assert find_library(lambda name: load(name, {})) is None
    assert set(asked) == {"flash_attn_interface", "flash_attn"}


@pytest.mark.parametrize("kind", [None, *KvType], ids=str)
def test_what_is_no_number_spoils_nobody(kind: KvType | None):
    """A sequence whose keys and values are infinite, none or too large leaves blocks that the next one can use."""
    config = config_of()
    spoilt = PaddedAttention(config, BLOCKS, torch.float32, kind=kind)
    slots = torch.arange(BLOCKS * BLOCK_TOKENS)
    rows = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38])[slots % 4][:, None, None].expand(
        -1, config.kv_heads, config.head_dim
    )
    for layer in range(config.layers):
        spoilt._cache.write(layer, slots, rows, rows)
    play(spoilt, config, 3, 1.0, torch.float32)
