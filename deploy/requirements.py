"""`python deploy/requirements.py pyproject.toml [EXTRA]`: what pip must install for every service, or for an extra."""

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extra: str | None) -> list[str]:
    """Requirement lines of a `[project]` table; raises KeyError for an extra that is not there."""
    lines: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return lines


def main(arguments: list[str]) -> None:
    project = tomllib.loads(Path(arguments[0]).read_text())["project"]
    sys.stdout.writelines(f"{line}\n" for line in requirements(project, next(iter(arguments[1:]), None)))


if __name__ == "__main__":
    main(sys.argv[1:])
