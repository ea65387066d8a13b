from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from shared.errors import ConfigError
from shared.settings import CommonSettings, Secret, from_environment, load
from shared.tiers import Tier


class Example(CommonSettings, frozen=True, kw_only=True):
    pulls: Annotated[int, msgspec.Meta(ge=1)] = 2
    share: float = 0.5
    stub: bool = False
    model_file: Path | None = None
    postgres_url: Secret | None = None
    models: tuple[str, ...] = ()
    tier: Tier = Tier.FREE
    threads: int | None = None


def test_every_kind_of_field_is_read_from_its_variable():
    """Each supported type is parsed from the variable CHORUS_<FIELD>."""
    got = load(
        Example,
        {
            "CHORUS_NAME": "router-1",
            "CHORUS_PULLS": "7",
            "CHORUS_SHARE": "0.25",
            "CHORUS_STUB": "1",
            "CHORUS_MODEL_FILE": "/a/b.gguf",
            "CHORUS_POSTGRES_URL": "postgres://u:p@h/db",
            "CHORUS_MODELS": "fast, mini,",
            "CHORUS_TIER": "paid",
            "CHORUS_THREADS": "3",
        },
    )
    assert (got.name, got.pulls, got.share, got.stub, got.threads) == ("router-1", 7, 0.25, True, 3)
    assert got.model_file == Path("/a/b.gguf")
    assert got.postgres_url == Secret("postgres://u:p@h/db")
    assert got.models == ("fast", "mini")
    assert got.tier is Tier.PAID


def test_unset_and_empty_variables_leave_the_default():
    """A variable that is missing or empty is not set."""
    got = load(Example, {"CHORUS_NAME": "router-1", "CHORUS_PULLS": "", "CHORUS_POSTGRES_URL": " "})
    assert (got.pulls, got.region, got.http_port, got.model_file, got.postgres_url) == (2, "local", 0, None, None)


def test_all_bad_variables_are_reported_at_once():
    """One error names every missing and every malformed variable, and only those."""
    with pytest.raises(ConfigError) as caught:
        load(
            Example,
            {
                "CHORUS_PULLS": "0",
                "CHORUS_SHARE": "nan",
                "CHORUS_STUB": "maybe",
                "CHORUS_HTTP_PORT": "70000",
                "CHORUS_REGION": "Bad.Region",
                "CHORUS_TIER": "gold",
                "CHORUS_THREADS": "2",
            },
        )
    text = str(caught.value)
    for name in ("NAME", "PULLS", "SHARE", "STUB", "HTTP_PORT", "REGION", "TIER"):
        assert f"CHORUS_{name}: " in text
    assert "THREADS" not in text


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "x" * 65])
def test_an_instance_name_is_one_subject_token(name):
    """No instance name can add a dot or a wildcard to a subject."""
    with pytest.raises(ConfigError, match="CHORUS_NAME"):
        load(CommonSettings, {"CHORUS_NAME": name})


def test_a_bus_address_holds_no_credentials():
    """Credentials in the address are refused, because addresses are logged."""
    with pytest.raises(ConfigError, match="CHORUS_NATS_URL"):
        load(CommonSettings, {"CHORUS_NAME": "r", "CHORUS_NATS_URL": "nats://u:p@h:4222"})


def test_secrets_never_show():
    """Neither the settings nor an error about them print a secret."""
    got = load(Example, {"CHORUS_NAME": "r", "CHORUS_NATS_PASSWORD": "hunter2", "CHORUS_POSTGRES_URL": "pg://hunter2"})
    assert got.nats_password.reveal() == "hunter2"
    assert "hunter2" not in f"{got!r} {got} {got.nats_password}"


def test_a_bad_environment_ends_the_process_with_status_2(monkeypatch, capsys):
    """A service with bad settings prints what is wrong and exits 2."""
    monkeypatch.delenv("CHORUS_NAME", raising=False)
    with pytest.raises(SystemExit) as caught:
        from_environment(CommonSettings)
    assert caught.value.code == 2
    assert "CHORUS_NAME: must be set" in capsys.readouterr().err
