"""Dockerfile, compose.yaml and the files under deploy/ agree with the code and with each other. Needs no engine."""

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from deploy import model, setup, start
from deploy.requirements import requirements
from ops.credentials import Credentials
from ops.permissions import SERVICES, USERS, permissions
from shared.limits import BODY_BYTES_MAX, DRAIN_S, HEADER_BYTES_MAX, KIB, LOG_SHARDS, MIB, SSE_PING_S
from shared.settings import variable
from shared.subjects import Names
from tests.integration.system import ROOT

CREDENTIALS = Credentials(
    nats={user: f"password-of-{user}" for user in USERS}, postgres="password-of-rows", valkey="password-of-cache"
)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def text_of(name: str) -> str:
    return (ROOT / "deploy" / name).read_text()


def test_every_target_that_compose_builds_is_there(compose, dockerfile):
    """Each service's build target is a stage of the Dockerfile."""
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    targets = {one["build"]["target"] for one in compose["services"].values() if "build" in one}
    assert targets <= stages


def test_numbered_users_are_those_of_the_images(compose, dockerfile):
    """The users that compose names by number are the ones for whom setup lays out their files."""
    first, names = re.search(r"id=(\d+); for name in ([a-z ]+);", dockerfile).groups()
    ids = {name: int(first) + index for index, name in enumerate(names.split())}
    for server in ("nats", "valkey"):
        assert compose["services"][server]["user"] == f"{ids[server]}:{ids[server]}"
    assert set(ids) == {"nats", "valkey", *SERVICES, "ops"}


def test_a_stop_waits_for_the_drain(compose):
    """Whatever drains is given longer than its drain takes."""
    for name, one in compose["services"].items():
        if name.startswith("replica") or name in SERVICES:
            assert int(one["stop_grace_period"].removesuffix("s")) > DRAIN_S + 1, name


def test_what_runs_is_bounded_and_unprivileged(compose):
    """Every service but the database's image has its memory bounded, a read-only root and no capability."""
    for name, one in compose["services"].items():
        assert "mem_limit" in one, name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        if name != "postgres":  # its image drops to another user by itself
            assert one["read_only"], name
            assert one["cap_drop"] == ["ALL"], name


def test_replicas_compute_where_their_image_can(compose):
    """Replicas of the image with CUDA are given a GPU and told to compute there; no other is."""
    for name, one in compose["services"].items():
        cuda = one.get("build", {}).get("target") == "replica-cuda"
        assert (one.get("environment", {}).get("CHORUS_DEVICE") == "cuda") == cuda, name
        assert ("deploy" in one) == cuda, name


def test_the_proxy_leaves_the_last_word_to_the_gateway():
    """The proxy's limits lie above the gateway's, its patience above the longest silence, and it holds nothing back."""
    conf = text_of("nginx.conf")
    assert int(re.search(r"client_max_body_size (\d+)m;", conf)[1]) * MIB > BODY_BYTES_MAX
    assert int(re.search(r"large_client_header_buffers \d+ (\d+)k;", conf)[1]) * KIB > HEADER_BYTES_MAX
    assert int(re.search(r"proxy_read_timeout (\d+)s;", conf)[1]) > 2 * SSE_PING_S
    assert "proxy_buffering off;" in conf


def test_every_service_is_scraped(compose):
    """Prometheus looks for every service that compose starts from our images."""
    (job,) = yaml.safe_load(text_of("prometheus.yml"))["scrape_configs"]
    ours = {name for name in compose["services"] if name.startswith("replica") or name in SERVICES}
    assert set(job["dns_sd_configs"][0]["names"]) == ours


def test_the_bus_gets_the_permission_table():
    """The configuration laid out for the bus holds each user with the permissions of the table, and no one else."""
    users = json.loads(setup.nats_conf(CREDENTIALS, "local"))["authorization"]["users"]
    table = permissions(Names("local"), LOG_SHARDS)
    assert {user["user"]: tuple(user["permissions"]["publish"]["allow"]) for user in users} == {
        name: who.publish for name, who in table.items()
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_given_its_own_password_only(service):
    """Of the bus's passwords, a service's variables hold its own."""
    env = setup.service_env(service, CREDENTIALS, {})
    assert env["CHORUS_NATS_PASSWORD"] == f"password-of-{service}"
    assert sum("password-of-" in value for name, value in env.items() if "NATS" in name) == 1
    assert ("CHORUS_POSTGRES_URL" in env) == (service in ("conversation", "usage"))


def test_servers_of_the_users_own_take_the_place_of_ours():
    """Addresses in the environment of setup are what services are told; credentials leave the bus's address."""
    env = {"CHORUS_NATS_URL": "nats://me:secret@bus:1", "CHORUS_POSTGRES_URL": "postgresql://rows"}
    found = setup.service_env("conversation", CREDENTIALS, env)
    assert (found["CHORUS_NATS_URL"], found["CHORUS_NATS_USER"]) == ("nats://bus:1", "me")
    assert found["CHORUS_NATS_PASSWORD"] == "secret"
    assert found["CHORUS_POSTGRES_URL"] == "postgresql://rows"


def test_what_a_container_is_given_wins_and_empty_is_not_given():
    """Variables set by hand win over those laid out; an empty one does not count."""
    laid_out = start.variables("CHORUS_REGION=local\nCHORUS_NATS_PASSWORD=a=b\n")
    env = start.environment("relay", laid_out, {"CHORUS_REGION": "", "CHORUS_STREAMS_MAX": "5"}, host="abc")
    assert env["CHORUS_REGION"] == "local"
    assert env["CHORUS_NATS_PASSWORD"] == "a=b"
    assert (env["CHORUS_STREAMS_MAX"], env[variable("name")]) == ("5", "relay-abc")


@pytest.mark.parametrize(("role", "model"), [("fast", "big"), ("mini", "small"), ("", "big")])
def test_a_replica_takes_the_model_of_its_role(role, model):
    """The catalog says what a replica of a role serves; the cores are shared out."""
    cards = [
        {"id": "big", "file": "/models/big.gguf", "context_tokens": 64, "role": "fast"},
        {"id": "small", "file": "stub", "context_tokens": 32, "role": "mini"},
    ]
    env = start.replica({"CHORUS_ROLE": role} if role else {}, {"models": cards}, cores=8)
    assert (env["CHORUS_MODEL"], env["CHORUS_THREADS"]) == (model, "2")
    assert ("CHORUS_STUB" in env) == (model == "small")


@pytest.mark.parametrize(
    ("before", "profiles", "files", "kept"),
    [
        ("stub", "stub", [], True),
        ("stub", "stub,metrics", [], True),
        ("stub", "cpu", ["big.gguf"], False),  # another kind of model
        ("/models/big.gguf", "cpu", ["big.gguf"], True),
        ("/models/big.gguf", "gpu,metrics", ["big.gguf"], True),
        ("/models/big.gguf", "cpu", ["other.gguf"], False),
        ("/models/big.gguf", "cpu", ["big.gguf", "other.gguf"], False),  # which is not known
        ("/models/big.gguf", "stub", ["big.gguf"], False),
        (f"/models/{model.SMOLLM2.file_name}", "cpu", [model.SMOLLM2.file_name], True),
        (f"/models/{model.SMOLLM2.file_name}", "cpu", [], False),  # it will be fetched again
        ("stub", "", [], False),
        ("stub", "cpu,stub", [], False),
    ],
)
def test_a_catalog_is_forgotten_when_another_is_coming(tmp_path, before, profiles, files, kept):
    """Setup keeps the catalog that the model step would write again, so that the two may run in any order."""
    for name in files:
        (tmp_path / name).touch()
    path = tmp_path / "catalog.json"
    model.publish(path, model.catalog(before))
    setup.forget_catalog(path, model.coming(profiles, tmp_path))
    assert path.exists() == kept


def test_a_catalog_is_readable_whenever_it_is_there(tmp_path):
    """It may be replaced, and every user may read it."""
    path = tmp_path / "catalog.json"
    for file in ("stub", "/models/big.gguf"):
        model.publish(path, model.catalog(file))
        assert path.stat().st_mode & 0o777 == 0o444
        assert json.loads(path.read_bytes())["models"][0]["file"] == file
    assert list(tmp_path.iterdir()) == [path]


def test_requirements_come_from_the_project():
    """The images install what pyproject.toml says for the project and for an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements(project, None) == project["dependencies"]
    assert "redis" in requirements(project, "gateway")
    with pytest.raises(KeyError):
        requirements(project, "nobody")
