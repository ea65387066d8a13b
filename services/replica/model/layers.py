"""The parts of a Llama-family layer. Rows are tokens; nothing here knows of sequences."""

import torch
from torch.nn import functional

from services.replica.model.config import ModelConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., width] -> the same shape, each row of `width` numbers by itself."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class Rope:
    """Rotary positions: pair i of a head, (i, i + d/2), is turned by position / theta^(2i / d) / factor i."""

    def __init__(
        self, config: ModelConfig, context: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        turns = config.theta**-exponents
        if config.rope_factors:
            turns /= torch.tensor(config.rope_factors, dtype=torch.float64)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), turns)
        self._cos, self._sin = (table.to(dtype).to(device) for table in (angles.cos(), angles.sin()))

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim], [rows] -> [rows, heads, head_dim]."""
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]; `gate_up` holds both matrices one above the other."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)
