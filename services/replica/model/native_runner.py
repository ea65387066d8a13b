"""The runner behind a GGUF model on a CPU: the native kernels, weights as the file has them, half-precision KV."""

from collections.abc import Callable

from services.replica.core.plan import SampleParams, StepPlan, StepResult
from services.replica.core.randomness import unit
from services.replica.core.sequence import penalised
from services.replica.model.config import ModelConfig
from services.replica.model.native.kernels import (
    BEST,
    KINDS,
    Draw,
    KernelModel,
    KernelShape,
    MatrixPlace,
    Rows,
    Variant,
)
from services.replica.model.sampler import odds_wanted, sample, tell_odds
from services.replica.model.weights_file import Bytes, TensorReader, halves
from services.replica.runner import RunnerInfo
from shared.gguf import GgufFile, TensorType
from shared.limits import BLOCK_TOKENS

KV_BYTES = 2  # half precision


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
    """Neither earlier tokens nor the order of the odds matter: the kernels draw, and no logits leave them."""
    sampling = param.sampling
    if sampling.logit_bias or penalised(sampling):
        return False
    return sampling.temperature <= 0 or (sampling.top_k == 0 and sampling.top_p >= 1)


def _draw(param: SampleParams | None) -> Draw | None:
    if param is None:
        return None
    if param.sampling.temperature <= 0 or not drawn_natively(param):
        return BEST
    return Draw(param.sampling.temperature, param.sampling.min_p, unit(param.seed, param.position))


def misfit(file: GgufFile, config: ModelConfig) -> str | None:
    """Why the kernels cannot run this file; None: they can."""
    odd = sorted({t.type.name for t in file.tensors.values() if len(t.shape) == 2 and t.type not in KINDS})
    if odd:
        return f"it has matrices of type {', '.join(odd)}"
    for layer in range(config.layers):
        for names in (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")):  # products that share their input
            found = {t.type for name in names if (t := file.tensors.get(f"blk.{layer}.{name}.weight")) is not None}
            if len(found) > 1:
                return f"its {', '.join(names)} of layer {layer} are of different types"
    return _shape(config, context=1, blocks=1, threads=1, precise=False).misfit()


def kv_block_bytes(config: ModelConfig) -> int:
    return config.kv_numbers * BLOCK_TOKENS * KV_BYTES


def build_model(
    file: GgufFile,
    config: ModelConfig,
    variant: Variant,
    *,
    context: int,
    blocks: int,
    threads: int,
    precise: bool,
    progress: Callable[[float], None],
) -> KernelModel:
    """Repack a file's weights into a model. Raises ModelFileError when a tensor is missing, misshapen or unknown."""
    model = KernelModel(variant, _shape(config, context=context, blocks=blocks, threads=threads, precise=precise))
    try:
        _put_weights(model, TensorReader(file), config, tied="output.weight" not in file.tensors, progress=progress)
    except BaseException:
        model.close()
        raise
    return model


def _shape(config: ModelConfig, *, context: int, blocks: int, threads: int, precise: bool) -> KernelShape:
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
        context=context,
        blocks=blocks,
        threads=threads,
        precise=precise,
    )


def _put_weights(
    model: KernelModel, reader: TensorReader, config: ModelConfig, *, tied: bool, progress: Callable[[float], None]
) -> None:
    q_rows, kv_rows, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden

    def put(place: MatrixPlace, layer: int, cols: int, *parts: tuple[TensorType, Bytes]) -> None:
        model.put_matrix(place, layer, parts[0][0], [rows for _, rows in parts], cols=cols)

    for layer in range(config.layers):
        name = f"blk.{layer}."
        query_kind, query = reader.raw(f"{name}attn_q.weight", q_rows, hidden)
        key_kind, key = reader.raw(f"{name}attn_k.weight", kv_rows, hidden)
        value = reader.raw(f"{name}attn_v.weight", kv_rows, hidden)
        turned = (query_kind, halves(query, config.heads)), (key_kind, halves(key, config.kv_heads))
        put("qkv", layer, hidden, *turned, value)
        put("o", layer, q_rows, reader.raw(f"{name}attn_output.weight", hidden, q_rows))
        gate, up = (reader.raw(f"{name}ffn_{which}.weight", config.ffn, hidden) for which in ("gate", "up"))
        put("gate_up", layer, hidden, gate, up)
        put("down", layer, config.ffn, reader.raw(f"{name}ffn_down.weight", hidden, config.ffn))
        model.put_vector("norm", layer, reader.read(f"{name}attn_norm.weight", hidden))
        model.put_vector("ffn_norm", layer, reader.read(f"{name}ffn_norm.weight", hidden))
        progress((layer + 1) / (config.layers + 1))
    embedding = reader.raw("token_embd.weight", config.vocab, hidden)
    if tied:
        put("head", 0, hidden, embedding)
        model.tie_embedding()
    else:
        put("embedding", 0, hidden, embedding)
        put("head", 0, hidden, reader.raw("output.weight", config.vocab, hidden))
    model.put_vector("final_norm", 0, reader.read("output_norm.weight", hidden))
    reader.refuse_unread()
