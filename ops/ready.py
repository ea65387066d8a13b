"""`DIR/ready.json`: what runs and how to reach it, for its owner alone. It is there while `chorus up` is ready."""

from pathlib import Path

import msgspec

from ops.files import write_private
from shared.errors import ConfigError

DEFAULT_DATA = Path(".chorus")
_NAME = "ready.json"


class ServiceEntry(msgspec.Struct, frozen=True):
    name: str
    pid: int
    http: str


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """`nats`, `postgres` and `redis` are URLs with the operator's passwords in them."""

    gateways: tuple[str, ...]
    keys: dict[str, str]  # tier -> API key
    nats: str
    postgres: str
    redis: str
    services: tuple[ServiceEntry, ...]
    region: str = "local"


def write_ready(data: Path, ready: Ready) -> None:
    write_private(data / _NAME, msgspec.json.format(msgspec.json.encode(ready)))


def remove_ready(data: Path) -> None:
    (data / _NAME).unlink(missing_ok=True)


def read_ready(data: Path) -> Ready:
    """Raises ConfigError with what to do when nothing runs there."""
    try:
        return msgspec.json.decode((data / _NAME).read_bytes(), type=Ready)
    except FileNotFoundError as error:
        raise ConfigError(
            f"Chorus is not running on {data}: start it with `chorus up`, or name its data folder with --data"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{data / _NAME} cannot be read ({error}): start `chorus up` again") from error
