"""The parts of a Llama-family layer. Rows are tokens; nothing here knows of sequences."""

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class Rope:
    """Rotary positions: the number pairs (i, i + d/2) of each head are turned by position / theta^(2i / d)."""

    def __init__(self, head_dim: int, context: int, theta: float, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = torch.outer(torch.arange(context, dtype=torch.float64), theta**-exponents)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim], [rows] -> [rows, heads, head_dim]."""
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]; `gate_up` holds both matrices one above the other."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)
