"""The shortened form of the drill that needs a way to the bus of its own."""

from pathlib import Path

import pytest

from tests.drill.catalogue import DRILLS
from tests.drill.plant import cuttable_plant


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replica and a router that nobody hears for a while cost no reply."""
    with cuttable_plant(tmp_path) as plant:
        report = DRILLS["cut_off"].hold(plant, short=True)
    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201 - the times, for a person
    assert not report.broken, report
