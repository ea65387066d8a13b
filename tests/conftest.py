"""Fixtures every test folder may use; the servers start only when a test asks for one."""

from tests.integration.servers import (
    fresh_nats,
    nats_server,
    postgres_server,
    postgres_url,
    valkey_server,
    valkey_url,
)

__all__ = ["fresh_nats", "nats_server", "postgres_server", "postgres_url", "valkey_server", "valkey_url"]
