"""Torch's threads belong to the process: a test that sets them must not slow down the ones after it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A second thread costs more than the few numbers of these models take, and far more on a busy machine."""
    torch.set_num_threads(1)
