"""Weights from a GGUF file as torch tensors, dequantised."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.replica.model.config import ModelConfig
from services.replica.model.weights_file import Floats, TensorReader, halves
from shared.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in]. Products that share their input are one matrix."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim, hidden]: queries, keys, values
    attention_out: torch.Tensor  # [hidden, heads head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]: gate, up
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself when they are tied


def load_weights(file: GgufFile, config: ModelConfig, progress: Callable[[float], None]) -> Weights:
    """All weights as float32. Raises ModelFileError when a tensor is missing, misshapen, or not understood."""
    reader = TensorReader(file)
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = []
    for index in range(config.layers):
        name = f"blk.{index}."
        query = reader.read(f"{name}attn_q.weight", q_rows, config.hidden)
        key = reader.read(f"{name}attn_k.weight", kv_rows, config.hidden)
        value = reader.read(f"{name}attn_v.weight", kv_rows, config.hidden)
        gate = reader.read(f"{name}ffn_gate.weight", config.ffn, config.hidden)
        up = reader.read(f"{name}ffn_up.weight", config.ffn, config.hidden)
        layers.append(
            LayerWeights(
                attention_norm=_tensor(reader.read(f"{name}attn_norm.weight", config.hidden)),
                qkv=_tensor(np.concatenate([halves(query, config.heads), halves(key, config.kv_heads), value])),
                attention_out=_tensor(reader.read(f"{name}attn_output.weight", config.hidden, q_rows)),
                ffn_norm=_tensor(reader.read(f"{name}ffn_norm.weight", config.hidden)),
                gate_up=_tensor(np.concatenate([gate, up])),
                down=_tensor(reader.read(f"{name}ffn_down.weight", config.hidden, config.ffn)),
            )
        )
        progress((index + 1) / (config.layers + 1))
    embedding = _tensor(reader.read("token_embd.weight", config.vocab, config.hidden))
    tied = "output.weight" not in file.tensors
    head = embedding if tied else _tensor(reader.read("output.weight", config.vocab, config.hidden))
    final_norm = _tensor(reader.read("output_norm.weight", config.hidden))
    reader.refuse_unread()
    return Weights(embedding, tuple(layers), final_norm, head)


def _tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
