"""The runner behind a real model: a forward pass, then a sampler."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from services.replica.core.plan import StepPlan, StepResult
from services.replica.engine_messages import EngineConfig
from services.replica.model.config import ModelConfig, read_config
from services.replica.model.kv_cache import blocks_in
from services.replica.model.loader import load_weights
from services.replica.model.sampler import sample
from services.replica.model.transformer import Forward, Transformer
from services.replica.runner import RunnerInfo
from shared.errors import ConfigError, ModelFileError
from shared.gguf import GgufFile
from shared.limits import MIB

_HASH_PIECE = 16 * MIB


class TorchRunner:
    """`Runner` over any `Forward`."""

    def __init__(self, forward: Forward, info: RunnerInfo) -> None:
        self.info = info
        self._forward: Forward | None = forward

    def run(self, plan: StepPlan) -> StepResult:
        if self._forward is None:
            raise RuntimeError("the runner was closed")
        logits = self._forward.logits(plan)
        params = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
        return StepResult(sample(logits, params) if params else [])

    def close(self) -> None:
        self._forward = None


def load_runner(config: EngineConfig, vocab_size: int, progress: Callable[[str, float, str], None]) -> TorchRunner:
    """Read the model file and build. Raises ConfigError (ModelFileError) when file or settings do not go together."""
    torch.set_num_threads(config.threads)
    with GgufFile(Path(config.model_file)) as file:
        version = f"{file_hash(file, lambda share: progress('read', share, 'hash'))}-f32"
        model = read_config(file)
        if model.vocab != vocab_size:
            raise ModelFileError(f"{file.path}: {model.vocab} embeddings for a vocabulary of {vocab_size}.")
        weights = load_weights(file, model, lambda share: progress("build", share, "weights"))
    context = min(config.context_max or model.context, model.context)
    blocks = config.blocks or kv_blocks(model, config.kv_bytes)
    forward = Transformer(model, weights, blocks=blocks, context=context)
    return TorchRunner(forward, RunnerInfo(version, forward.blocks_total, context, model.vocab))


def kv_blocks(model: ModelConfig, kv_bytes: int) -> int:
    blocks = blocks_in(model, kv_bytes, torch.float32)
    if blocks < 1:
        raise ConfigError(f"{kv_bytes} bytes of KV memory hold no block of this model: give it more")
    return blocks


def file_hash(file: GgufFile, progress: Callable[[float], None]) -> str:
    """The first 16 hexadecimal digits of the file's SHA-256."""
    digest = hashlib.sha256()
    data = file.bytes()
    for at in range(0, len(data), _HASH_PIECE):
        digest.update(data[at : at + _HASH_PIECE])
        progress(min(1.0, (at + _HASH_PIECE) / len(data)))
    data.release()
    return digest.hexdigest()[:16]
