"""Which runner serves a model: the native kernels where they can, plain torch where they cannot, said aloud.

torch is imported only when it is to run: without it an engine starts in half a second and needs 300 MB less.
"""

import os
from collections.abc import Callable
from pathlib import Path

from services.replica.core.plan import blocks_for
from services.replica.engine_messages import EngineConfig
from services.replica.model import native_runner
from services.replica.model.checkpoint import Checkpoint
from services.replica.model.free_memory import free_bytes
from services.replica.model.gguf_checkpoint import open_gguf
from services.replica.model.hf_checkpoint import open_folder
from services.replica.model.kv_size import KvType, kv_block_bytes
from services.replica.model.native import kernels
from services.replica.runner import Runner, RunnerInfo
from shared.errors import ConfigError, ModelFileError
from shared.gguf import TensorType
from shared.limits import CONTEXT_TOKENS_MIN, MIB

PRECISION = "CHORUS_PRECISION"  # of the native kernels
PRECISIONS = ("fast", "precise")
AS_STORED = "as-stored"
WEIGHTS = {AS_STORED: None, "q8_0": TensorType.Q8_0, "q4_1": TensorType.Q4_1, "q4_0": TensorType.Q4_0}
AUTO = "auto"
KV_TYPES = (AUTO, *(kind.value for kind in KvType))
DEVICES = ("cpu", "cuda")

Progress = Callable[[str, float, str], None]


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, or a folder of config.json and safetensors. Raises ModelFileError when it is none."""
    return open_folder(path) if path.is_dir() else open_gguf(path)


def load_runner(config: EngineConfig, vocab_size: int, progress: Progress) -> Runner:
    """Read the model and build. Raises ConfigError (ModelFileError) when model or settings do not go together."""
    precision = os.environ.get(PRECISION, PRECISIONS[0])
    for name, value, known in (
        (PRECISION, precision, PRECISIONS),
        ("CHORUS_WEIGHTS", config.weights, tuple(WEIGHTS)),
        ("CHORUS_KV_TYPE", config.kv_type, KV_TYPES),
        ("CHORUS_DEVICE", config.device, DEVICES),
    ):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}.")
    if config.device == "cpu" and config.kv_type == KvType.FLOAT8.value:
        raise ConfigError("CHORUS_KV_TYPE=float8 is for CHORUS_DEVICE=cuda; on a CPU int8 takes as little memory.")
    with open_checkpoint(Path(config.model_file)) as checkpoint:
        version = checkpoint.digest(lambda share: progress("read", share, "hash"))
        if checkpoint.config.vocab != vocab_size:
            raise ModelFileError(
                f"{checkpoint.path}: {checkpoint.config.vocab} embeddings for a vocabulary of {vocab_size}."
            )
        variant = _kernels(checkpoint, config)
        if isinstance(variant, str):
            left = "" if config.weights == AS_STORED else f"; CHORUS_WEIGHTS={config.weights} is for the kernels"
            progress("build", 0.0, f"plain torch, because {variant}{left}")
            return _torch(checkpoint, config, version, progress)
        progress("build", 0.0, f"native kernels {variant.name}, {precision}")
        return _native(checkpoint, config, version, precision, progress, variant)


def _kernels(checkpoint: Checkpoint, config: EngineConfig) -> kernels.Variant | str:
    """The kernels to use, or a sentence that says why none are."""
    if config.device != "cpu":
        return f"CHORUS_DEVICE={config.device}"
    misfit = native_runner.misfit(checkpoint, WEIGHTS[config.weights])
    if misfit is not None and config.weights == AS_STORED and native_runner.misfit(checkpoint, TensorType.Q8_0) is None:
        misfit += " (CHORUS_WEIGHTS=q8_0 quantises them for the kernels)"
    return misfit or kernels.choose()


def _native(  # noqa: PLR0917 - what `load_runner` knows
    checkpoint: Checkpoint,
    config: EngineConfig,
    digest: str,
    precision: str,
    progress: Progress,
    variant: kernels.Variant,
) -> Runner:
    precise = precision == PRECISIONS[1]
    kv = native_runner.own_kv_type(precise=precise) if config.kv_type == AUTO else KvType(config.kv_type)
    # The version names all that may change a bit of what the model says: the log keeps it beside what was written.
    names = [digest, *([config.weights] if config.weights != AS_STORED else []), precision, f"kv-{kv.value}"]
    names.append(f"r{kernels.REVISION}")
    context, blocks = _context(checkpoint, config), _blocks(checkpoint, config, kv)
    built = native_runner.build_model(
        checkpoint,
        variant,
        context=context,
        blocks=blocks,
        threads=config.threads,
        precise=precise,
        kv=kv,
        quantised=WEIGHTS[config.weights],
        progress=lambda share: progress("build", share, "weights"),
    )
    return native_runner.NativeRunner(built, RunnerInfo("-".join(names), blocks, context, checkpoint.config.vocab))


def _torch(checkpoint: Checkpoint, config: EngineConfig, version: str, progress: Progress) -> Runner:
    from services.replica.model import torch_runner  # noqa: PLC0415

    kv = torch_runner.kv_type(config.device) if config.kv_type == AUTO else KvType(config.kv_type)
    return torch_runner.build_runner(
        checkpoint,
        version,
        device=config.device,
        kv=kv,
        context=_context(checkpoint, config),
        blocks=_blocks(checkpoint, config, kv),
        threads=config.threads,
        progress=lambda share: progress("build", share, "weights"),
    )


def _context(checkpoint: Checkpoint, config: EngineConfig) -> int:
    context = min(config.context_max or checkpoint.config.context, checkpoint.config.context)
    if context < CONTEXT_TOKENS_MIN:
        raise ConfigError(
            f"a context of {context} tokens is too short for anything: give it {CONTEXT_TOKENS_MIN} or more"
        )
    return context


def _blocks(checkpoint: Checkpoint, config: EngineConfig, kv: KvType) -> int:
    size = kv_block_bytes(checkpoint.config, kv)
    blocks = config.blocks or config.kv_bytes // size
    least = blocks_for(CONTEXT_TOKENS_MIN)
    if blocks < least:
        raise ConfigError(
            f"KV memory for {blocks} blocks is too little: this model needs {least}, of {size} bytes each"
        )
    free = free_bytes() if config.device == "cpu" else None
    if free is not None and blocks * size > free:  # said before the system ends us for it
        raise ConfigError(
            f"KV memory of {blocks * size // MIB} MiB does not fit: {free // MIB} MiB are free here. "
            "Set CHORUS_KV_MIB lower, or run fewer replicas."
        )
    return blocks
