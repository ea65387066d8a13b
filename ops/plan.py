"""What `chorus up` runs: every service, its environment and its place in the order. Pure.

servers   nats, postgres, valkey                              ready before anything else starts
inner     conversation, replicas, router, safety, usage, relay
doors     gateways                                            stopped first: nothing new comes in, and what they stream
                                                              comes to its end from those behind them
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.catalog import Catalog
from shared.settings import variable

REPLICAS = 2  # of the fast model; one more runs the mini model
GATEWAYS = 2
DOORS = frozenset({"gateway"})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user chose."""

    port: int = 8080
    replicas: int = REPLICAS
    instances: int = 1  # of each service between the doors and the replicas, and of the relay
    threads: int | None = None  # of each replica's engine; None: the cores shared out
    stub: bool = False
    stub_tps: float | None = None
    region: str = "local"


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """The servers, and who may log in to the bus: a password per service, or one user for all."""

    nats: str
    postgres: str
    redis: str
    nats_logins: Mapping[str, tuple[str, str]]  # service -> (user, password)

    def __repr__(self) -> str:
        return f"Addresses(nats={self.nats!r})"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where things lie, and the cores to share out."""

    catalog_file: str
    data: str
    cores: int


@dataclass(frozen=True, kw_only=True)
class ServicePlan:
    """One process: `python -m services.<service>` with these variables."""

    name: str
    service: str
    http_port: int
    door: bool  # what clients meet
    settings: Mapping[str, str] = field(repr=False)  # passwords are among them


def engine_threads(cores: int, replicas: int) -> int:
    """Threads of each replica's engine: the cores shared out, at least one each."""
    return max(1, cores // max(1, replicas))


def plan(
    options: Options, addresses: Addresses, catalog: Catalog, machine: Machine, ports: Iterator[int]
) -> list[ServicePlan]:
    """Every service in starting order. `ports` gives free ports; the gateways take `options.port` and the next."""

    def service(name: str, service: str, own: Mapping[str, str] = {}, port: int | None = None) -> ServicePlan:
        user, password = addresses.nats_logins[service]
        http_port = next(ports) if port is None else port
        settings = {
            "name": name,
            "region": options.region,
            "nats_url": addresses.nats,
            "nats_user": user,
            "nats_password": password,
            "http_port": str(http_port),
            "catalog": machine.catalog_file,
            "data_dir": machine.data,
            **own,
        }
        environment = {variable(field): value for field, value in settings.items()}
        return ServicePlan(name=name, service=service, http_port=http_port, door=service in DOORS, settings=environment)

    def each(kind: str, own: Mapping[str, str] = {}) -> list[ServicePlan]:
        return [service(f"{kind}-{number}", kind, own) for number in range(1, options.instances + 1)]

    rows, cache = {"postgres_url": addresses.postgres}, {"redis_url": addresses.redis}
    return [
        *each("conversation", {**rows, **cache}),
        *(service(name, "replica", own) for name, own in _replicas(options, catalog, machine.cores)),
        *each("router"),
        *each("safety"),
        *each("usage", rows),
        *each("relay"),
        *(service(f"gateway-{number + 1}", "gateway", cache, port=options.port + number) for number in range(GATEWAYS)),
    ]


def _replicas(options: Options, catalog: Catalog, cores: int) -> list[tuple[str, dict[str, str]]]:
    """(name, its own settings): the fast model's replicas, then one of the mini model when there is one."""
    cards = [catalog.default] * options.replicas + ([catalog.mini] if catalog.mini is not None else [])
    own = {"threads": str(options.threads or engine_threads(cores, len(cards)))}
    if options.stub:
        own["stub"] = "1"
    if options.stub_tps is not None:
        own["stub_tps"] = f"{options.stub_tps:g}"
    return [
        (
            f"replica-{number}",
            {"model": card.id, "model_file": card.file, "context_tokens": str(card.context_tokens), **own},
        )
        for number, card in enumerate(cards, start=1)
    ]
