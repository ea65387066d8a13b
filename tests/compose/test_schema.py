"""The compose files against the Compose specification's published schema. Needs no engine and no network.

CHORUS_COMPOSE_SCHEMA      a schema file, say the newest, in place of the one that check-jsonschema carries
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.system import ROOT

pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: `make setup`")
FAULTS = {
    "a word nobody knows": lambda compose: compose["services"]["nats"].update(mem_limt="1g"),
    "a condition nobody knows": lambda compose: compose["services"]["keys"]["depends_on"]["conversation"].update(
        condition="service_ready"
    ),
    "a number for a list": lambda compose: compose["services"]["proxy"].update(ports=8080),
    "a section nobody knows": lambda compose: compose.update(netwrks={}),
}


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    own = os.environ.get("CHORUS_COMPOSE_SCHEMA")
    schema = ["--schemafile", own] if own else ["--builtin-schema", "vendor.compose-spec"]
    command = [sys.executable, "-m", "check_jsonschema", *schema, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_compose_files_are_valid():
    """Ours, and the tests' own addition to it, are what the specification calls valid."""
    done = check(ROOT / "compose.yaml", ROOT / "tests/compose/published.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_would_notice(tmp_path, fault):
    """Our file with one fault in it is refused, and for that fault."""
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    FAULTS[fault](compose)
    broken = tmp_path / "compose.yaml"
    broken.write_text(yaml.safe_dump(compose))
    done = check(broken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Schema validation errors were encountered" in done.stdout
