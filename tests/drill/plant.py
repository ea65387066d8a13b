"""The Chorus that drills are held on: two of each service, scripted replicas with room for one another's replies."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.integration.system import System, running

TPS = 10.0  # of each reply
ROOM = 160  # sequences a replica may run: when one dies, the others take its replies at once


@contextlib.contextmanager
def stub_plant(data: Path, *, tps: float = TPS, replicas: int = 2, instances: int = 2) -> Iterator[System]:
    flags = ["--stub", "--stub-tps", f"{tps:g}", "--replicas", str(replicas), "--instances", str(instances)]
    with running(data, *flags, environment={"CHORUS_RUNNING_MAX": str(ROOM)}) as system:
        yield system


@contextlib.contextmanager
def model_plant(data: Path, *, replicas: int = 2) -> Iterator[System]:
    with running(data, "--replicas", str(replicas)) as system:
        yield system


def model_file() -> Path:
    return Path(os.environ.get("CHORUS_MODEL_FILE", ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
