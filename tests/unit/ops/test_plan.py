import importlib
import itertools

import pytest

from ops.permissions import SERVICES
from ops.plan import Addresses, Machine, Options, engine_threads, plan
from shared.catalog import STUB_FILE, local_catalog
from shared.settings import load

ADDRESSES = Addresses(
    nats="nats://127.0.0.1:1",
    postgres="postgresql://u:pg-word@h/d",
    redis="redis://:redis-word@h/0",
    nats_logins={service: (service, f"word-of-{service}") for service in SERVICES},
)


DEFAULT = Options()


def planned(options: Options = DEFAULT, model_file: str = "/m.gguf", cores: int = 2):
    machine = Machine(catalog_file="/d/catalog.json", data="/d", cores=cores)
    return {
        each.name: each for each in plan(options, ADDRESSES, local_catalog(model_file), machine, itertools.count(30000))
    }


def test_the_default_fleet():
    """Two gateways, two fast replicas and a mini one, and one of each other service."""
    assert list(planned()) == [
        "conversation-1",
        "replica-1",
        "replica-2",
        "replica-3",
        "router-1",
        "safety-1",
        "usage-1",
        "relay-1",
        "gateway-1",
        "gateway-2",
    ]


def test_engine_threads_are_shared_out_or_given():
    """Three replicas on six cores have two threads each, unless somebody says otherwise."""
    assert planned(cores=6)["replica-1"].settings["CHORUS_THREADS"] == "2"
    assert planned(Options(threads=5), cores=6)["replica-1"].settings["CHORUS_THREADS"] == "5"


def test_several_instances_share_the_work():
    """More instances of each service in the middle, each with its own name and door; two gateways as ever."""
    several = planned(Options(instances=2))
    assert [name for name in several if name.endswith("-2") and not name.startswith("replica")] == [
        "conversation-2",
        "router-2",
        "safety-2",
        "usage-2",
        "relay-2",
        "gateway-2",
    ]
    ports = [each.http_port for each in several.values()]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("name", planned())
def test_every_service_can_read_its_settings(name):
    """What a service is given parses as its own settings, under its own name and bus user."""
    each = planned()[name]
    module = importlib.import_module(f"services.{each.service}.settings")
    kind = getattr(module, f"{each.service.capitalize()}Settings")
    settings = load(kind, each.settings)
    assert settings.name == name
    assert settings.nats_user == each.service
    assert settings.nats_password.reveal() == f"word-of-{each.service}"
    assert settings.http_port == each.http_port


def test_gateways_take_the_port_and_the_next():
    """The chosen port is the first gateway's; everybody else gets one of the free ports, each its own."""
    units = planned(Options(port=18080))
    assert [units[f"gateway-{n}"].http_port for n in (1, 2)] == [18080, 18081]
    assert len({each.http_port for each in units.values()}) == len(units)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_last_replica_runs_the_mini_model(replicas):
    """N replicas of the fast model, then one of the mini model."""
    units = planned(Options(replicas=replicas))
    models = [each.settings["CHORUS_MODEL"] for each in units.values() if each.service == "replica"]
    assert models == ["smollm2-135m"] * replicas + ["smollm2-135m-mini"]


def test_stubs_are_told_so():
    """With --stub each replica is scripted and keeps the pace it was given."""
    units = planned(Options(stub=True, stub_tps=20.0), STUB_FILE)
    replica = units["replica-1"].settings
    assert (replica["CHORUS_STUB"], replica["CHORUS_STUB_TPS"], replica["CHORUS_MODEL_FILE"]) == ("1", "20", STUB_FILE)
    assert "CHORUS_STUB" not in planned()["replica-1"].settings


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(1, 3, 1), (2, 3, 1), (12, 3, 4), (16, 3, 5), (4, 1, 4)])
def test_engine_threads_share_out_the_cores(cores, replicas, threads):
    """Each engine gets an equal share of the cores, rounded down, and at least one."""
    assert engine_threads(cores, replicas) == threads
    assert planned(Options(replicas=replicas), cores=cores)["replica-1"].settings["CHORUS_THREADS"] == str(
        engine_threads(cores, replicas + 1)
    )


def test_stores_are_known_to_those_that_use_them():
    """Only services that keep rows get the database's password, only those that use the cache its own."""
    units = planned().values()
    assert {u.service for u in units if "CHORUS_POSTGRES_URL" in u.settings} == {"conversation", "usage"}
    assert {u.service for u in units if "CHORUS_REDIS_URL" in u.settings} == {"conversation", "gateway"}


def test_doors_are_what_clients_meet():
    """Gateways are stopped before what stands behind them, relays too: what they stream comes to its end."""
    assert {u.service for u in planned().values() if u.door} == {"gateway"}


def test_passwords_do_not_show():
    """Neither a plan nor the addresses print a password."""
    assert "word" not in f"{ADDRESSES!r} {planned()['conversation-1']!r}"
