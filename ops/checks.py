"""What must hold before anything starts. Each check raises ConfigError with a sentence that says what to do."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ops.files import port_is_free
from shared.errors import ConfigError
from shared.gguf import GgufFile
from shared.hf_files import CONFIG, TOKENIZER, read_bytes
from shared.limits import MIB

DISK_FREE_MIN = 500 * MIB


@contextmanager
def only_one(data: Path) -> Iterator[None]:
    """Make the data folder and hold it while the block runs."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = (data / "up.lock").open("a+")
    except OSError as error:
        raise ConfigError(f"the data folder {data} cannot be written ({error}): choose another with --data") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise ConfigError(
                f"`chorus up` (pid {lock.read().strip() or 'unknown'}) already runs on {data}: "
                "stop it first, or choose another folder with --data"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def check_disk(data: Path, free: int) -> None:
    """`free`: bytes left where `data` lies."""
    if free < DISK_FREE_MIN:
        raise ConfigError(
            f"only {free // MIB} MiB are free where {data} lies, and {DISK_FREE_MIN // MIB} MiB are needed: "
            "make room, or choose another folder with --data"
        )


def check_ports(ports: Iterable[int]) -> None:
    for port in ports:
        if not port_is_free(port):
            raise ConfigError(f"port {port} is in use: choose another with --port (the second gateway takes the next)")


def check_model(file: Path) -> None:
    """Its head is read, every offset in it checked against its size; a folder must hold what says what it is."""
    if not file.exists():
        raise ConfigError(f"there is no model file {file}: run `chorus models fetch`, or name one with --model-file")
    if file.is_dir():
        for name in (CONFIG, TOKENIZER):
            read_bytes(file / name)
        return
    try:
        with GgufFile(file):
            pass
    except OSError as error:
        raise ConfigError(f"the model file {file} cannot be read ({error}): name another with --model-file") from error
