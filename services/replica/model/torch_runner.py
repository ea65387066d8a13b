"""The runner behind a model in torch: a forward pass, then a sampler. float32 on a CPU, bfloat16 on a GPU."""

from collections.abc import Callable

import torch

from services.replica.core.plan import StepPlan, StepResult
from services.replica.model.attention import AttentionBackend, PaddedAttention
from services.replica.model.checkpoint import Checkpoint
from services.replica.model.config import ModelConfig
from services.replica.model.flash_attention import FlashAttention, find_library
from services.replica.model.kv_size import KvType
from services.replica.model.loader import load_weights
from services.replica.model.sampler import odds_wanted, sample, tell_odds
from services.replica.model.transformer import Forward, Transformer
from services.replica.runner import RunnerInfo
from shared.errors import ConfigError

_TYPES = {"cpu": (torch.float32, KvType.FLOAT32, "f32"), "cuda": (torch.bfloat16, KvType.BFLOAT16, "bf16")}


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
        rows = logits.cpu().numpy()
        given = rows.copy() if odds_wanted(params) else rows  # sampling changes them
        tokens = sample(rows, params)
        return StepResult(tokens, odds=tell_odds(given, tokens, params))

    def close(self) -> None:
        self._forward = None


def kv_type(device: str) -> KvType:
    """What keys and values are kept as when nothing is asked for."""
    return _TYPES[device][1]


def build_runner(
    checkpoint: Checkpoint,
    version: str,
    *,
    device: str,
    kv: KvType,
    context: int,
    blocks: int,
    threads: int,
    progress: Callable[[float], None],
) -> TorchRunner:
    """Weights are dequantised. Raises ModelFileError: a tensor is missing or not understood; ConfigError: no GPU."""
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("CHORUS_DEVICE=cuda, but torch finds no GPU here: choose cpu.")
    dtype, own, name = _TYPES[device]
    place = torch.device(device)
    weights = load_weights(checkpoint, progress, dtype=dtype, device=place)
    attention = _attention(checkpoint.config, blocks, dtype, kv, place)
    forward = Transformer(checkpoint.config, weights, blocks=blocks, context=context, attention=attention)
    version = f"{version}-{name}" if kv is own else f"{version}-{name}-kv-{kv.value}"
    return TorchRunner(forward, RunnerInfo(version, forward.blocks_total, context, checkpoint.config.vocab))


def _attention(
    config: ModelConfig, blocks: int, dtype: torch.dtype, kv: KvType, device: torch.device
) -> AttentionBackend:
    """flash-attn where it is and can: on a GPU, keys and values in the model's own numbers."""
    library = find_library() if device.type == "cuda" and kv is _TYPES["cuda"][1] else None
    if library is not None:
        return FlashAttention(config, blocks, dtype, library=library, device=device)
    return PaddedAttention(config, blocks, dtype, kind=kv, device=device)
