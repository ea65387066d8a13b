import os
import signal
import stat
import subprocess
import sys

import pytest

from ops.checks import DISK_FREE_MIN, check_disk, check_model, only_one
from ops.credentials import load_credentials
from ops.files import write_private
from ops.leftovers import born, end_leftovers, remember
from ops.permissions import USERS
from ops.reach import nats_login, reach_of
from ops.ready import Ready, ServiceEntry, read_ready, remove_ready, write_ready
from shared.errors import ConfigError, ModelFileError
from shared.settings import Secret


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_files_are_private_and_whole(tmp_path):
    """A private file is readable by its owner alone, also when it replaces an open one, and no scratch file stays."""
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_credentials_are_made_once(tmp_path):
    """The same passwords come back at the next start, private, one for each user; a new user gets one beside them."""
    path = tmp_path / "credentials.json"
    first = load_credentials(path, USERS)
    assert mode(path) == 0o600
    assert load_credentials(path, USERS) == first
    assert len({*first.nats.values(), first.postgres, first.valkey}) == len(USERS) + 2
    more = load_credentials(path, (*USERS, "another"))
    assert {user: more.nats[user] for user in USERS} == first.nats
    assert first.postgres not in repr(first)


def test_broken_credentials_are_said(tmp_path):
    """A credentials file that is not one is an error, not a reason to invent other passwords."""
    path = tmp_path / "credentials.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="credentials"):
        load_credentials(path, USERS)


def test_a_data_folder_has_one_holder(tmp_path):
    """A second holder is told who holds it; afterwards it is free again."""
    with only_one(tmp_path), pytest.raises(ConfigError, match=f"pid {os.getpid()}"), only_one(tmp_path):
        pass
    with only_one(tmp_path):
        pass


def test_a_full_disk_is_said():
    """Below the least free space the start is refused with both figures; at it, it is not."""
    check_disk("d", DISK_FREE_MIN)
    with pytest.raises(ConfigError, match="only 499 MiB are free"):
        check_disk("d", DISK_FREE_MIN - 1)


def test_a_missing_model_names_the_command_that_fetches_it(tmp_path):
    """Without the file, the sentence says how to get it."""
    with pytest.raises(ConfigError, match="chorus models fetch"):
        check_model(tmp_path / "none.gguf")


def test_a_broken_model_is_refused(tmp_path):
    """A file that is no model is refused before anything starts."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(5))
    with pytest.raises(ModelFileError):
        check_model(tmp_path / "bad.gguf")


READY = Ready(
    gateways=("http://127.0.0.1:1",),
    keys={"paid": "k"},
    nats="nats://ops:bus-word@127.0.0.1:2",
    postgres="postgresql://u:pg-word@h/d",
    redis="redis://h",
    services=(ServiceEntry("gateway-1", 7, "http://127.0.0.1:1"),),
)


def test_ready_is_read_as_it_was_written(tmp_path):
    """What is written is private and read back alike; removed, the reader is told that nothing runs."""
    write_ready(tmp_path, READY)
    assert mode(tmp_path / "ready.json") == 0o600
    assert read_ready(tmp_path) == READY
    remove_ready(tmp_path)
    with pytest.raises(ConfigError, match="not running"):
        read_ready(tmp_path)


def test_the_environment_goes_before_the_data_folder(tmp_path):
    """Addresses in the environment replace those of ready.json, one by one; no password shows."""
    write_ready(tmp_path, READY)
    reach = reach_of(tmp_path, {"CHORUS_POSTGRES_URL": "postgresql://mine"})
    assert reach.postgres == Secret("postgresql://mine")
    assert (reach.nats.url, reach.nats.user, reach.nats.password.reveal()) == ("nats://127.0.0.1:2", "ops", "bus-word")
    assert "-word" not in repr(reach)


def test_a_login_may_stand_beside_the_address():
    """Credentials come from the address, else from their own variables."""
    login = nats_login("nats://h:1", {"CHORUS_NATS_USER": "u", "CHORUS_NATS_PASSWORD": "p"})
    assert (login.url, login.user, login.password.reveal()) == ("nats://h:1", "u", "p")
    assert nats_login("nats://a%40b:c@h:1", {}).user == "a@b"


def test_leftovers_of_a_killed_start_are_ended(tmp_path):
    """A remembered process that still runs and does not leave is killed; afterwards nothing is remembered."""
    path = tmp_path / "processes.json"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    remember(path, [("sleeper", process.pid)])
    assert end_leftovers(path, leave_s=0.0) == ["sleeper"]
    assert process.wait(10) == -signal.SIGKILL
    assert not path.exists()


def test_a_pid_of_somebody_else_is_left_alone(tmp_path):
    """A pid whose process was born at another moment is not ours, and lives on."""
    path = tmp_path / "processes.json"
    remember(path, [("other", os.getpid())])
    path.write_text(path.read_text().replace(born(os.getpid()), "another/1"))
    assert end_leftovers(path, leave_s=0.0) == []
