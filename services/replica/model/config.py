"""The shape of a Llama-family model: one definition, and what differs from model to model stands here.

Read from a model file's metadata by `gguf_checkpoint` and `hf_config`; nothing else asks which family a model is of.
"""

import math
from dataclasses import dataclass

from shared.limits import MODEL_CONTEXT_MAX, MODEL_SIZE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes in numbers, not bytes. `heads / kv_heads` query heads share a key-value head."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float  # of RMSNorm
    theta: float  # of RoPE
    rope_factors: tuple[float, ...] = ()  # RoPE turns pair i slower by the i-th of them; none: as theta says
    qkv_bias: bool = False  # queries, keys and values have a bias (Qwen 2)
    qk_norm: bool = False  # each head of queries and keys is normalised before it is turned (Qwen 3)
    window: int = 0  # a token sees itself and the window - 1 before it (Mistral); 0: all
    tied: bool = True  # the embedding is the head's matrix

    def __post_init__(self) -> None:
        """ValueError: these sizes make no model."""
        sizes = (self.vocab, self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.ffn)
        if not 1 <= min(sizes) <= max(sizes) <= MODEL_SIZE_MAX:
            raise ValueError(f"every size of a model must be 1..{MODEL_SIZE_MAX}")
        if not 1 <= self.context <= MODEL_CONTEXT_MAX:
            raise ValueError(f"its context is {self.context}, and 1..{MODEL_CONTEXT_MAX} tokens are built")
        if self.heads % self.kv_heads or self.head_dim % 2 or self.head_dim < 2:
            raise ValueError(f"{self.heads} heads of {self.head_dim} do not go with {self.kv_heads} key-value heads")
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(f"{len(self.rope_factors)} RoPE factors do not go with heads of {self.head_dim}")
        if not all(math.isfinite(factor) and factor > 0 for factor in (*self.rope_factors, self.eps, self.theta)):
            raise ValueError("epsilon, theta and the RoPE factors must be finite and above 0")
        if not 0 <= self.window < self.context:
            raise ValueError(f"a window of {self.window} is none in a context of {self.context}")

    @property
    def kv_numbers(self) -> int:
        """Numbers that the KV cache keeps for each token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def linear_factors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Every pair turns slower by the same factor: positions are squeezed together."""
    return (factor,) * (head_dim // 2)


def llama3_factors(
    head_dim: int, theta: float, *, factor: float, low: float, high: float, original: float
) -> tuple[float, ...]:
    """Llama 3's scaling: slow pairs turn slower by `factor`, fast ones as ever, those between by a share of it.

    Slow: a whole turn takes more than original / low tokens; fast: fewer than original / high.
    """
    if not (factor >= 1 and 0 < low < high and original > 0):
        raise ValueError(f"RoPE scaling by {factor} between {low} and {high} of {original} makes no sense")
    factors = []
    for pair in range(head_dim // 2):
        turn = 2 * math.pi * theta ** (2 * pair / head_dim)  # tokens
        share = min(max((original / turn - low) / (high - low), 0.0), 1.0)  # 0: slow, 1: fast
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)
