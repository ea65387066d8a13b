"""The forward pass of a Llama-family model in torch: one call per step, prompts and decodes mixed."""

from collections.abc import Sequence
from typing import Protocol

import torch

from services.replica.core.plan import SeqChunk, StepPlan
from services.replica.model.attention import Attend, AttentionBackend, PaddedAttention, lay_out
from services.replica.model.config import ModelConfig
from services.replica.model.layers import Rope, Turned, product, rms_norm, swiglu, turn
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

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        blocks: int,
        context: int,
        attention: AttentionBackend | None = None,
    ) -> None:
        """`attention` brings its own blocks; without one the reference is made, with `blocks` of them."""
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self._config, self._weights, self._device = config, weights, device
        self._rope = Rope(config, context, dtype, device)
        self._attention = attention or PaddedAttention(config, blocks, dtype, device=device)

    @property
    def blocks_total(self) -> int:
        return self._attention.blocks

    def logits(self, plan: StepPlan) -> torch.Tensor:
        return self.every(plan.chunks, last_only=True)

    @torch.inference_mode()
    def every(self, chunks: Sequence[SeqChunk], *, last_only: bool = False) -> torch.Tensor:
        """The logits of all rows, [rows, vocab], or of those alone whose next token is sampled."""
        rows = lay_out(chunks, self._device)
        attend, turned = self._attention.prepare(chunks, rows), self._rope.at(rows.positions)
        x = self._weights.embedding[rows.tokens]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._mixed(x, index, layer, turned, attend)
            x = x + swiglu(rms_norm(x, layer.ffn_norm, self._config.eps), layer.gate_up, layer.down)
        wanted = x[rows.last_rows] if last_only else x
        logits = product(rms_norm(wanted, self._weights.final_norm, self._config.eps), self._weights.head)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _mixed(
        self,
        x: torch.Tensor,
        index: int,
        layer: LayerWeights,
        turned: Turned,
        attend: Attend,
    ) -> torch.Tensor:
        config = self._config
        projected = product(rms_norm(x, layer.attention_norm, config.eps), layer.qkv, layer.qkv_bias)
        heads = projected.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        queries, keys, values = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rms_norm(queries, layer.query_norm, config.eps), rms_norm(keys, layer.key_norm, config.eps)
        mixed = attend(index, turn(queries, *turned), turn(keys, *turned), values)
        return product(mixed.flatten(1), layer.attention_out)
