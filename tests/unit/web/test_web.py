"""The pure modules of the chat page, tested where they run: in JavaScript, by Node's own test runner."""

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
NODE_MIN = (20, 19)  # earlier ones do not see by themselves that a .js file is a module
HERE = Path(__file__).parent
RUN_S = 60.0


def _version() -> tuple[int, ...]:
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True, timeout=RUN_S).stdout
    return tuple(int(part) for part in said.strip().lstrip("v").split("."))


@pytest.mark.skipif(NODE is None, reason="no Node here: the page's pure modules are tested only in the browser")
@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_a_module_of_the_page(name: str) -> None:
    """Every test in this JavaScript file passes."""
    if _version() < NODE_MIN:
        pytest.skip(f"Node {'.'.join(map(str, NODE_MIN))} or newer is needed")
    ran = subprocess.run([NODE, "--test", HERE / name], capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
