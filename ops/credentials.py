"""Passwords of the embedded servers: generated once, kept in the data folder for its owner alone."""

import secrets
from pathlib import Path

import msgspec

from ops.files import write_private
from shared.errors import ConfigError
from shared.settings import Secret


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """One password per NATS user, one for PostgreSQL, one for Valkey."""

    nats: dict[str, str]
    postgres: str
    valkey: str

    def nats_password(self, user: str) -> Secret:
        return Secret(self.nats[user])

    def __repr__(self) -> str:
        return f"Credentials(nats={sorted(self.nats)})"


def _password() -> str:
    return secrets.token_hex(24)  # letters and digits only: it stands in URLs and configuration files


def load_credentials(path: Path, users: tuple[str, ...]) -> Credentials:
    """Read `path`; make it, or add the users it lacks, when needed."""
    known = Credentials(nats={}, postgres="", valkey="")
    if path.exists():
        try:
            known = msgspec.json.decode(path.read_bytes(), type=Credentials)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not readable as credentials ({error}): remove the data folder") from error
    full = Credentials(
        nats={user: known.nats.get(user) or _password() for user in users},
        postgres=known.postgres or _password(),
        valkey=known.valkey or _password(),
    )
    if full != known:
        write_private(path, msgspec.json.format(msgspec.json.encode(full)))
    return full
