"""`python -m deploy.model [--stub]`: the model in its volume or mounted folder, then the catalog that names it.

One GGUF file that is there already is taken as it is; else the default model is fetched and checked, once.
"""

import sys
from pathlib import Path

import msgspec

from deploy.start import CATALOG
from ops.models import SMOLLM2, fetch
from shared.catalog import STUB_FILE, local_catalog
from shared.errors import ConfigError

MODELS = Path("/models")
REAL, STUB = frozenset({"cpu", "gpu"}), frozenset({"stub"})  # profiles, by what they serve


def chosen(folder: Path) -> str:
    """The name of the file that is served out of `folder`, fetched or not; raises ConfigError with what to do."""
    others = sorted(file.name for file in folder.glob("*.gguf") if file.name != SMOLLM2.file_name)
    if len(others) > 1:
        raise ConfigError(f"{len(others)} models are in the folder: leave the one that is to be served")
    return others[0] if others else SMOLLM2.file_name


def catalog(file: str) -> bytes:
    return msgspec.json.format(msgspec.json.encode(local_catalog(file)))


def coming(profiles: str, folder: Path) -> bytes | None:
    """The catalog that this step will write under these profiles; None: it is not known, or its model not there."""
    names = frozenset(profiles.split(","))
    if bool(names & REAL) == bool(names & STUB):
        return None
    if names & STUB:
        return catalog(STUB_FILE)
    try:
        name = chosen(folder)
    except ConfigError:
        return None
    return catalog(str(MODELS / name)) if (folder / name).exists() else None


def publish(path: Path, data: bytes) -> None:
    """Replace `path` whole. It is no secret: every service reads it, whenever it looks."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of a run that was cut off
    part.write_bytes(data)
    part.chmod(0o444)
    part.replace(path)


def main(arguments: list[str]) -> None:
    file = STUB_FILE
    if "--stub" not in arguments:
        name = chosen(MODELS)
        if name == SMOLLM2.file_name:
            fetch(SMOLLM2, MODELS)
        file = str(MODELS / name)
    publish(CATALOG, catalog(file))
    sys.stdout.write(f"serving {file}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"model: {error}")
