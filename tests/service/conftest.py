"""What holds for every test that runs whole services in one event loop."""

import pytest

from services.gateway import streams


@pytest.fixture(autouse=True)
def nobody_sheds_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a gateway shares its loop with everybody else, the tests included: its lag says nothing about its own load."""
    monkeypatch.setattr(streams, "LOOP_LAG_S_MAX", 60.0)
