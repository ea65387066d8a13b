"""The parts of a torch layer against what they stand for."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from services.replica.model.layers import pack, product, rms_norm


@pytest.fixture(params=[1, 2, 3])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 33, 200])
@pytest.mark.parametrize("out", [64, 96, 7, 130])
@pytest.mark.usefixtures("threads")
def test_a_product_with_a_packed_weight_is_the_product(rows: int, out: int):
    """What oneDNN lays out for itself gives the same numbers, with a bias or none, and leaves the weight as it was."""
    made = torch.Generator().manual_seed(rows * 1000 + out)
    x, weight, bias = (torch.randn(shape, generator=made) for shape in ((rows, 48), (out, 48), (out,)))
    before, packed = weight.clone(), pack(weight)
    assert packed.is_mkldnn == torch.backends.mkldnn.is_available()
    for added in (None, bias):
        found = product(x, packed, added)
        assert found.is_contiguous()
        torch.testing.assert_close(found, functional.linear(x, weight, added))
    assert torch.equal(weight, before)


def test_only_float32_is_packed():
    """Other numbers, and a GPU's, have kernels that want the plain matrix."""
    for dtype in (torch.float64, torch.bfloat16):
        weight = torch.ones(4, 4, dtype=dtype)
        assert pack(weight) is weight
    elsewhere = torch.ones(4, 4, device="meta")
    assert pack(elsewhere) is elsewhere


def test_the_squares_of_halves_are_summed_exactly_enough():
    """Computed in bfloat16 throughout, as ours was, a row would be off by more than a number's own precision."""
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1)) * 30
    wanted = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)
    found = rms_norm(x.to(torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16), 1e-5)
    assert ((found.float() - wanted).abs() <= wanted.abs() * 2**-7).all()
