"""The engine's loop under parameters and prompts that make little sense; `python -m tests.fuzz.engine` runs 20,000."""

from pathlib import Path

import pytest

from tests.fuzz.engine import fuzz, kernel_runner
from tests.unit.replica.native_models import needs_kernels

SEQUENCES = 500


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_no_parameter_prompt_or_cancel_kills_or_stalls_the_loop(seed: int):
    """Everyone is answered once, and every way of being answered occurs; no block is lost."""
    told = fuzz(SEQUENCES, seed)
    wanted = {
        "stop_token",
        "max_tokens",
        "stop_sequence",
        "cancelled",
        "bad_request",
        "never_fits",
        "refused at the door",
    }
    assert wanted <= told.keys()


@needs_kernels
def test_nor_on_the_kernels(tmp_path: Path):
    """They draw under every cut themselves, and beside rows that the sampler draws."""
    with kernel_runner(tmp_path) as runner:
        assert {"max_tokens", "cancelled"} <= fuzz(SEQUENCES, 14, runner).keys()
