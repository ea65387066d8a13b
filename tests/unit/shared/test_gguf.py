"""The model file reader against files that are right, wrong, cut and hostile."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ModelFileError
from shared.gguf import GgufFile, TensorType
from tests.unit.shared.gguf_files import FLOAT16, FLOAT32, Q4_1, Q8_0, Tensor, Typed, gguf, text, value, write

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": Typed("u32", 2),
    "llama.eps": Typed("f32", 0.5),
    "flag": Typed("bool", True),
    "names": ["a", "b"],
    "sizes": [Typed("i32", 1), Typed("i32", -2)],
}
TENSORS = {
    "plain": Tensor((3, 2), FLOAT32, struct.pack("<6f", *range(6))),
    "half": Tensor((4,), FLOAT16, struct.pack("<4e", *range(4))),
    "quantised": Tensor((32, 2), Q4_1, bytes(40)),
    "head": Tensor((64,), Q8_0, bytes(68)),
}
GOOD = gguf(METADATA, TENSORS)


def refused(folder: Path, data: bytes) -> str:
    with pytest.raises(ModelFileError) as caught:
        GgufFile(write(folder, data))
    return str(caught.value)


def test_metadata_and_tensors_are_found(tmp_path: Path):
    """Every value has its type, every tensor its shape (outermost first), type and bytes."""
    with GgufFile(write(tmp_path, GOOD)) as file:
        assert file.text("general.architecture") == "llama"
        assert file.integer("llama.block_count") == 2
        assert file.number("llama.eps") == 0.5
        assert file.texts("names") == ["a", "b"]
        assert file.integers("sizes") == [1, -2]
        assert file.metadata["flag"] is True
        plain = file.tensors["plain"]
        assert (plain.shape, plain.type) == ((2, 3), TensorType.F32)
        assert struct.unpack("<6f", bytes(file.data(plain))) == (0, 1, 2, 3, 4, 5)
        assert file.tensors["quantised"].size == 40
        assert bytes(file.data(file.tensors["half"])) == TENSORS["half"].data


def test_an_empty_list_is_read(tmp_path: Path):
    """A list of nothing is a list."""
    with GgufFile(write(tmp_path, gguf({"none": []}, {}))) as file:
        assert file.texts("none") == []


@pytest.mark.parametrize("key", ["llama.block_count", "missing", "flag"])
def test_a_value_of_another_type_is_named(tmp_path: Path, key: str):
    """Asking for what is not there, or is something else, says which key and what was found."""
    with GgufFile(write(tmp_path, GOOD)) as file, pytest.raises(ModelFileError, match=key):
        file.text(key)
    with GgufFile(write(tmp_path, GOOD)) as file, pytest.raises(ModelFileError, match="flag"):
        file.integer("flag")


def test_a_missing_or_empty_file_is_said_in_a_sentence(tmp_path: Path):
    """The sentence names the file and what to do."""
    with pytest.raises(ModelFileError, match=r"nothing\.gguf.*chorus models fetch"):
        GgufFile(tmp_path / "nothing.gguf")
    assert "cannot read" in refused(tmp_path, b"")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04" + GOOD[4:], "begin with GGUF"),
        (gguf({}, {}, version=1), "version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "more than it can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "long, more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"\xff"), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "nested type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 100), "more than fit"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 0, 1 << 40),
            "elements, more than",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + value("v")) * 2, "stands twice"),
        (gguf({"general.alignment": Typed("u32", 3)}, {}), "power of two"),
        (gguf({}, {"t": Tensor((32,), 12, b"")}), "tensor type 12"),
        (gguf({}, {"t": Tensor((31,), Q4_1, b"")}), "cannot be stored as Q4_1"),
        (gguf({}, {"t": Tensor((0,), FLOAT32, b"")}), "cannot be stored as F32"),
        (gguf({}, {"t": Tensor((1, 1, 1, 1, 1), FLOAT32, b"")}), "5 dimensions"),
        (gguf({}, {"t": Tensor((1 << 62, 1 << 62), FLOAT32, b"")}), "it is cut"),
        (GOOD[:-80], "it is cut"),
        (GOOD[:30], "the file ends"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: bytes, says: str):
    """Each kind of damage has its sentence, and nothing large is allocated on the word of the file."""
    assert says in refused(tmp_path, data)


def test_a_tensor_that_is_not_aligned_is_refused(tmp_path: Path):
    """An offset inside another tensor's padding is no offset of the format."""
    at = GOOD.index(struct.pack("<IQ", FLOAT16, 32))
    assert "not aligned" in refused(tmp_path, GOOD[:at] + struct.pack("<IQ", FLOAT16, 33) + GOOD[at + 12 :])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_either_harmless_or_said(tmp_path: Path, data: st.DataObject):
    """Whatever bytes are changed or cut, the reader reads or raises ModelFileError, never anything else."""
    broken = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(broken) - 1)), max_size=4)) if broken else []:
        broken[at] = data.draw(st.integers(0, 255))
    path = write(tmp_path, bytes(broken))
    try:
        with GgufFile(path) as file:
            for tensor in file.tensors.values():
                assert len(file.data(tensor)) == tensor.size
    except ModelFileError:
        pass
