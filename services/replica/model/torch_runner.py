"""The runner behind a real model: a forward pass, then a sampler."""

from collections.abc import Callable

import torch

from services.replica.core.plan import StepPlan, StepResult
from services.replica.model.config import ModelConfig
from services.replica.model.loader import load_weights
from services.replica.model.sampler import odds_wanted, sample, tell_odds
from services.replica.model.transformer import Forward, Transformer
from services.replica.runner import RunnerInfo
from shared.gguf import GgufFile
from shared.limits import BLOCK_TOKENS


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
        rows = logits.numpy()
        given = rows.copy() if odds_wanted(params) else rows  # sampling changes them
        tokens = sample(rows, params)
        return StepResult(tokens, odds=tell_odds(given, tokens, params))

    def close(self) -> None:
        self._forward = None


def build_runner(
    file: GgufFile,
    model: ModelConfig,
    version: str,
    *,
    context: int,
    blocks: int,
    threads: int,
    progress: Callable[[float], None],
) -> TorchRunner:
    """The file's weights dequantised to float32. Raises ModelFileError when a tensor is missing or not understood."""
    torch.set_num_threads(threads)
    weights = load_weights(file, model, progress)
    forward = Transformer(model, weights, blocks=blocks, context=context)
    return TorchRunner(forward, RunnerInfo(f"{version}-f32", forward.blocks_total, context, model.vocab))


def kv_block_bytes(model: ModelConfig) -> int:
    return model.kv_numbers * BLOCK_TOKENS * torch.float32.itemsize
