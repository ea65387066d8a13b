"""How the operator's commands reach a running Chorus: by the environment, else by the data folder's ready.json."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from ops.permissions import OPERATOR, inbox_prefix
from ops.ready import read_ready
from shared.bus import Bus
from shared.bus.nats import connect
from shared.settings import Secret


class NatsLogin(NamedTuple):
    """An address that may be shown, and who logs in there."""

    url: str
    user: str
    password: Secret


@dataclass(frozen=True)
class Reach:
    nats: NatsLogin
    postgres: Secret  # a URL with a password in it
    region: str


def nats_login(url: str, env: Mapping[str, str]) -> NatsLogin:
    """The credentials in the URL, else those of CHORUS_NATS_USER and CHORUS_NATS_PASSWORD."""
    parts = urlsplit(url)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    user = unquote(parts.username or "") or env.get("CHORUS_NATS_USER", "")
    return NatsLogin(bare, user, Secret(unquote(parts.password or "") or env.get("CHORUS_NATS_PASSWORD", "")))


def reach_of(data: Path, env: Mapping[str, str]) -> Reach:
    """Raises ConfigError when neither the environment nor `data` says where."""
    nats, postgres = env.get("CHORUS_NATS_URL", ""), env.get("CHORUS_POSTGRES_URL", "")
    region = env.get("CHORUS_REGION", "")
    if not (nats and postgres):
        ready = read_ready(data)
        nats, postgres, region = nats or ready.nats, postgres or ready.postgres, region or ready.region
    return Reach(nats_login(nats, env), Secret(postgres), region or "local")


@asynccontextmanager
async def operator_bus(reach: Reach) -> AsyncIterator[Bus]:
    """A bus under the operator's user; raises BusError when there is none."""
    login = reach.nats
    bus = await connect(
        login.url,
        user=login.user or None,
        password=login.password.reveal() or None,
        name="chorus",
        inbox_prefix=inbox_prefix(OPERATOR),
    )
    try:
        yield bus
    finally:
        await bus.close()
