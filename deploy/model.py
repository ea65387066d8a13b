"""`python -m deploy.model [--stub]`: the model in its volume or mounted folder, then the catalog that names it.

One GGUF file that is there already is taken as it is; else the default model is fetched and checked, once.
"""

import sys
from pathlib import Path

import msgspec

from deploy.setup import CATALOG
from ops.files import write_private
from ops.models import SMOLLM2, fetch
from shared.catalog import STUB_FILE, local_catalog
from shared.errors import ConfigError

MODELS = Path("/models")


def model_file(folder: Path) -> Path:
    """The model in `folder`; raises ConfigError with what to do."""
    found = sorted(folder.glob("*.gguf"))
    others = [file for file in found if file.name != SMOLLM2.file_name]
    if len(others) > 1:
        raise ConfigError(f"{len(others)} models are in the folder: leave the one that is to be served")
    return others[0] if others else fetch(SMOLLM2, folder)


def main(arguments: list[str]) -> None:
    file = STUB_FILE if "--stub" in arguments else str(model_file(MODELS))
    write_private(CATALOG, msgspec.json.format(msgspec.json.encode(local_catalog(file))))
    CATALOG.chmod(0o444)  # no secret: every service reads it
    sys.stdout.write(f"serving {file}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"model: {error}")
