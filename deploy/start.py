"""`python -m deploy.start SERVICE`: the variables that `deploy.setup` laid out, then the service, in our place.

What the container was given by hand wins over what was laid out. A service that serves models waits until the catalog
is there: the model may still be on its way.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN = Path("/run/chorus")
CATALOG = RUN / "models" / "catalog.json"
MODEL_S_MAX = 3600.0  # a slow line, a large model
LOOK_EVERY_S = 0.2
SHARES = 3  # engines on one machine, by default: two of the fast model, one of the mini model
MODULES = {"ops": "ops.main"}  # what is not services.<name>


def variables(lines: str) -> dict[str, str]:
    """`NAME=value` lines."""
    return dict(line.split("=", 1) for line in lines.splitlines() if "=" in line)


def environment(service: str, laid_out: Mapping[str, str], given: Mapping[str, str], *, host: str) -> dict[str, str]:
    """What the service is started with. An empty variable counts as not given; a name is made from the host's."""
    chosen = {name: value for name, value in given.items() if value}
    return {"CHORUS_NAME": f"{service}-{host}", "CHORUS_DATA_DIR": "/tmp", **laid_out, **chosen}  # noqa: S108 - our own


def replica(env: Mapping[str, str], catalog: Mapping[str, Any], cores: int) -> dict[str, str]:
    """A replica's model by its role (fast or mini), and its share of the machine's cores."""
    role = env.get("CHORUS_ROLE", "fast")
    card = next((card for card in catalog["models"] if card.get("role", "fast") == role), catalog["models"][0])
    threads = env.get("CHORUS_THREADS") or str(max(1, cores // SHARES))
    weights = {"CHORUS_STUB": "1"} if card["file"] == "stub" else {"CHORUS_MODEL_FILE": card["file"]}
    return {
        "CHORUS_MODEL": card["id"],
        "CHORUS_CONTEXT_TOKENS": str(card["context_tokens"]),
        "CHORUS_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        **weights,
    }


def wait_for(path: Path, deadline_s: float) -> bytes:
    """The file's bytes once it is there; exits with a sentence when it does not come."""
    until = time.monotonic() + deadline_s
    said = False
    while not path.exists():
        if not said:
            sys.stderr.write("waiting for the model; `docker compose logs model` shows how far it is\n")
            said = True
        if time.monotonic() > until:
            sys.exit(f"cannot start: no model within {deadline_s:.0f} s. Look at `docker compose logs model`.")
        time.sleep(LOOK_EVERY_S)
    return path.read_bytes()


def main(service: str, arguments: list[str]) -> None:
    try:
        laid_out = variables((RUN / f"{service}.env").read_text())
    except OSError as error:
        sys.exit(f"cannot start: {RUN}/{service}.env cannot be read ({error.strerror}). `docker compose logs setup`?")
    env = environment(service, laid_out, os.environ, host=socket.gethostname())
    if catalog := env.get("CHORUS_CATALOG"):
        models = json.loads(wait_for(Path(catalog), MODEL_S_MAX))
        if service == "replica":
            env |= replica(env, models, len(os.sched_getaffinity(0)))
    module = MODULES.get(service, f"services.{service}")
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], env)  # noqa: S606 - our own interpreter


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
