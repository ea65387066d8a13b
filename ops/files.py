"""Small file habits: private, atomic writes and ports that are free."""

import os
import random
import socket
import tempfile
from pathlib import Path

from shared.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Below Linux's range for outgoing connections, so that none of those takes a port while its server restarts.
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 200


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` at once and whole; only its owner may read it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:  # mkstemp makes it 0600
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port nobody listens on now. Another process may still take it first: whoever uses it must say so clearly."""
    for port in random.sample(_PORTS, _PORT_TRIES):
        if port_is_free(port):
            return port
    raise ConfigError(f"none of {_PORT_TRIES} ports tried in {_PORTS.start}..{_PORTS.stop} is free on {LOOPBACK}")
