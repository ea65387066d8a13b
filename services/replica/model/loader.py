"""A checkpoint's weights as torch tensors, dequantised."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.replica.model.checkpoint import Checkpoint, Part
from services.replica.model.layers import pack


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in], packed: for `layers.product` alone. Products that share their input are one matrix."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim, hidden]: queries, keys, values
    attention_out: torch.Tensor  # [hidden, heads head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]: gate, up
    down: torch.Tensor  # [hidden, ffn]
    qkv_bias: torch.Tensor | None = None  # [(heads + 2 kv_heads) head_dim]
    query_norm: torch.Tensor | None = None  # [head_dim]
    key_norm: torch.Tensor | None = None  # [head_dim]


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden], packed; where nothing packs, the embedding itself when they are tied


def load_weights(
    checkpoint: Checkpoint,
    progress: Callable[[float], None],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Weights:
    """All weights. Raises ModelFileError when a tensor is missing, misshapen, or not understood."""
    config = checkpoint.config

    def tensor(*parts: Part, layer: int = 0) -> torch.Tensor:
        found = [checkpoint.floats(part, layer) for part in parts]
        whole = found[0] if len(found) == 1 else np.concatenate(found)
        return torch.from_numpy(whole).to(dtype).to(device)

    layers = []
    for layer in range(config.layers):
        layers.append(
            LayerWeights(
                attention_norm=tensor(Part.ATTENTION_NORM, layer=layer),
                qkv=pack(tensor(Part.QUERY, Part.KEY, Part.VALUE, layer=layer)),
                attention_out=pack(tensor(Part.ATTENTION_OUT, layer=layer)),
                ffn_norm=tensor(Part.FFN_NORM, layer=layer),
                gate_up=pack(tensor(Part.GATE, Part.UP, layer=layer)),
                down=pack(tensor(Part.DOWN, layer=layer)),
                qkv_bias=tensor(Part.QUERY_BIAS, Part.KEY_BIAS, Part.VALUE_BIAS, layer=layer)
                if config.qkv_bias
                else None,
                query_norm=tensor(Part.QUERY_NORM, layer=layer) if config.qk_norm else None,
                key_norm=tensor(Part.KEY_NORM, layer=layer) if config.qk_norm else None,
            )
        )
        progress((layer + 1) / (config.layers + 1))
    embedding = tensor(Part.EMBEDDING)
    head = pack(embedding if config.tied else tensor(Part.HEAD))
    final_norm = tensor(Part.FINAL_NORM)
    checkpoint.refuse_unread()
    progress(1.0)
    return Weights(embedding, tuple(layers), final_norm, head)
