"""Fixtures every test folder may use; the servers start only when a test asks for one."""

from pathlib import Path

import pytest

from tests.integration.servers import (
    fresh_nats,
    nats_server,
    postgres_server,
    postgres_url,
    valkey_server,
    valkey_url,
)

__all__ = ["fresh_nats", "nats_server", "postgres_server", "postgres_url", "valkey_server", "valkey_url"]

_LONG = tuple(Path(__file__).parent / folder for folder in ("drill", "browser", "integration"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole systems first, in the random order they have: two workers then end at about the same time."""
    items.sort(key=lambda item: not any(folder in item.path.parents for folder in _LONG))
