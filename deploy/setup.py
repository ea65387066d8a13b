"""`python -m deploy.setup`: passwords, the bus's configuration and each service's variables, before anything starts.

Passwords are made at the first start and kept; all else is written anew from them and from our own permission table,
so that a newer release brings its newer table. Runs as root, only to give each file to the one user who reads it.
"""

import json
import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.model import coming
from deploy.start import CATALOG, RUN
from ops.credentials import Credentials, load_credentials
from ops.permissions import OPERATOR, SERVICES, USERS
from ops.reach import nats_login
from ops.servers.nats import settings
from shared.errors import ConfigError
from shared.limits import LOG_SHARDS
from shared.subjects import Names

NATS_PORT, POSTGRES_PORT, VALKEY_PORT = 4222, 5432, 6379
WITH_ROWS = frozenset({"conversation", "usage", OPERATOR})
WITH_CACHE = frozenset({"conversation", "gateway"})
WITH_MODELS = frozenset({"conversation", "gateway", "router", "replica"})
DATA = {"nats": Path("/volumes/nats"), "ops": Path("/volumes/models")}  # volumes that are theirs when new
CACHE_BYTES = "256mb"


def nats_conf(credentials: Credentials, region: str) -> str:
    """For a server that every container reaches; its own state is shown inside its container only."""
    server = settings(
        Names(region),
        LOG_SHARDS,
        credentials.nats,
        host="0.0.0.0",  # noqa: S104 - in a network of its own
        port=NATS_PORT,
        store=Path("/data"),
    )
    return json.dumps({**server, "http": "127.0.0.1:8222"}, indent=1) + "\n"


def valkey_conf(password: str) -> str:
    """Limits, quotas and caches: all of it may be lost, so nothing is written to disk."""
    lines = (
        f"port {VALKEY_PORT}",
        f"requirepass {password}",
        "dir /tmp",
        "appendonly no",
        'save ""',
        f"maxmemory {CACHE_BYTES}",
        "maxmemory-policy volatile-lru",
    )
    return "\n".join(lines) + "\n"


def service_env(service: str, credentials: Credentials, env: Mapping[str, str]) -> dict[str, str]:
    """One service's variables. Servers of the user's own, named in `env`, take the place of ours."""
    own_nats = env.get("CHORUS_NATS_URL", "")
    if own_nats:
        url, user, password = nats_login(own_nats, env)  # one user for all
    else:
        url, user, password = f"nats://nats:{NATS_PORT}", service, credentials.nats_password(service)
    found = {
        "CHORUS_REGION": env.get("CHORUS_REGION") or "local",
        "CHORUS_NATS_URL": url,
        "CHORUS_NATS_USER": user,
        "CHORUS_NATS_PASSWORD": password.reveal(),
    }
    if service in WITH_ROWS:
        ours = f"postgresql://chorus:{credentials.postgres}@postgres:{POSTGRES_PORT}/chorus"
        found["CHORUS_POSTGRES_URL"] = env.get("CHORUS_POSTGRES_URL") or ours
    if service in WITH_CACHE:
        found["CHORUS_REDIS_URL"] = (
            env.get("CHORUS_REDIS_URL") or f"redis://:{credentials.valkey}@valkey:{VALKEY_PORT}/0"
        )
    if service in WITH_MODELS:
        found["CHORUS_CATALOG"] = str(CATALOG)
    return found


def lay(path: Path, text: str, owner: str) -> None:
    """Write `path` whole, for `owner` alone."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
        file.write(text)
    give(part, owner)
    part.replace(path)


def give(path: Path, owner: str) -> None:
    user = pwd.getpwnam(owner)
    os.chown(path, user.pw_uid, user.pw_gid)


def forget_catalog(path: Path, coming: bytes | None) -> None:
    """Take the catalog away when another is coming, so that services wait for the model step to write it.

    The same one stays: a restart of everything keeps no order, and the model step may be over before we begin.
    """
    if coming is None or not path.exists() or path.read_bytes() != coming:
        path.unlink(missing_ok=True)


def main() -> None:
    region = os.environ.get("CHORUS_REGION") or "local"
    first = not (RUN / "credentials.json").exists()
    credentials = load_credentials(RUN / "credentials.json", USERS)
    lay(RUN / "nats.conf", nats_conf(credentials, region), "nats")
    lay(RUN / "valkey.conf", valkey_conf(credentials.valkey), "valkey")
    lay(RUN / "valkey.password", credentials.valkey, "valkey")
    lay(RUN / "postgres.password", credentials.postgres, "root")
    for service in (*SERVICES, OPERATOR):
        lines = [f"{name}={value}\n" for name, value in service_env(service, credentials, os.environ).items()]
        lay(RUN / f"{service}.env", "".join(lines), service)
    for folder in ("models", "keys"):
        (RUN / folder).mkdir(exist_ok=True)
        give(RUN / folder, OPERATOR)
    forget_catalog(CATALOG, coming(os.environ.get("CHORUS_PROFILES", ""), DATA["ops"]))
    for owner, volume in DATA.items():
        if volume.is_dir() and not any(volume.iterdir()):  # a new volume; what holds files is left as it is
            give(volume, owner)
    sys.stdout.write("passwords made\n" if first else "passwords kept\n")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"setup: {error}")
