"""Models in Hugging Face folders: config.json says what shape they are of, safetensors files hold the weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from services.replica.model.checkpoint import Checkpoint, Part
from services.replica.model.config import ModelConfig, linear_factors, llama3_factors
from services.replica.model.safetensors import SafetensorsFolder
from shared.errors import ModelFileError
from shared.hf_files import CONFIG, parse_json, read_bytes

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # SmolLM2 calls itself llama
NAMES: Mapping[Part, str] = {
    Part.EMBEDDING: "model.embed_tokens.weight",
    Part.HEAD: "lm_head.weight",
    Part.FINAL_NORM: "model.norm.weight",
    Part.ATTENTION_NORM: "model.layers.{}.input_layernorm.weight",
    Part.QUERY: "model.layers.{}.self_attn.q_proj.weight",
    Part.KEY: "model.layers.{}.self_attn.k_proj.weight",
    Part.VALUE: "model.layers.{}.self_attn.v_proj.weight",
    Part.QUERY_BIAS: "model.layers.{}.self_attn.q_proj.bias",
    Part.KEY_BIAS: "model.layers.{}.self_attn.k_proj.bias",
    Part.VALUE_BIAS: "model.layers.{}.self_attn.v_proj.bias",
    Part.QUERY_NORM: "model.layers.{}.self_attn.q_norm.weight",
    Part.KEY_NORM: "model.layers.{}.self_attn.k_norm.weight",
    Part.ATTENTION_OUT: "model.layers.{}.self_attn.o_proj.weight",
    Part.FFN_NORM: "model.layers.{}.post_attention_layernorm.weight",
    Part.GATE: "model.layers.{}.mlp.gate_proj.weight",
    Part.UP: "model.layers.{}.mlp.up_proj.weight",
    Part.DOWN: "model.layers.{}.mlp.down_proj.weight",
}
_REPEATED = ".rotary_emb.inv_freq"  # older checkpoints hold what theta says


class _Rope(msgspec.Struct):
    rope_type: str = ""
    type: str = ""  # its older name
    rope_theta: float = 0.0
    factor: float = 0.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: float = 0.0
    partial_rotary_factor: float = 1.0


class _Config(msgspec.Struct):
    """What is read of config.json; the rest does not change what the model says."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None  # since transformers 5: theta and scaling in one
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    tie_word_embeddings: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int = 28  # what Qwen's own configuration class takes it for
    layer_types: list[str] | None = None
    quantization_config: dict[str, object] | None = None


def open_folder(folder: Path) -> Checkpoint:
    """Raises ModelFileError when its files are missing or malformed, or it is of a kind that is not built."""
    data = read_bytes(folder / CONFIG)
    store = SafetensorsFolder(folder, data)
    try:
        config = read_config(data, folder / CONFIG, has_head=NAMES[Part.HEAD] in store.tensors)
    except BaseException:
        store.close()
        raise
    repeated = {name for name in store.tensors if name.endswith(_REPEATED)}
    if config.tied:
        repeated.add(NAMES[Part.HEAD])
    return Checkpoint(store, config, NAMES, ignored=frozenset(repeated))


def read_config(data: bytes, path: Path, *, has_head: bool) -> ModelConfig:
    """`has_head`: there is a head beside the embedding. Raises ModelFileError; `path` is named in it."""
    read = parse_json(data, _Config, path)
    if read.model_type not in MODEL_TYPES:
        raise ModelFileError(f"{path}: its model_type is {read.model_type!r}, and only {MODEL_TYPES} are built.")
    rope = read.rope_parameters or read.rope_scaling or _Rope()
    if read.hidden_act != "silu" or read.partial_rotary_factor != 1 or rope.partial_rotary_factor != 1:
        raise ModelFileError(f"{path}: another activation than SiLU, or RoPE on a part of each head, is not built.")
    if read.quantization_config is not None:
        raise ModelFileError(f"{path}: its weights are quantised in a way that is not read. Choose another model.")
    head_dim = read.head_dim or read.hidden_size // max(read.num_attention_heads, 1)
    theta = rope.rope_theta or read.rope_theta or 10_000.0
    try:
        config = ModelConfig(
            vocab=read.vocab_size,
            hidden=read.hidden_size,
            layers=read.num_hidden_layers,
            heads=read.num_attention_heads,
            kv_heads=read.num_attention_heads if read.num_key_value_heads is None else read.num_key_value_heads,
            head_dim=head_dim,
            ffn=read.intermediate_size,
            context=read.max_position_embeddings,
            eps=read.rms_norm_eps,
            theta=theta,
            qkv_bias=read.model_type == "qwen2" or read.attention_bias,
            qk_norm=read.model_type == "qwen3",
            window=_window(read),
            tied=not has_head if read.tie_word_embeddings is None else read.tie_word_embeddings,
        )
        return replace(config, rope_factors=_rope_factors(rope, head_dim, theta))  # its sizes are sane by now
    except ValueError as error:
        raise ModelFileError(f"{path}: {error}. Choose another model.") from error


def _rope_factors(rope: _Rope, head_dim: int, theta: float) -> tuple[float, ...]:
    """ValueError: it is scaled in a way that is not built."""
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return ()
    if kind == "linear":
        return linear_factors(head_dim, rope.factor)
    if kind == "llama3":
        return llama3_factors(
            head_dim,
            theta,
            factor=rope.factor,
            low=rope.low_freq_factor,
            high=rope.high_freq_factor,
            original=rope.original_max_position_embeddings,
        )
    raise ValueError(f"it scales RoPE ({kind}), which is not built")


def _window(read: _Config) -> int:
    """0 where every token sees all before it. ValueError: layers differ."""
    if not read.sliding_window or read.use_sliding_window is False or read.model_type == "llama":
        return 0
    if read.model_type != "mistral" and not read.use_sliding_window:
        return 0
    if read.sliding_window >= read.max_position_embeddings:
        return 0
    if read.layer_types is not None:
        sliding = [kind == "sliding_attention" for kind in read.layer_types]
    else:
        sliding = [
            read.model_type == "mistral" or layer >= read.max_window_layers for layer in range(read.num_hidden_layers)
        ]
    if any(sliding) and not all(sliding):
        raise ValueError("some of its layers see all tokens and others a window, which is not built")
    return read.sliding_window if any(sliding) else 0
