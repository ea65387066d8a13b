"""The forward pass of a Llama-family model in plain torch: one call per step, prompts and decodes mixed."""

from typing import Protocol

import torch
from torch.nn import functional

from services.replica.core.plan import StepPlan
from services.replica.model.attention import StepLayout, attend, lay_out
from services.replica.model.config import ModelConfig
from services.replica.model.kv_cache import KvCache
from services.replica.model.layers import Rope, rms_norm, swiglu
from services.replica.model.loader import LayerWeights, Weights


class Forward(Protocol):
    """What a `TorchRunner` drives: weights and KV memory behind one call per step. Other backends take this place."""

    @property
    def blocks_total(self) -> int: ...

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute every chunk, write its keys and values; [sampled chunks, vocab] float32 or wider, ours to change."""
        ...


class Transformer:
    """`Forward` in torch's own operations; precision and device are those of the weights."""

    def __init__(self, config: ModelConfig, weights: Weights, *, blocks: int, context: int) -> None:
        dtype = weights.embedding.dtype
        self._config, self._weights = config, weights
        self._rope = Rope(config.head_dim, context, config.theta, dtype)
        self._cache = KvCache(config, blocks, dtype)

    @property
    def blocks_total(self) -> int:
        return self._cache.blocks

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        layout = lay_out(plan.chunks)
        x = self._weights.embedding[layout.tokens]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(x, index, layer, layout)
            x = x + swiglu(rms_norm(x, layer.ffn_norm, self._config.eps), layer.gate_up, layer.down)
        last = rms_norm(x[layout.last_rows], self._weights.final_norm, self._config.eps)
        return functional.linear(last, self._weights.head)

    def _attention(self, x: torch.Tensor, index: int, layer: LayerWeights, layout: StepLayout) -> torch.Tensor:
        config = self._config
        projected = functional.linear(rms_norm(x, layer.attention_norm, config.eps), layer.qkv)
        heads = projected.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        queries, keys, values = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        self._cache.write(index, layout.slots, self._rope.turn(keys, layout.positions), values)
        mixed = attend(layout, self._cache, index, self._rope.turn(queries, layout.positions))
        return functional.linear(mixed.flatten(1), layer.attention_out)
