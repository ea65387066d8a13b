"""Safetensors: what is right is read bit for bit, what is wrong is refused with a sentence, whatever it is."""

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from services.replica.model.checkpoint import Part
from services.replica.model.hf_checkpoint import open_folder
from services.replica.model.load import open_checkpoint
from services.replica.model.loader import load_weights
from services.replica.model.safetensors import INDEX, SINGLE, SafetensorsFile
from services.replica.model.weights_file import dequantise
from shared.errors import ModelFileError
from shared.gguf import TensorType

FOLDER = Path(__file__).parent / "agreement"
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(path: Path, header: object, data: bytes = bytes(24), *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def nothing(_share: float) -> None:
    pass


@pytest.mark.parametrize(("dtype", "kind"), [("F32", "<f4"), ("F16", "<f2"), ("BF16", None)])
def test_numbers_are_read_as_they_stand(tmp_path: Path, dtype: str, kind: str | None):
    """Each of the three types, at an odd offset too, metadata ignored."""
    values = np.array([[1.5, -2.0, 0.0], [3.0, 0.15625, -1024.0]], np.float32)
    raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes() if kind is None else values.astype(kind).tobytes()
    header = {"__metadata__": {"format": "pt"}, "t": ENTRY | {"dtype": dtype, "data_offsets": [0, len(raw)]}}
    for odd in (b"", b" "):
        file = SafetensorsFile(file_of(tmp_path / "m.safetensors", json.dumps(header).encode() + odd, raw))
        store = type(
            "Store", (), {"data": lambda _, info, file=file: memoryview(file.map)[info.offset :][: info.size]}
        )()
        assert np.array_equal(dequantise(store, file.tensors["t"]), values)
        file.close()


WRONG = {
    "only 3 bytes": b"abc",
    "does not fit": struct.pack("<Q", 1 << 60) + b"{}",
    "cannot be read": struct.pack("<Q", 2) + b"{[",
    "none or too many": struct.pack("<Q", 2) + b"{}",
}
BAD_ENTRIES = {
    "a type that is not read": ({"t": ENTRY | {"dtype": "F8_E4M3"}}, "F8_E4M3"),
    "an unknown type": ({"t": ENTRY | {"dtype": "x"}}, "only F32"),
    "another size than its shape": ({"t": ENTRY | {"shape": [2, 4]}}, "takes 32 bytes"),
    "a shape that overflows": ({"t": ENTRY | {"shape": [1 << 62, 1 << 62]}}, "takes"),
    "a negative size": ({"t": ENTRY | {"shape": [-2, -3]}}, "cannot be read"),
    "no numbers": ({"t": ENTRY | {"shape": [0, 3], "data_offsets": [0, 0]}}, "shape"),
    "no shape": ({"t": ENTRY | {"shape": []}}, "shape"),
    "offsets turned round": ({"t": ENTRY | {"data_offsets": [24, 0]}}, "has -24"),
    "offsets past the end": ({"t": ENTRY | {"data_offsets": [24, 48]}}, "24 bytes after"),
    "a gap before it": ({"t": ENTRY | {"shape": [5], "data_offsets": [4, 24]}}, "4 bytes after"),
    "bytes of nobody": ({"t": ENTRY | {"shape": [5], "data_offsets": [0, 20]}}, "end at byte"),
    "two over each other": ({"a": ENTRY, "b": ENTRY}, "over another"),
    "an unknown field": ({"t": ENTRY | {"more": 1}}, "cannot be read"),
    "no entry": ({"t": 7}, "cannot be read"),
    "a list": ([1, 2], "cannot be read"),
    "a deep nest": (b'{"t":' + b"[" * 5000 + b"]" * 5000 + b"}", "cannot be read"),
}


@pytest.mark.parametrize("said", WRONG)
def test_broken_heads_are_refused(tmp_path: Path, said: str):
    """Too short, a length that lies, no JSON, no tensors."""
    (tmp_path / "m.safetensors").write_bytes(WRONG[said])
    with pytest.raises(ModelFileError, match=said):
        SafetensorsFile(tmp_path / "m.safetensors")


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_broken_entries_are_refused(tmp_path: Path, case: str):
    """Types, shapes and offsets must go together and cover the file's bytes once each."""
    header, said = BAD_ENTRIES[case]
    with pytest.raises(ModelFileError, match=said):
        SafetensorsFile(file_of(tmp_path / "m.safetensors", header))


def test_hundreds_of_damaged_files_are_read_or_refused(tmp_path: Path):
    """Bytes changed, cut and doubled at random, mostly in the header: a model or a ModelFileError, nothing else."""
    folder = tmp_path / "m"
    shutil.copytree(FOLDER / "qwen2-tied", folder)
    whole = (folder / SINGLE).read_bytes()
    head = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(5)
    refused = 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(rng.choice([8, head, head, len(data)]))
            data[at : at + rng.choice([0, 1, 1, 3])] = rng.choice(
                [b"", b"0", b"9", b'"', b",", bytes([rng.randrange(256)])]
            )
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        (folder / SINGLE).write_bytes(data)
        try:
            with open_folder(folder) as checkpoint:
                load_weights(checkpoint, nothing)
        except ModelFileError:
            refused += 1
    assert 400 < refused < 600


# --- folders ----------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / "llama3", tmp_path / "m"))


def test_shards_are_one_model(sharded: Path):
    """What three files hold is there, and the version covers every byte of them and the configuration."""
    with open_checkpoint(sharded) as checkpoint:
        shares: list[float] = []
        first = checkpoint.digest(shares.append)
        assert load_weights(checkpoint, shares.append).layers[1].down.shape == (32, 48)
        assert shares[-1] == 1.0
        assert checkpoint.type_of(Part.EMBEDDING) is TensorType.BF16
    config = sharded / "config.json"
    config.write_text(config.read_text().replace('"factor": 8.0', '"factor": 4.0'))
    with open_checkpoint(sharded) as checkpoint:
        assert checkpoint.digest(nothing) != first


def changed_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda map_: map_.update({"model.norm.weight": "../../etc/passwd"}), "no file beside it"),
        (lambda map_: map_.update({"model.norm.weight": "nowhere.safetensors"}), "cannot read|does not hold"),
        (lambda map_: map_.update({"model.more.weight": map_["model.norm.weight"]}), "does not hold"),
        (lambda map_: map_.pop("model.norm.weight"), "does not hold"),
        (lambda map_: map_.clear(), "0 files"),
    ],
)
def test_an_index_that_lies_is_refused(sharded: Path, change, said: str):
    """Paths out of the folder, missing shards, tensors that are elsewhere or unnamed."""
    changed_index(sharded, change)
    with pytest.raises(ModelFileError, match=said):
        open_checkpoint(sharded)


def changed_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: v for key, v in (config | fields).items() if v != "gone"}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gemma"}, "only .*llama"),
        ({"hidden_act": "gelu"}, "SiLU"),
        ({"quantization_config": {"bits": 4}}, "quantised in a way"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "makes no sense"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "above 0"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"num_attention_heads": 0}, "must be 1.."),
        ({"num_key_value_heads": 3}, "do not go with"),
        ({"vocab_size": 97}, "has the shape"),
        ({"num_hidden_layers": 3}, "is missing"),
        ({"num_hidden_layers": 1}, "not understood"),
        ({"rms_norm_eps": "gone"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "above 0"),
        ({"tie_word_embeddings": "yes"}, "cannot be used"),
        ({"attention_bias": True}, "is missing"),
    ],
)
def test_configurations_that_are_not_built_are_refused(sharded: Path, fields: dict, said: str):
    """Another family, activation, scaling or size, and tensors too many or too few: each refused by name."""
    changed_config(sharded, **fields)
    with pytest.raises(ModelFileError, match=said), open_checkpoint(sharded) as checkpoint:
        load_weights(checkpoint, nothing)


@pytest.mark.parametrize(
    ("family", "fields", "window"),
    [
        ("mistral", {}, 16),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"sliding_window": 128}, 0),
        ("qwen2", {"sliding_window": 16}, 0),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": "gone", "max_window_layers": 0},
            16,
        ),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": "gone", "max_window_layers": "gone"},
            0,  # its own class takes 28 layers for full
        ),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 16),
    ],
)
def test_windows_are_read_as_each_family_means_them(tmp_path: Path, family: str, fields: dict, window: int):
    """Mistral's holds for every layer, Qwen's only when it is switched on, and none matters that is never reached."""
    folder = Path(shutil.copytree(FOLDER / family, tmp_path / "m"))
    changed_config(folder, **fields)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config.window == window


def test_layers_of_different_windows_are_refused(tmp_path: Path):
    """Half of them sliding is not built, and said so."""
    folder = Path(shutil.copytree(FOLDER / "qwen2", tmp_path / "m"))
    kinds = ["full_attention", "sliding_attention"]
    changed_config(folder, sliding_window=16, use_sliding_window=True, layer_types=kinds)
    with pytest.raises(ModelFileError, match="others a window"):
        open_checkpoint(folder)


def test_older_configurations_are_read(sharded: Path):
    """Before transformers 5, theta and scaling were two fields, and the scaling's kind had another name."""
    with open_checkpoint(sharded) as checkpoint:
        wanted = checkpoint.config
    rope = json.loads((sharded / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    changed_config(
        sharded,
        rope_parameters="gone",
        rope_theta=theta,
        rope_scaling=rope | {"type": rope["rope_type"], "rope_type": ""},
    )
    with open_checkpoint(sharded) as checkpoint:
        assert checkpoint.config == wanted


def test_a_head_beside_a_tied_embedding_is_ignored(tmp_path: Path):
    """Some checkpoints hold both; the configuration decides."""
    folder = Path(shutil.copytree(FOLDER / "llama2", tmp_path / "m"))
    changed_config(folder, tie_word_embeddings=True)
    with open_checkpoint(folder) as checkpoint:
        weights = load_weights(checkpoint, nothing)
    assert torch.equal(weights.head.to_dense(), weights.embedding)
