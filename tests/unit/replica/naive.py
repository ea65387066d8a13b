"""The oracle: one sequence, everything recomputed for every token, no cache, no blocks, no batch.

Written apart from the engine's model on purpose: other tensor layouts, RoPE by complex numbers, a loop over heads.
"""

from collections.abc import Sequence

import torch

from services.replica.model.config import ModelConfig
from services.replica.model.loader import LayerWeights, Weights

torch.set_num_threads(1)  # a second thread costs more than these few numbers take


def tiny_config(vocab: int = 300) -> ModelConfig:
    return ModelConfig(
        vocab=vocab, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, context=512, eps=1e-5, theta=10_000.0
    )


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Weights:
    """In float64 no two logits are ever near enough for another order of sums to exchange them."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=dtype) * columns**-0.5 * 1.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(config.hidden, generator=generator, dtype=dtype)

    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(q_rows + 2 * kv_rows, config.hidden),
            attention_out=matrix(config.hidden, q_rows),
            ffn_norm=norm(),
            gate_up=matrix(2 * config.ffn, config.hidden),
            down=matrix(config.hidden, config.ffn),
        )
        for _ in range(config.layers)
    )
    embedding = torch.randn(config.vocab, config.hidden, generator=generator, dtype=dtype)
    return Weights(embedding, layers, norm(), embedding)


@torch.inference_mode()
def naive_logits(config: ModelConfig, weights: Weights, ids: Sequence[int], rows: int = 1) -> torch.Tensor:
    """[rows, vocab]: the logits after each of the last `rows` of `ids`."""
    x = weights.embedding[torch.tensor(list(ids))]
    length = len(ids)
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), config.theta ** (-2 * pairs / config.head_dim))
    turn = torch.polar(torch.ones_like(angles), angles)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in weights.layers:
        projected = _norm(x, layer.attention_norm, config.eps) @ _matrix(layer.qkv).T
        heads = projected.view(length, -1, config.head_dim)
        queries, keys = heads[:, : config.heads], heads[:, config.heads : config.heads + config.kv_heads]
        values = heads[:, config.heads + config.kv_heads :]
        mixed = []
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            scores = _turned(queries[:, head], turn) @ _turned(keys[:, shared], turn).T / config.head_dim**0.5
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ values[:, shared])
        x = x + torch.cat(mixed, dim=-1) @ _matrix(layer.attention_out).T
        gate, up = (_norm(x, layer.ffn_norm, config.eps) @ _matrix(layer.gate_up).T).split(config.ffn, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ _matrix(layer.down).T
    return _norm(x[-rows:], weights.final_norm, config.eps) @ _matrix(weights.head).T


def naive_greedy(config: ModelConfig, weights: Weights, ids: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `ids`."""
    grown = list(ids)
    for _ in range(count):
        grown.append(int(naive_logits(config, weights, grown)[0].argmax()))
    return grown[len(ids) :]


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense()  # what was packed for the kernels, as it was


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
