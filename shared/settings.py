"""Settings: frozen typed structs read from the environment; every bad variable is reported at once.

    class RouterSettings(CommonSettings, frozen=True, kw_only=True):
        pulls: int = 2                        # <- CHORUS_PULLS
        postgres_url: Secret | None = None    # <- CHORUS_POSTGRES_URL

    settings = load(RouterSettings, os.environ)       # or from_environment(RouterSettings) in a __main__

A field is a str, int, float, bool ("true", "false", "1", "0"), Path, Secret, enum, a tuple of these (comma
separated), or one of these `| None`. `Annotated[int, msgspec.Meta(ge=1)]` bounds it. An empty variable counts
as not set. Whatever may hold a password is a `Secret`, so that no log line and no traceback can show it.
"""

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from shared.catalog import Catalog, parse_catalog
from shared.errors import ConfigError
from shared.limits import LOG_SHARDS

PREFIX = "CHORUS_"
EXIT_BAD_SETTINGS = 2


class Secret:
    """A value that shows as *** wherever it is printed; `reveal()` gives it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "***"

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


Region = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9]{0,15}$")]
InstanceName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]  # one subject token
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
# Credentials stand in their own variables: an address may be logged.
PublicUrl = Annotated[str, msgspec.Meta(pattern="^[a-z]+://[^@]+$")]


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every service reads. `http_port` 0 takes any free port; `name` is the instance, e.g. gateway-1."""

    name: InstanceName
    region: Region = "local"
    nats_url: PublicUrl = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password: Secret = Secret("")
    http_host: str = "127.0.0.1"
    http_port: Port = 0
    log_shards: Annotated[int, msgspec.Meta(ge=1, le=256)] = LOG_SHARDS
    data_dir: Path = Path(".chorus")


S = TypeVar("S", bound=msgspec.Struct)


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def load(kind: type[S], env: Mapping[str, str]) -> S:
    """Read `kind` from `env`; raises one ConfigError that names every missing and every malformed variable."""
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for field in msgspec.structs.fields(kind):
        name = variable(field.name)
        text = env.get(name, "").strip()
        if text:
            try:
                values[field.name] = _parse(text, field.type)
            except (msgspec.ValidationError, ValueError) as error:
                shown = "" if _is_secret(field.type) else f" (it is {text!r})"
                wrong.append(f"{name}: {str(error)[:1].lower()}{str(error)[1:]}{shown}")
        elif field.required:
            wrong.append(f"{name}: must be set")
    if wrong:
        raise ConfigError("bad settings: " + "; ".join(wrong))
    return kind(**values)


def from_environment(kind: type[S]) -> S:
    """`load` from the process's environment, for a `__main__`: a bad variable is printed and ends it with status 2."""
    try:
        return load(kind, os.environ)
    except ConfigError as error:
        print(f"cannot start: {error}", file=sys.stderr)  # noqa: T201 - before any logging stands
        sys.exit(EXIT_BAD_SETTINGS)


def read_catalog(path: Path) -> Catalog:
    """The models of the region, from the file that CHORUS_CATALOG names; raises ConfigError."""
    try:
        return parse_catalog(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the model catalog {path} cannot be read: {error.strerror}. Check CHORUS_CATALOG."
        ) from error


def _parse(text: str, kind: Any) -> Any:
    raw: Any = text
    if get_origin(_bare(kind)) is tuple:
        raw = [part.strip() for part in text.split(",") if part.strip()]
    value = msgspec.convert(raw, kind, strict=False, dec_hook=_own_types)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _own_types(kind: type, text: Any) -> Any:
    """How msgspec makes what it does not know."""
    if kind is Secret:
        return Secret(text)
    if kind is Path:
        return Path(text).expanduser()
    raise NotImplementedError(f"no setting can be a {kind.__name__}")


def _bare(kind: Any) -> Any:
    """`kind` without Annotated and without None."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    parts = [part for part in get_args(kind) if part is not type(None)]
    return _bare(parts[0]) if type(None) in get_args(kind) and len(parts) == 1 else kind


def _is_secret(kind: Any) -> bool:
    return _bare(kind) is Secret
