"""`python deploy/requirements.py pyproject.toml [EXTRA...]`: what pip must install for the whole project, or for an extra.

Without an extra, what every service needs. An extra of ours inside an extra is left out: its image is built on that one.
"""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirement lines of the `[project]` table; raises KeyError for an extra that is not there."""
    wanted = [project["optional-dependencies"][extra] for extra in extras] if extras else [project["dependencies"]]  # type: ignore[index]
    return [line for lines in wanted for line in lines if not line.startswith(f"{project['name']}[")]


if __name__ == "__main__":
    table = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    sys.stdout.write("\n".join(requirements(table, sys.argv[2:])) + "\n")
