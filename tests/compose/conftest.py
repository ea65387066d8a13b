"""Fixtures of the compose tests: one stack for all of them, ended with the run.

CHORUS_COMPOSE=1           run them (`make compose-test`); else they are skipped
CHORUS_COMPOSE_WHEELS      a folder of wheels for builds that reach no index
CHORUS_MODELS              a folder with the model, mounted instead of fetching it
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stack import Stack, copy_tree
from tests.integration.system import free_port_pair

NEED_ENGINE = [
    "test_operator.py",
    "test_real_model.py",
    "test_stack.py",
    "test_through_the_proxy.py",
    "test_whole_path.py",
]
collect_ignore = [] if "CHORUS_COMPOSE" in os.environ else NEED_ENGINE


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stub profile, brought up from nothing."""
    folder = tmp_path_factory.mktemp("chorus")
    wheels = os.environ.get("CHORUS_COMPOSE_WHEELS")
    copy_tree(folder, Path(wheels) if wheels else None)
    settings = {"PIP_NO_INDEX": "1"} if wheels else {}
    made = Stack(data=folder, port=free_port_pair(), settings={"CHORUS_STUB_TPS": "60", **settings})
    try:
        made.down("--volumes")
        made.up()
        yield made
    finally:
        made.down("--volumes")


@pytest.fixture(scope="module")
def real_stack(stack: Stack) -> Iterator[Stack]:
    """The default profile in place of the stub, on the same volumes: the real model, mounted."""
    stack.down()
    settings = {**stack.settings, "CHORUS_MODELS": os.environ["CHORUS_COMPOSE_MODEL"]}
    made = Stack(data=stack.data, port=stack.port, profile="cpu", settings=settings)
    try:
        made.up()
        yield made
    finally:
        made.down()
        stack.up()
