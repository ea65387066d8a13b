"""The shortened form of every drill, on one `chorus up`. Counts and states are asserted; times are only printed."""

from collections.abc import Iterator

import pytest

from tests.drill.catalogue import DRILLS
from tests.drill.plant import stub_plant
from tests.integration.system import System

pytestmark = [pytest.mark.drill, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with stub_plant(tmp_path_factory.mktemp("drills")) as running:
        yield running


@pytest.mark.parametrize("name", [name for name, drill in DRILLS.items() if drill.plant is stub_plant])
def test_drill(chorus: System, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What must hold in this drill holds."""
    report = DRILLS[name].hold(chorus, short=True)
    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201 - the times, for a person
    assert not report.broken, report
