"""How large keys and values are in each of the cache's number types; no torch.

    block bytes = 2 layers x kv_heads x 16 tokens x (head_dim x bytes of a number + 4 where a scale stands beside them)

A row of a head (its keys, or its values, of one token) in int8 or float8 has one float32 scale.
"""

from enum import Enum

from services.replica.core.plan import blocks_for
from services.replica.model.config import ModelConfig
from shared.limits import BLOCK_TOKENS


class KvType(Enum):
    """What the cache keeps numbers as. The values are the setting's."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    FLOAT8 = "float8"  # four bits of exponent, three of mantissa; of the torch runner, on CUDA


NUMBER_BYTES = {KvType.FLOAT32: 4, KvType.BFLOAT16: 2, KvType.FLOAT16: 2, KvType.INT8: 1, KvType.FLOAT8: 1}
SCALED = (KvType.INT8, KvType.FLOAT8)
SCALE_BYTES = 4


def kv_block_bytes(config: ModelConfig, kind: KvType) -> int:
    row = config.head_dim * NUMBER_BYTES[kind] + (SCALE_BYTES if kind in SCALED else 0)
    return 2 * config.layers * config.kv_heads * BLOCK_TOKENS * row


def conversations_held(config: ModelConfig, kind: KvType, memory_bytes: int, tokens: int) -> int:
    """Conversations of `tokens` tokens each that so much KV memory holds at once, none sharing a block."""
    return memory_bytes // kv_block_bytes(config, kind) // blocks_for(tokens)
