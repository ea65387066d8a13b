"""`chorus up` as a user runs it, and its bad luck: one clear sentence, nothing left running, a status that is not 0."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.integration.process_table import alive, group_members
from tests.integration.servers import RunningNats
from tests.integration.system import ROOT, System, eventually, free_port_pair, running
from tests.integration.wire import Heard, Wire

START_S = 90.0


def up(data: Path, *flags: str, port: int | None = None) -> subprocess.Popen[str]:
    """`chorus up --stub` with its words in a pipe."""
    command = [sys.executable, "-m", "ops.main", "up", "--data", str(data), "--port", str(port or free_port_pair())]
    return subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it said; it must have ended with a status that is not 0."""
    said, _ = process.communicate(timeout=START_S)
    assert process.returncode not in (0, None), said
    return said


def remembered(data: Path) -> list[int]:
    return [process["pid"] for process in json.loads((data / "processes.json").read_text())]


def nothing_left(pids: list[int]) -> None:
    assert pids, "something had been started"
    eventually(lambda: not any(group_members(pid) for pid in pids), "nothing is left running")


@contextmanager
def watched(data: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], "Words"]]:
    process = up(data, *flags)
    try:
        yield process, Words(process)
    finally:
        process.kill()
        process.communicate()


class Words:
    """What a running `chorus up` says, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def until(self, part: str) -> str:
        """Read on to the line with `part`; pytest's own timeout ends a wait that is in vain."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if part in line:
                return line
        raise AssertionError(f"`chorus up` ended and never said {part!r}")


# --- bad luck -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True])
def test_a_taken_port_is_said(tmp_path: Path, second: bool):
    """When the first or the second gateway's port is in use, the port and the flag to change it are named."""
    port = free_port_pair()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + second))
        other.listen()
        said = ended(up(tmp_path, "--stub", port=port))
    assert (
        said
        == f"chorus: port {port + second} is in use: choose another with --port (the second gateway takes the next)\n"
    )


def test_a_missing_model_is_said(tmp_path: Path):
    """Without the model file the command that fetches it is named."""
    said = ended(up(tmp_path, "--model-file", str(tmp_path / "none.gguf")))
    assert "there is no model file" in said
    assert "chorus models fetch" in said


def test_a_broken_model_is_said(tmp_path: Path):
    """A file that is no model is refused in one line, before anything starts."""
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all")
    said = ended(up(tmp_path, "--model-file", str(tmp_path / "bad.gguf")))
    assert "bad.gguf" in said
    assert len(said.splitlines()) == 1


def test_a_data_folder_that_cannot_be_made_is_said(tmp_path: Path):
    """A data folder in the place of a file is refused with the flag to choose another."""
    (tmp_path / "file").write_text("")
    said = ended(up(tmp_path / "file" / "data", "--stub"))
    assert "choose another with --data" in said
    assert len(said.splitlines()) == 1


def test_a_server_that_does_not_come_up_is_said(tmp_path: Path):
    """A broken database cluster ends the start with the server's own words, and the other servers are stopped."""
    (tmp_path / "postgres" / "cluster").mkdir(parents=True)
    said = ended(up(tmp_path, "--stub"))
    assert "chorus up: postgres did not come up" in said
    assert "postgres.log" in said
    nothing_left(remembered(tmp_path))
    assert not (tmp_path / "ready.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_stops_what_was_started(tmp_path: Path, number: signal.Signals):
    """Ctrl-C in the middle of the start: nothing is left running, and the status says that it was not ready."""
    with watched(tmp_path, "--stub") as (process, words):
        words.until("nats is ready")
        pids = remembered(tmp_path)
        process.send_signal(number)
        ended(process)
    nothing_left(pids)


def test_a_start_while_another_runs_is_refused(tmp_path: Path):
    """The same data folder cannot be used twice at a time."""
    with watched(tmp_path, "--stub") as (process, words):
        words.until("nats is ready")
        assert f"`chorus up` (pid {process.pid}) already runs" in ended(up(tmp_path, "--stub"))
        process.send_signal(signal.SIGTERM)
        ended(process)


# --- the whole ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("up") / "data", "--stub") as started:
        yield started


def test_ready_says_what_runs(system: System):
    """ready.json is private and names every process, each alive, and one key per tier."""
    assert stat.S_IMODE((system.data / "ready.json").stat().st_mode) == 0o600
    ready = system.ready
    assert len(ready["gateways"]) == 2
    assert set(ready["keys"]) == {"paid", "free", "background"}
    assert all(key.startswith("sk-chorus-") for key in ready["keys"].values())
    assert len(ready["services"]) == 10
    assert all(alive(service["pid"]) for service in ready["services"])


@pytest.mark.parametrize("name", ["usage-1", "safety-1", "router-1", "gateway-2"])
def test_a_killed_service_comes_back(system: System, name: str):
    """A service killed with SIGKILL runs again, ready, under another pid, which ready.json tells."""
    system.restarted(name, system.kill(name))


@pytest.mark.parametrize("name", ["nats", "postgres", "valkey"])
def test_a_killed_server_comes_back(system: System, name: str):
    """An embedded server killed with SIGKILL runs again, and every service becomes ready again."""
    processes = {each["name"]: each["pid"] for each in json.loads((system.data / "processes.json").read_text())}
    os.kill(processes[name], signal.SIGKILL)

    def back() -> bool:
        now = {each["name"]: each["pid"] for each in json.loads((system.data / "processes.json").read_text())}
        return now.get(name, processes[name]) != processes[name]

    eventually(back, f"{name} runs again", 30.0)
    for service in system.ready["services"]:
        system.restarted(service["name"], old_pid=0)


def test_keys_are_created_listed_and_revoked(system: System):
    """A key is shown once, listed without itself, works, and is refused soon after it was revoked."""
    made = system.command("keys", "create", "--tier", "free", "--user", "ada", "--org", "lab")
    key = made.stdout.strip()
    assert key.startswith("sk-chorus-"), made
    listed = system.command("keys", "list", "--user", "ada").stdout
    assert "lab/ada" in listed
    assert key not in listed
    asking = {"headers": {"Authorization": f"Bearer {key}"}, "timeout": 10}
    assert httpx.get(f"{system.gateways[0]}/v1/models", **asking).status_code == 200
    key_id = listed.split()[0]
    assert "is revoked" in system.command("keys", "revoke", key_id).stdout
    eventually(
        lambda: httpx.get(f"{system.gateways[0]}/v1/models", **asking).status_code == 401, "the key is forgotten", 5.0
    )
    assert "there is no key" in system.command("keys", "revoke", "key_none").stderr


def test_a_reply_s_log_is_printed(system: System):
    """`chorus log` shows the entries of a finished reply in order, from accepted to end."""
    body = {"model": "stub", "input": "hello", "max_output_tokens": 8}
    headers = {"Authorization": f"Bearer {system.key()}"}
    answers = []

    def taken() -> bool:
        """On a machine that is too busy a gateway may ask to come back (503)."""
        answers.append(httpx.post(f"{system.gateways[0]}/v1/responses", json=body, headers=headers, timeout=30))
        return answers[-1].status_code != 503

    eventually(taken, "a gateway takes the message", 30.0)
    assert answers[-1].status_code == 200, answers[-1].text
    reply = answers[-1].json()["id"]
    printed = system.command("log", reply).stdout.splitlines()
    kinds = [line.split()[2] for line in printed[1:]]
    assert kinds[:2] == ["accepted", "open"]
    assert kinds[-1] == "end"
    assert set(kinds[2:-1]) == {"chunk"}
    assert "it never was" in system.command("log", reply[:-1] + ("0" if reply[-1] != "0" else "1")).stderr


def test_servers_in_the_environment_take_the_place_of_ours(
    tmp_path: Path, fresh_nats: RunningNats, postgres_url: str, valkey_url: str
):
    """With three URLs in the environment no server is started, and ready.json names those."""
    own = {
        "CHORUS_NATS_URL": fresh_nats.url_of("ops"),
        "CHORUS_POSTGRES_URL": postgres_url,
        "CHORUS_REDIS_URL": valkey_url,
    }
    with running(tmp_path, "--stub", environment=own) as started:
        ready = started.ready
        assert (ready["nats"], ready["postgres"], ready["redis"]) == tuple(own.values())
        assert {entry["pid"] for entry in ready["services"]} == set(remembered(tmp_path))


def test_ctrl_c_lets_a_reply_come_to_its_end(tmp_path: Path):
    """What is being streamed when it comes is streamed to its last event, and nobody has to be killed."""
    body = {"model": "stub", "input": "a long answer, please", "max_output_tokens": 120}
    with running(tmp_path, "--stub", "--stub-tps", "40") as started, ThreadPoolExecutor(1) as pool:
        ready, heard = started.ready, Heard()
        with Wire(ready["gateways"][0], ready["keys"]["paid"]) as wire:
            reply_id = wire.post("/v1/responses", {**body, "background": True}).json()["id"]
            reading = pool.submit(wire.resume, reply_id, None, heard)
            eventually(lambda: len(heard.token_ids) > 5, "it is being written")
            assert started.stop() == 0
            assert reading.result(5).final["status"] == "incomplete", "all 120 tokens"
            assert len(heard.token_ids) == 120
    said = (tmp_path / "up.log").read_text()
    assert "was killed" not in said
    assert "gateway-1 still has something to finish" in said


def test_a_kill_a_second_start_and_a_clean_stop(tmp_path: Path):
    """SIGKILL takes every process along; the next start has the same keys; Ctrl-C leaves nothing either."""
    with running(tmp_path, "--stub") as first:
        keys, pids = first.ready["keys"], remembered(tmp_path)
        first.process.kill()
        first.process.wait()
        nothing_left(pids)
    (tmp_path / "ready.json").unlink()  # nobody was left to remove it; the next start would, a moment later
    with running(tmp_path, "--stub") as second:
        assert second.ready["keys"] == keys
        pids = remembered(tmp_path)
        assert second.stop() == 0
    nothing_left(pids)
    assert not (tmp_path / "ready.json").exists()
