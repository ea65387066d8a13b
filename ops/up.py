"""`chorus up`: the servers, every service and the default fleet on this machine, until Ctrl-C.

checks ──> servers ──> services ──> keys ──> ready.json, the ready lines ──> (watching) ──> stop, in reverse
└──────────┴────────────┴──────────┴── anything wrong: one sentence, nothing left running, status 1
"""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ops.checks import check_disk, check_model, check_ports, only_one
from ops.credentials import Credentials, load_credentials
from ops.files import free_port
from ops.leftovers import end_leftovers, remember
from ops.local_keys import local_keys
from ops.permissions import OPERATOR, SERVICES, USERS
from ops.plan import GATEWAYS, Addresses, Machine, Options, plan
from ops.reach import nats_login
from ops.ready import Ready, ServiceEntry, remove_ready, write_ready
from ops.servers import Unit
from ops.servers.nats import NatsServer
from ops.servers.postgres import PostgresServer
from ops.servers.valkey import ValkeyServer
from ops.service_unit import ServiceUnit
from ops.supervisor import Supervisor
from shared.catalog import STUB_FILE, local_catalog
from shared.errors import ConfigError
from shared.limits import LOG_SHARDS
from shared.subjects import Names

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Servers:
    """The embedded servers to start, and the addresses of all three, embedded or not."""

    units: list[Unit]
    addresses: Addresses
    operator_nats: str  # with the operator's password


# --- the servers ----------------------------------------------------------------------------------------


def servers(data: Path, env: Mapping[str, str], credentials: Credentials, region: str) -> Servers:
    """Embedded servers, but for those that a URL in the environment replaces."""
    logs = data / "logs"
    units: list[Unit] = []
    if nats_url := env.get("CHORUS_NATS_URL", ""):
        nats, user, password = nats_login(nats_url, env)  # one user for all
        logins, operator = dict.fromkeys(SERVICES, (user, password.reveal())), nats_url
    else:
        server = NatsServer(
            data / "nats", logs / "nats.log", free_port(), credentials, names=Names(region), shards=LOG_SHARDS
        )
        units.append(server)
        nats, logins = server.url, {service: (service, credentials.nats[service]) for service in SERVICES}
        operator = server.url_of(OPERATOR)
    if not (postgres := env.get("CHORUS_POSTGRES_URL", "")):
        database = PostgresServer(data / "postgres", logs / "postgres.log", free_port(), credentials)
        units.append(database)
        postgres = database.url
    if not (redis := env.get("CHORUS_REDIS_URL", "")):
        cache = ValkeyServer(data / "valkey", logs / "valkey.log", free_port(), credentials)
        units.append(cache)
        redis = cache.url
    return Servers(units, Addresses(nats=nats, postgres=postgres, redis=redis, nats_logins=logins), operator)


# --- a local region ---------------------------------------------------------------------------------------


class Region:
    """Everything `chorus up` runs."""

    def __init__(self, options: Options, data: Path, model_file: Path, env: Mapping[str, str]) -> None:
        self._options, self._data, self._env = options, data, env
        self._catalog = local_catalog(STUB_FILE if options.stub else str(model_file.resolve()))
        self._supervisor: Supervisor | None = None
        self._servers: Servers | None = None
        self._services: list[ServiceUnit] = []
        self._keys: dict[str, str] | None = None  # known once everything answers
        self._started = time.monotonic()

    async def run(self, stop: asyncio.Event, now: asyncio.Event) -> int:
        """Until `stop`; returns the exit status. Once `now` is set, what still stops is killed."""
        failed: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                self._supervisor = Supervisor(group, self.say, self._changed)
                bring_up = group.create_task(self._bring_up(self._supervisor), name="bring up")
                await stop.wait()
                bring_up.cancel()
                self._supervisor.leave()
        except* ConfigError as group_failed:
            failed.extend(group_failed.exceptions)
        finally:
            stop.set()  # from here on a signal means now
            remove_ready(self._data)
            was_ready, self._keys = self._keys is not None, None
            if self._supervisor is not None:
                self.say("stopping (again Ctrl-C: at once)" if not failed else "stopping what was started")
                await self._supervisor.stop(now)
        if failed:
            print(f"chorus up: {failed[0]}", file=sys.stderr, flush=True)
            return EXIT_FAILED
        self.say("stopped")
        return 0 if was_ready else EXIT_INTERRUPTED

    async def _bring_up(self, supervisor: Supervisor) -> None:
        credentials = load_credentials(self._data / "credentials.json", USERS)
        self._servers = servers(self._data, self._env, credentials, self._options.region)
        supervisor.launch(self._servers.units)
        await supervisor.all_ready()
        inner, doors = self._plan(self._servers.addresses)
        self._services = inner + doors
        supervisor.launch(inner)
        supervisor.launch(doors)
        await supervisor.all_ready()
        self._keys = await local_keys(self._servers.addresses.postgres, self._data / "keys.json")
        self._changed()
        self._announce(self._keys)

    def _plan(self, addresses: Addresses) -> tuple[list[ServiceUnit], list[ServiceUnit]]:
        """Services behind the doors, and the doors."""
        catalog_file = (self._data / "catalog.json").resolve()
        catalog_file.write_bytes(msgspec.json.format(msgspec.json.encode(self._catalog)))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        machine = Machine(catalog_file=str(catalog_file), data=str(self._data.resolve()), cores=cores)
        plans = plan(self._options, addresses, self._catalog, machine, iter(free_port, None))
        units = [(ServiceUnit(each, self._data / "logs", self._env), each.door) for each in plans]
        return [unit for unit, door in units if not door], [unit for unit, door in units if door]

    # --- what others read --------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # whoever read us has gone; the services go on
            print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)

    def _changed(self) -> None:
        """A process was started or ended. A full disk must not end what runs."""
        try:
            self._write_down()
        except OSError as error:
            self.say(f"what runs could not be written down in {self._data}: {error}")

    def _write_down(self) -> None:
        if self._supervisor is None:
            return
        running = {kept.unit.name: kept.pid for kept in self._supervisor.kept if kept.pid is not None}
        remember(self._data / "processes.json", running.items())
        if self._keys is None or self._servers is None:
            return
        write_ready(
            self._data,
            Ready(
                gateways=self._gateways,
                keys=self._keys,
                nats=self._servers.operator_nats,
                postgres=self._servers.addresses.postgres,
                redis=self._servers.addresses.redis,
                services=tuple(
                    ServiceEntry(unit.name, running.get(unit.name, 0), unit.http) for unit in self._services
                ),
                region=self._options.region,
            ),
        )

    @property
    def _gateways(self) -> tuple[str, ...]:
        return tuple(unit.http for unit in self._services if unit.plan.service == "gateway")

    def _announce(self, keys: Mapping[str, str]) -> None:
        first, *others = self._gateways
        print(f"\nChorus is ready, {time.monotonic() - self._started:.1f} s after its start.\n")
        print(f"  chat page       {first}/")
        print(f"  API             {first}/v1   and on {', '.join(f'{other}/v1' for other in others)}")
        for tier, key in keys.items():
            print(f"  {tier + ' key':<16}{key}")
        print(f"  logs            {self._data / 'logs'}\n\nCtrl-C stops everything.", flush=True)


def run_up(options: Options, data: Path, model_file: Path, env: Mapping[str, str]) -> int:
    """The command; returns the exit status. Raises ConfigError when it cannot begin."""
    with only_one(data):
        remove_ready(data)
        if names := end_leftovers(data / "processes.json"):
            print(f"ended from an earlier start: {', '.join(names)}", flush=True)
        check_disk(data, shutil.disk_usage(data).free)
        check_ports(range(options.port, options.port + GATEWAYS))
        if not options.stub:
            check_model(model_file)
        return asyncio.run(_until_signalled(Region(options, data, model_file, env)))


async def _until_signalled(region: Region) -> int:
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return await region.run(stop, now)
