"""One slow system for all clients, and what each client's script said of it."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.replica.stub_runner import scripted_token
from shared.tokenizer import StubTokenizer
from tests.clients.install import CLIENTS, Client
from tests.clients.recorder import Heard, recorded
from tests.integration.system import System, running

PING_S = 1.0
TOKENS_PER_S = 0.9  # slower than the heartbeats, so that one falls between any two tokens
REPLICAS = 3
SCRIPT_S = 100.0
MODEL = "stub"
SEED = 11
WORDS = [StubTokenizer().decode([scripted_token(SEED, position)]) for position in range(4)]


@dataclass(frozen=True)
class Told:
    """What one script printed, and the heartbeats that it met within its streams."""

    results: dict[str, Any]
    heartbeats: int


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    flags = "--stub", "--stub-tps", f"{TOKENS_PER_S:g}", "--replicas", str(REPLICAS)
    with running(
        tmp_path_factory.mktemp("clients") / "data", *flags, environment={"CHORUS_PING_S": f"{PING_S:g}"}
    ) as system:
        yield system


@pytest.fixture(scope="module")
def told(chorus: System) -> Iterator[dict[str, Future[Told]]]:
    """By client: all scripts at once, since each mostly waits for the next token."""

    def run(client: Client, heard: Heard) -> Told:
        arguments = [*client.command, f"{heard.address}/v1", chorus.key(), MODEL, str(SEED), WORDS[3]]
        own = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LANGCHAIN_"))}
        done = subprocess.run(
            arguments, env={**own, **client.environment}, capture_output=True, text=True, timeout=SCRIPT_S, check=False
        )
        assert done.returncode == 0, f"{client.name} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return Told(json.loads(done.stdout.splitlines()[-1]), heard.within)

    here = [client for client in CLIENTS if client.installed]
    with ExitStack() as stack:
        ears = [stack.enter_context(recorded(gateway_of(chorus, at))) for at, _ in enumerate(here)]
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(here))))
        yield {client.name: pool.submit(run, client, heard) for client, heard in zip(here, ears, strict=True)}


def gateway_of(chorus: System, at: int) -> str:
    """The scripts take turns at the gateways."""
    return chorus.gateways[at % len(chorus.gateways)]
