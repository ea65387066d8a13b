"""The runner behind a model on a CPU: the native kernels, weights as the file has them or quantised at load."""

from collections.abc import Callable

import numpy as np

from services.replica.core.plan import SampleParams, StepPlan, StepResult
from services.replica.core.randomness import unit
from services.replica.core.sequence import penalised
from services.replica.model.checkpoint import FLOAT_TYPES, LAYER_MATRICES, SHARED_INPUT, Checkpoint, Part
from services.replica.model.config import ModelConfig
from services.replica.model.kv_size import KvType
from services.replica.model.native.kernels import (
    BEST,
    KINDS,
    Draw,
    KernelModel,
    KernelShape,
    MatrixPlace,
    Rows,
    Variant,
    VectorPlace,
)
from services.replica.model.sampler import LEAST_TEMPERATURE, odds_wanted, sample, tell_odds
from services.replica.runner import RunnerInfo
from shared.gguf import TensorType


class NativeRunner:
    """`Runner` over a model in the native library."""

    def __init__(self, model: KernelModel, info: RunnerInfo) -> None:
        self.info = info
        self._model = model

    def run(self, plan: StepPlan) -> StepResult:
        params = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
        rows = [Rows(chunk.ids, chunk.start, chunk.blocks, _draw(chunk.sample)) for chunk in plan.chunks]
        # Which rows the kernels draw is a matter of the row's own parameters, never of the batch.
        left = [at for at, param in enumerate(params) if not drawn_natively(param)]
        drawn, logits = self._model.forward(rows, logits=bool(left) or odds_wanted(params))
        tokens: list[int] = drawn.tolist()
        if logits is None:
            return StepResult(tokens)
        for at, token in zip(left, sample(logits[left], [params[at] for at in left]), strict=True):
            tokens[at] = token
        return StepResult(tokens, odds=tell_odds(logits, tokens, params))

    def close(self) -> None:
        self._model.close()


def drawn_natively(param: SampleParams) -> bool:
    """Earlier tokens and the client's own bias do not matter: the kernels draw, and no logits leave them."""
    return not (param.sampling.logit_bias or penalised(param.sampling))


def _draw(param: SampleParams | None) -> Draw | None:
    if param is None:
        return None
    sampling = param.sampling
    if sampling.temperature <= 0 or not drawn_natively(param):
        return BEST
    return Draw(
        max(sampling.temperature, LEAST_TEMPERATURE),
        min_p=sampling.min_p,
        unit=unit(param.seed, param.position),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def misfit(checkpoint: Checkpoint, quantised: TensorType | None = None) -> str | None:
    """Why the kernels cannot run this model, its float matrices read as `quantised`; None: they can."""
    config = checkpoint.config

    def read_as(part: Part, layer: int = 0) -> TensorType:
        kind = checkpoint.type_of(part, layer)
        return quantised if quantised is not None and kind in FLOAT_TYPES else kind

    single = (Part.EMBEDDING,) if config.tied else (Part.EMBEDDING, Part.HEAD)
    found = {read_as(part) for part in single}
    found |= {read_as(part, layer) for part in LAYER_MATRICES for layer in range(config.layers)}
    if odd := sorted(kind.name for kind in found if kind not in KINDS):
        return f"it has matrices of type {', '.join(odd)}"
    for layer in range(config.layers):
        for parts in SHARED_INPUT:
            if len({read_as(part, layer) for part in parts}) > 1:
                names = ", ".join(part.value for part in parts)
                return f"its {names} matrices of layer {layer} are of different types"
    return _shape(config, context=1, blocks=1, threads=1, precise=False, kv=own_kv_type(precise=False)).misfit()


def own_kv_type(*, precise: bool) -> KvType:
    """What keys and values are kept as where nothing else is asked for."""
    return KvType.FLOAT16 if precise else KvType.INT8


def build_model(
    checkpoint: Checkpoint,
    variant: Variant,
    *,
    context: int,
    blocks: int,
    threads: int,
    precise: bool,
    progress: Callable[[float], None],
    kv: KvType | None = None,
    quantised: TensorType | None = None,
) -> KernelModel:
    """Repack a model's weights, float matrices as `quantised`. Raises ModelFileError: a tensor is missing or wrong.

    `kv` is what keys and values are kept as; None: the mode's own type.
    """
    kv = kv or own_kv_type(precise=precise)
    shape = _shape(checkpoint.config, context=context, blocks=blocks, threads=threads, precise=precise, kv=kv)
    model = KernelModel(variant, shape)
    try:
        _put_weights(model, checkpoint, quantised, progress)
    except BaseException:
        model.close()
        raise
    return model


def _shape(config: ModelConfig, *, context: int, blocks: int, threads: int, precise: bool, kv: KvType) -> KernelShape:
    return KernelShape(
        vocab=config.vocab,
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        eps=config.eps,
        theta=config.theta,
        rope_factors=config.rope_factors,
        window=config.window,
        qk_norm=config.qk_norm,
        context=context,
        blocks=blocks,
        threads=threads,
        precise=precise,
        kv=kv,
    )


def _put_weights(
    model: KernelModel, checkpoint: Checkpoint, quantised: TensorType | None, progress: Callable[[float], None]
) -> None:
    config = checkpoint.config
    # A 4-bit head costs more than it saves: its kind is that of an 8-bit one.
    outer = None if quantised is None else TensorType.Q8_0

    def matrix(
        place: MatrixPlace, cols: int, *parts: Part, layer: int = 0, kind: TensorType | None = quantised
    ) -> None:
        read = [checkpoint.raw(part, layer, quantised=kind) for part in parts]
        model.put_matrix(place, layer, read[0][0], [rows for _, rows in read], cols=cols)

    def vector(place: VectorPlace, *parts: Part, layer: int = 0) -> None:
        model.put_vector(place, layer, np.concatenate([checkpoint.floats(part, layer) for part in parts]))

    for layer in range(config.layers):
        matrix("qkv", config.hidden, Part.QUERY, Part.KEY, Part.VALUE, layer=layer)
        matrix("o", config.heads * config.head_dim, Part.ATTENTION_OUT, layer=layer)
        matrix("gate_up", config.hidden, Part.GATE, Part.UP, layer=layer)
        matrix("down", config.ffn, Part.DOWN, layer=layer)
        vector("norm", Part.ATTENTION_NORM, layer=layer)
        vector("ffn_norm", Part.FFN_NORM, layer=layer)
        if config.qkv_bias:
            vector("qkv_bias", Part.QUERY_BIAS, Part.KEY_BIAS, Part.VALUE_BIAS, layer=layer)
        if config.qk_norm:
            vector("q_norm", Part.QUERY_NORM, layer=layer)
            vector("k_norm", Part.KEY_NORM, layer=layer)
        progress((layer + 1) / (config.layers + 1))
    if config.tied:
        matrix("head", config.hidden, Part.EMBEDDING, kind=outer)
        model.tie_embedding()
    else:
        matrix("embedding", config.hidden, Part.EMBEDDING, kind=outer)
        matrix("head", config.hidden, Part.HEAD, kind=outer)
    vector("final_norm", Part.FINAL_NORM)
    checkpoint.refuse_unread()
    progress(1.0)
