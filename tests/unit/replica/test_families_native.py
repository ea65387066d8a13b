"""What families differ in, on the kernels: near the reference, the same bits whatever is beside, in each KV type."""

import hashlib
import itertools
import json
import platform
import struct
from pathlib import Path

import numpy as np
import pytest

from services.replica.core.plan import SampleParams, SeqChunk, StepPlan, blocks_for
from services.replica.engine_messages import EngineConfig
from services.replica.model import hf_checkpoint
from services.replica.model.checkpoint import Part
from services.replica.model.hf_checkpoint import NAMES
from services.replica.model.kv_size import KvType, conversations_held, kv_block_bytes
from services.replica.model.load import load_runner, open_checkpoint
from services.replica.model.loader import load_weights
from services.replica.model.native.kernels import BEST, KV_TYPES, REVISION, Rows, Variant
from services.replica.model.native_runner import NativeRunner, misfit
from services.replica.model.quantise import KINDS as QUANTISED
from services.replica.model.quantise import quantise
from services.replica.model.torch_runner import TorchRunner
from services.replica.model.transformer import Transformer
from services.replica.model.weights_file import dequantise
from shared.errors import ConfigError, ModelFileError
from shared.gguf import TensorType
from shared.limits import BLOCK_TOKENS, MODEL_CONTEXT_MAX
from shared.messages import Sampling
from tests.unit.replica.native_models import (
    CONTEXT,
    FLOATS,
    VARIANTS,
    VOCAB,
    config_of,
    each_variant,
    ids,
    kernel_model,
    logits,
    needs_kernels,
    tiny_file,
)
from tests.unit.shared.gguf_files import FLOAT32, Q4_1, Q8_0

TABLE = tuple(range(20))
SAMPLE = SampleParams(Sampling(temperature=0.0), 0, 0)
FAMILIES: dict[str, dict] = {
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen3": {"family": "qwen3", "heads": 8, "kv_heads": 1},
    "window": {"window": 24},
    "wide window": {"window": 150},
    "rope": {"rope_factors": True},
    "seven heads to one": {"family": "qwen2", "heads": 7, "kv_heads": 1},
}
each_kv = pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: tiny_file(folder / f"{name}.gguf", Q8_0, **how) for name, how in FAMILIES.items()}


def reference(path: Path, prompt: tuple[int, ...]) -> np.ndarray:
    """[vocab]: float32 torch, checked against transformers elsewhere, over the file's dequantised weights."""
    with open_checkpoint(path) as checkpoint:
        config, weights = checkpoint.config, load_weights(checkpoint, lambda _: None)
    plan = StepPlan(1, (SeqChunk("a", 1, 0, prompt, TABLE, SAMPLE),))
    return Transformer(config, weights, blocks=len(TABLE), context=CONTEXT).logits(plan)[0].numpy()


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std())


@needs_kernels
@each_variant
@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_the_kernels_are_those_of_the_reference(files, variant: Variant, family: str):
    """Biases, normalised heads, a window, scaled RoPE, many heads to one: as in float32, in the precise mode."""
    for length in (1, 23, 24, 25, 150, 290):
        prompt = ids(length, length)
        with kernel_model(files[family], variant, precise=True) as model:
            found = logits(model, Rows(prompt, 0, TABLE, BEST))[0]
        assert distance(found, reference(files[family], prompt)) < 0.003


@needs_kernels
@each_variant
@each_kv
def test_keys_and_values_of_each_type_are_near(files, variant: Variant, kv: KvType):
    """float32 is all but exact; bfloat16 and int8 are off by hundredths of the logits' spread."""
    within = {KvType.FLOAT32: 0.001, KvType.FLOAT16: 0.003, KvType.BFLOAT16: 0.03, KvType.INT8: 0.03}[kv]
    prompt = ids(3, 290)
    for family in ("wide window", "qwen2"):
        with kernel_model(files[family], variant, precise=True, kv=kv) as model:
            found = logits(model, Rows(prompt, 0, TABLE, BEST))[0]
        assert distance(found, reference(files[family], prompt)) < within


@needs_kernels
@each_variant
@each_kv
@pytest.mark.parametrize("family", ["window", "wide window", "qwen3"])
def test_a_row_is_the_same_whatever_is_beside_it(files, variant: Variant, kv: KvType, family: str):
    """Alone, in batches, in chunks, after cached blocks, over blocks full of others' numbers: not one bit differs."""
    rng = np.random.default_rng(3)
    prompt = ids(9, 290)
    own = blocks_for(len(prompt))
    with kernel_model(files[family], variant, threads=2, blocks=128, kv=kv) as model:
        alone = logits(model, Rows(prompt, 0, tuple(range(own)), BEST))[0]
        for trial in range(6):
            table = tuple(int(block) for block in rng.permutation(np.arange(own, 60))[:own])
            at = int(rng.integers(1, own)) * BLOCK_TOKENS if trial % 3 == 0 else 0
            table = (*range(at // BLOCK_TOKENS), *table[at // BLOCK_TOKENS :])
            while at < len(prompt):
                count = min(int(rng.choice([1, 2, 3, 8, 16, 33])), len(prompt) - at)
                others = [
                    Rows(ids(100 + n, int(rng.choice([1, 1, 20]))), 0, (60 + 2 * n, 61 + 2 * n), BEST)
                    for n in range(int(rng.choice([0, 1, 3, 9])))
                ]
                place = int(rng.integers(0, len(others) + 1))
                others.insert(place, Rows(prompt[at : at + count], at, table, BEST))
                found = logits(model, *others)[place]
                at += count
            assert np.array_equal(found, alone)


@needs_kernels
@each_kv
def test_every_instruction_set_gives_the_same_bits(files, kv: KvType):
    """So a reply may go on on a machine of another kind, whatever keys and values are kept as."""
    found = []
    for variant in VARIANTS:
        with kernel_model(files["wide window"], variant, kv=kv) as model:
            found.append(logits(model, Rows(ids(1, 290), 0, TABLE, BEST), Rows(ids(2, 7), 0, (20,), BEST)))
    assert all(np.array_equal(each, found[0]) for each in found[1:])


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="angles of RoPE come from long doubles, which differ")
def test_a_change_of_bits_is_a_new_revision(files):
    """A reply goes on on another replica of the same `model_version` only: it must name what the bits depend on.

    When this fails: raise kernels.REVISION, and write the new digest down.
    """
    digest = hashlib.sha256()
    for family, precise in itertools.product(FAMILIES, (False, True)):
        for kv in KV_TYPES:
            with kernel_model(files[family], VARIANTS[0], kv=kv, precise=precise) as model:
                digest.update(logits(model, Rows(ids(6, 190), 0, TABLE, BEST)).tobytes())
    assert (REVISION, digest.hexdigest()[:16]) == (1, "f5a9aac2bb0d433e")


@needs_kernels
@each_variant
@each_kv
def test_what_is_no_number_spoils_nobody(files, variant: Variant, kv: KvType):
    """A sequence whose keys and values are infinite, none or too large leaves blocks that the next one can use."""
    path = files["window"]
    config, clean, foreign = config_of(path), ids(4, 21), ids(1, 32)
    with kernel_model(path, variant, blocks=4, kv=kv) as model:
        alone = logits(model, Rows(clean, 0, (0, 1), BEST))
        for value in (np.inf, np.nan, 3e38, -3e38):
            model.put_vector(
                "qkv_bias", 0, np.full((config.heads + 2 * config.kv_heads) * config.head_dim, value, "f4")
            )
            model.forward([Rows(foreign, 0, (2, 3), None)], logits=False)
            model.put_vector("qkv_bias", 0, np.empty(0, np.float32))
            assert np.array_equal(logits(model, Rows(clean, 0, (2, 3), BEST)), alone)


@needs_kernels
def test_a_number_beyond_a_type_spoils_nobody(tmp_path: Path):
    """Values a hundred times what a half can hold are cut: what stands in a masked slot is multiplied by 0."""
    path = tiny_file(tmp_path / "m.gguf", Q8_0, family="qwen2")
    for kv in KV_TYPES:
        with kernel_model(path, VARIANTS[0], kv=kv, blocks=4) as model:
            clean = logits(model, Rows(ids(4, 21), 0, (0, 1), BEST))
        with kernel_model(path, VARIANTS[0], kv=kv, blocks=4) as model:
            bias = np.full(config_of(path).head_dim * 10, 6e6, np.float32)
            model.put_vector("qkv_bias", 0, bias)
            model.forward([Rows(ids(1, 32), 0, (0, 1), None)], logits=False)
            assert np.isfinite(logits(model, Rows(ids(4, 21), 0, (2, 3), BEST))).all()
        assert np.isfinite(clean).all()


# --- memory -----------------------------------------------------------------------------------------------


def test_the_formula_of_kv_memory(tmp_path: Path):
    """Two layers, two key-value heads of 32: 2 x 2 x 2 x 16 rows of 32 numbers; rows of eight bits have a scale of 4 bytes."""
    config = config_of(tiny_file(tmp_path / "m.gguf", Q4_1))
    bytes_of = {kind: kv_block_bytes(config, kind) for kind in KvType}
    rows = 2 * 2 * 2 * 16
    assert bytes_of == {
        KvType.FLOAT32: rows * 128,
        KvType.BFLOAT16: rows * 64,
        KvType.FLOAT16: rows * 64,
        KvType.INT8: rows * 36,
        KvType.FLOAT8: rows * 36,
    }
    blocks_of_2000 = 125
    for kind, size in bytes_of.items():
        held = conversations_held(config, kind, 2_000_000_000, 2000)
        assert held * blocks_of_2000 * size <= 2_000_000_000 < (held + 1) * blocks_of_2000 * size
        assert conversations_held(config, kind, blocks_of_2000 * size - 1, 2000) == 0


@needs_kernels
@each_kv
def test_kernels_take_the_memory_that_the_formula_says(tmp_path: Path, kv: KvType):
    """As many more bytes of address space as more blocks cost, to the block."""

    def mapped(blocks: int) -> int:
        with kernel_model(path, VARIANTS[0], kv=kv, blocks=blocks):
            return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    path = tiny_file(tmp_path / "m.gguf", Q4_1)
    mapped(1)
    huge_page = 2 << 20
    size = kv_block_bytes(config_of(path), kv)
    more = 64 * huge_page // size
    assert abs(mapped(2 * more) - mapped(more) - more * size) <= 2 * huge_page


# --- quantising, and which runner -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_numbers_are_near(kind: TensorType):
    """No number is further from itself than its block's range over the codes there are; zeros stay zeros."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((8, 96)).astype(np.float32) * np.geomspace(1e-4, 1e3, 8, dtype=np.float32)[:, None]
    values[3] = 0
    packed = quantise(values, kind)
    store = type("Store", (), {"data": lambda _self, _info: memoryview(packed.tobytes())})()
    info = type("Info", (), {"type": kind, "shape": values.shape})()
    error = np.abs(dequantise(store, info) - values).reshape(-1, 32).max(1)
    blocks = values.reshape(-1, 32)
    reach = np.abs(blocks).max(1)
    step = {
        TensorType.Q8_0: reach / 127 * 0.51,
        TensorType.Q4_0: reach / 8 * 1.01,
        TensorType.Q4_1: (blocks.max(1) - blocks.min(1)) / 15 * 0.51 + reach / 1024,
    }[kind]
    assert (error <= step + 1e-7).all()
    assert (error.reshape(8, -1)[3] == 0).all()


def test_numbers_that_are_none_are_not_quantised():
    """Infinities and NaN would spoil a whole block: they are refused, as are rows of no whole blocks."""
    for bad in (np.inf, -np.inf, np.nan):
        values = np.zeros((2, 32), np.float32)
        values[1, 7] = bad
        with pytest.raises(ValueError, match="finite"):
            quantise(values, TensorType.Q4_1)
    with pytest.raises(ValueError, match="whole blocks"):
        quantise(np.zeros((2, 33), np.float32), TensorType.Q8_0)


def loaded(path: Path, said: list[str], **fields: str):
    config = EngineConfig(**{"model_file": str(path), "blocks": 32, "threads": 1, **fields})
    return load_runner(config, VOCAB, lambda _phase, _share, detail: said.append(detail))


@needs_kernels
@pytest.mark.parametrize("stored", FLOATS)
def test_float_files_run_on_torch_or_quantised_on_the_kernels(tmp_path: Path, stored: str):
    """F32, F16 and BF16: as they are on torch, which says how to have the kernels; as 8 or 4 bits on these."""
    path = tiny_file(tmp_path / "m.gguf", FLOATS[stored])
    plan = StepPlan(1, (SeqChunk("a", 1, 0, ids(5, 60), tuple(range(4)), SAMPLE),))
    said: list[str] = []
    runner = loaded(path, said)
    assert isinstance(runner, TorchRunner)
    assert f"matrices of type {stored} (CHORUS_WEIGHTS=q8_0" in " ".join(said)
    wanted = reference(path, ids(5, 60))
    assert list(runner.run(plan).sampled) == [int(wanted.argmax())]
    versions = {runner.info.model_version}
    for weights, within in (("q8_0", 0.05), ("q4_1", 0.5), ("q4_0", 0.7)):
        native = loaded(path, said, weights=weights)
        assert isinstance(native, NativeRunner)
        assert f"-{weights}-fast" in native.info.model_version
        versions.add(native.info.model_version)
        native.run(plan)
        native.close()
        kind = TensorType[weights.upper()]
        with kernel_model(path, VARIANTS[0], quantised=kind) as model:
            assert distance(logits(model, Rows(ids(5, 60), 0, TABLE, BEST))[0], wanted) < within
    assert len(versions) == 4


@needs_kernels
def test_kv_types_are_settings_and_part_of_the_version(tmp_path: Path, monkeypatch):
    """The same weights with other keys and values are another model to the block hashes, on both runners."""
    path = tiny_file(tmp_path / "m.gguf", Q4_1)
    sizes, versions = {}, set()
    for kv in ("auto", *(kind.value for kind in KV_TYPES)):
        config = EngineConfig(model_file=str(path), kv_bytes=1 << 20, kv_type=kv)
        runner = load_runner(config, VOCAB, lambda *_: None)
        sizes[kv] = runner.info.blocks_total
        versions.add(runner.info.model_version)
        runner.close()
    assert sizes["float32"] * 2 == sizes["float16"] == sizes["bfloat16"] < sizes["int8"] == sizes["auto"]
    assert len(versions) == 4  # auto is int8, and in the precise mode float16
    monkeypatch.setenv("CHORUS_PRECISION", "precise")
    precise = load_runner(EngineConfig(model_file=str(path), kv_bytes=1 << 20), VOCAB, lambda *_: None)
    assert precise.info.blocks_total == sizes["float16"]
    assert "-precise-kv-float16-" in precise.info.model_version
    precise.close()


def test_weights_that_only_the_kernels_quantise_are_said_to_stay_as_they_are(tmp_path: Path, monkeypatch):
    """Where torch serves, who asked for quantised weights is told that there are none."""
    monkeypatch.setenv("CHORUS_KERNELS", "none")
    path, said = tiny_file(tmp_path / "m.gguf", FLOAT32), []
    config = EngineConfig(model_file=str(path), kv_bytes=1 << 20, weights="q4_0")
    load_runner(config, VOCAB, lambda *told: said.append(told[2])).close()
    assert any(line.startswith("plain torch") and "CHORUS_WEIGHTS=q4_0 is for the kernels" in line for line in said)


# --- files that lie ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        {"context_length": 0},
        {"context_length": MODEL_CONTEXT_MAX + 1},
        {"context_length": 2**31},
        {"context_length": 2**32 + 64},
        {"context_length": 2**63},
        {"attention.key_length": 2**32 - 2, "rope.dimension_count": 2**32 - 2},
        {"attention.head_count": 2**32 - 1},
        {"block_count": 2**31},
        {"feed_forward_length": 2**32 - 1},
        {"embedding_length": 0},
    ],
    ids=str,
)
def test_a_size_that_no_model_has_is_refused_before_anything_is_made_of_it(tmp_path: Path, lie: dict[str, int]):
    """The kernels count in 32 bits, and a table of a billion positions takes minutes."""
    with pytest.raises(ModelFileError):
        loaded(tiny_file(tmp_path / "m.gguf", Q8_0, numbers=lie), [])


@pytest.mark.parametrize("window", [CONTEXT, 2**31, 2**32 - 1])
def test_a_window_as_long_as_the_context_is_none(tmp_path: Path, window: int):
    """Every token sees all before it."""
    path = tiny_file(tmp_path / "m.gguf", Q8_0, numbers={"attention.sliding_window": window})
    assert config_of(path).window == 0


@pytest.mark.parametrize(
    "field", [{"max_position_embeddings": 10**30}, {"head_dim": 10**12}, {"rope_theta": -5.0}], ids=str
)
def test_so_is_one_of_a_folder(field: dict[str, float]):
    """Before Llama 3's scaling is derived from it."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 256}, **field,
    }  # fmt: skip
    with pytest.raises(ModelFileError):
        hf_checkpoint.read_config(json.dumps(config).encode(), Path("config.json"), has_head=False)


@pytest.mark.parametrize("kind", [FLOAT32, Q8_0, Q4_1])
@pytest.mark.parametrize("part", ["token_embd.weight", "blk.1.ffn_norm.weight"])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, kind: int, part: str):
    """One of them would spoil every sequence that it comes near."""
    with pytest.raises(ModelFileError, match=f"{part} has numbers that are none"):
        loaded(tiny_file(tmp_path / "m.gguf", kind, spoilt=part), [])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"weights": "q5_k"}, "CHORUS_WEIGHTS must be one of as-stored"),
        ({"kv_type": "fp4"}, "CHORUS_KV_TYPE must be one of auto"),
        ({"kv_type": "float8"}, "float8 is for CHORUS_DEVICE=cuda"),
        ({"context_max": 31}, "a context of 31 tokens is too short"),
        ({"blocks": 1}, "too little: this model needs 2"),
        ({"device": "tpu"}, "CHORUS_DEVICE must be one of cpu"),
        ({"device": "cuda"}, "torch finds no GPU"),
    ],
)
def test_wrong_settings_are_errors_and_no_silent_fallback(tmp_path: Path, monkeypatch, fields: dict, said: str):
    """Who asks for what does not exist is told what does."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tiny_file(tmp_path / "m.gguf", Q4_1)
    with pytest.raises(ConfigError, match=said):
        loaded(path, [], **fields)


@needs_kernels
def test_a_folder_of_safetensors_runs_on_the_kernels(tmp_path: Path):
    """Written as float32 from a GGUF file's weights: the same rows, once in the order of halves, give the same logits."""
    path = tiny_file(tmp_path / "m.gguf", FLOAT32, tied=False)
    folder = safetensors_of(path, tmp_path / "folder")
    found = []
    for source in (path, folder):
        with open_checkpoint(source) as checkpoint:
            assert misfit(checkpoint, TensorType.Q8_0) is None
        with kernel_model(source, VARIANTS[0], quantised=TensorType.Q8_0) as model:
            found.append(logits(model, Rows(ids(2, 33), 0, TABLE, BEST))[0])
    assert np.array_equal(*found)


def safetensors_of(path: Path, folder: Path) -> Path:
    folder.mkdir()
    header, data = {}, b""
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        for part, name in NAMES.items():
            if "bias" in part.value or part in (Part.QUERY_NORM, Part.KEY_NORM):
                continue
            for layer in range(config.layers if "{}" in name else 1):
                values = checkpoint.floats(part, layer)
                place = [len(data), len(data) + values.nbytes]
                header[name.format(layer)] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": place}
                data += values.tobytes()
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    fields = {
        "model_type": "llama", "vocab_size": config.vocab, "hidden_size": config.hidden, "rms_norm_eps": config.eps,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads, "intermediate_size": config.ffn, "rope_theta": config.theta,
        "max_position_embeddings": config.context, "tie_word_embeddings": config.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
