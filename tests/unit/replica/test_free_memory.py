"""Memory for keys and values: there before the first step, and too much of it is refused before the system ends us."""

from pathlib import Path

import pytest

from services.replica.engine_messages import EngineConfig
from services.replica.model import free_memory, load
from services.replica.model.kv_size import KvType, kv_block_bytes
from services.replica.model.load import load_runner
from services.replica.model.native import kernels
from shared.errors import ConfigError, EngineError
from shared.gguf import TensorType
from shared.limits import MIB
from tests.unit.replica.native_models import VARIANTS, VOCAB, config_of, kernel_model, needs_kernels, tiny_file


def resident() -> int:
    """Bytes of this process that are in memory."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )


@needs_kernels
def test_the_kv_memory_is_there_before_the_first_step(tmp_path: Path):
    """A step that waits for the system to find pages is late, one that gets none is the end of every reply."""
    path = tiny_file(tmp_path / "m.gguf", TensorType.Q8_0)
    block = kv_block_bytes(config_of(path), KvType.FLOAT16)
    blocks = 64 * MIB // block
    before = resident()
    with kernel_model(path, VARIANTS[0], blocks=blocks, kv=KvType.FLOAT16):
        assert resident() - before >= blocks * block


@pytest.mark.parametrize("kernels_wanted", ["", "none"])
def test_more_than_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_wanted: str):
    """By the kernels and by plain torch, with both sizes and what to do; where nothing is known, nothing is refused."""
    path = tiny_file(tmp_path / "m.gguf", TensorType.Q8_0)
    monkeypatch.setenv(kernels.CHOICE, kernels_wanted)
    monkeypatch.setattr(load, "free_bytes", lambda: 3 * MIB)
    config = EngineConfig(model_file=str(path), kv_bytes=4 * MIB)
    with pytest.raises(ConfigError, match=r"of [34] MiB does not fit: 3 MiB are free here. Set CHORUS_KV_MIB lower"):
        load_runner(config, VOCAB, lambda *_: None)
    for free in (None, 4 * MIB):
        monkeypatch.setattr(load, "free_bytes", lambda free=free: free)
        load_runner(config, VOCAB, lambda *_: None)


MACHINE = "MemTotal:       2048 kB\nMemFree:         10 kB\nMemAvailable:    1024 kB\n"


@pytest.mark.parametrize(
    ("machine", "container", "free"),
    [
        (MACHINE, {}, 1024 * 1024),
        (MACHINE, {"max": "max\n", "current": "9\n"}, 1024 * 1024),
        (MACHINE, {"max": "900\n", "current": "400\n"}, 500),
        (MACHINE, {"max": "900\n", "current": "400\n", "stat": "anon 300\ninactive_file 90\n"}, 590),
        (MACHINE, {"max": "900\n", "current": "1000\n"}, 0),
        (None, {"max": "900\n", "current": "400\n"}, 500),
        (None, {}, None),
    ],
)
def test_the_machine_s_memory_or_the_container_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str | None, container: dict[str, str], free: int | None
):
    """Whichever is less; a system that does not say is asked no further."""
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    if machine is not None:
        (tmp_path / "meminfo").write_text(machine)
    for name, text in container.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory.free_bytes() == free


@needs_kernels
def test_too_little_for_the_weights_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The one sentence comes out, though views of the file stand in its traceback when the file is closed."""

    def none_left(*_: object, **__: object) -> None:
        raise EngineError("there is no memory for the model's weights")

    monkeypatch.setattr(kernels.KernelModel, "put_matrix", none_left)
    path = tiny_file(tmp_path / "m.gguf", TensorType.Q8_0)
    with pytest.raises(EngineError, match="no memory for the model's weights"):
        load_runner(EngineConfig(model_file=str(path), blocks=4), VOCAB, lambda *_: None)
