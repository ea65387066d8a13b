"""The parts of a Llama-family layer. Rows are tokens; nothing here knows of sequences."""

import torch
from torch.nn import functional

from services.replica.model.config import ModelConfig

_PACKED_FOR = 32  # rows; the layout is the same for one and for hundreds


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> the same matrix in the layout that oneDNN's kernels read, which only `product` understands.

    A product with an unpacked matrix spends up to a third of its time on laying it out, again in every step. Returned
    as it is where that library has nothing to offer: on a GPU, in other numbers than float32, in a torch without it.
    """
    has_it: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (has_it and weight.is_cpu and weight.dtype == torch.float32):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)  # noqa: SLF001 - its only door
    return packed


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, in], [out, in] or what `pack` made of it -> [rows, out]."""
    if weight.is_mkldnn:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
        return found
    return functional.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., width] -> the same shape, each row by itself; squares of halves are summed in float32."""
    return functional.rms_norm(x, weight.shape, weight, eps)


Turned = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of a step's rows, [rows, 1, head_dim / 2] each


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

    def at(self, positions: torch.Tensor) -> Turned:
        """[rows] -> how a step's rows are turned, in all its layers."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] -> the same shape, every head turned as its row's position says."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]; `gate_up` holds both matrices one above the other."""
    gate, up = product(x, gate_up).chunk(2, dim=-1)
    return product(functional.silu(gate).mul_(up), down)
