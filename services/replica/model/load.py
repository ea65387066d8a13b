"""Which runner serves a model file: the native kernels where they can, plain torch where they cannot, said aloud.

torch is imported only when it is to run: without it an engine starts in half a second and needs 300 MB less.
"""

import os
from collections.abc import Callable
from pathlib import Path

from services.replica.engine_messages import EngineConfig
from services.replica.model import native_runner
from services.replica.model.config import ModelConfig, read_config
from services.replica.model.native import kernels
from services.replica.model.weights_file import file_hash
from services.replica.runner import Runner, RunnerInfo
from shared.errors import ConfigError, ModelFileError
from shared.gguf import GgufFile

PRECISION = "CHORUS_PRECISION"  # of the native kernels
PRECISIONS = ("fast", "precise")

Progress = Callable[[str, float, str], None]


def load_runner(config: EngineConfig, vocab_size: int, progress: Progress) -> Runner:
    """Read the model file and build. Raises ConfigError (ModelFileError) when file or settings do not go together."""
    precision = os.environ.get(PRECISION, PRECISIONS[0])
    if precision not in PRECISIONS:
        raise ConfigError(f"{PRECISION} must be one of {', '.join(PRECISIONS)}, not {precision!r}.")
    with GgufFile(Path(config.model_file)) as file:
        version = file_hash(file, lambda share: progress("read", share, "hash"))
        model = read_config(file)
        if model.vocab != vocab_size:
            raise ModelFileError(f"{file.path}: {model.vocab} embeddings for a vocabulary of {vocab_size}.")
        variant = native_runner.misfit(file, model) or kernels.choose()
        if isinstance(variant, str):
            progress("build", 0.0, f"plain torch, because {variant}")
            return _torch(file, model, config, version, progress)
        progress("build", 0.0, f"native kernels {variant.name}, {precision}")
        return _native(file, model, config, f"{version}-{precision}", progress, variant)


def _native(  # noqa: PLR0917 - what `load_runner` knows
    file: GgufFile, model: ModelConfig, config: EngineConfig, version: str, progress: Progress, variant: kernels.Variant
) -> Runner:
    context = _context(model, config)
    blocks = _blocks(config, native_runner.kv_block_bytes(model))
    built = native_runner.build_model(
        file,
        model,
        variant,
        context=context,
        blocks=blocks,
        threads=config.threads,
        precise=version.endswith(PRECISIONS[1]),
        progress=lambda share: progress("build", share, "weights"),
    )
    return native_runner.NativeRunner(built, RunnerInfo(version, blocks, context, model.vocab))


def _torch(file: GgufFile, model: ModelConfig, config: EngineConfig, version: str, progress: Progress) -> Runner:
    from services.replica.model import torch_runner  # noqa: PLC0415

    return torch_runner.build_runner(
        file,
        model,
        version,
        context=_context(model, config),
        blocks=_blocks(config, torch_runner.kv_block_bytes(model)),
        threads=config.threads,
        progress=lambda share: progress("build", share, "weights"),
    )


def _context(model: ModelConfig, config: EngineConfig) -> int:
    return min(config.context_max or model.context, model.context)


def _blocks(config: EngineConfig, block_bytes: int) -> int:
    blocks = config.blocks or config.kv_bytes // block_bytes
    if blocks < 1:
        raise ConfigError(f"{config.kv_bytes} bytes of KV memory hold no block of this model: give it more")
    return blocks
