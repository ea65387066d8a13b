"""The shape of a Llama-family model, read from a model file."""

from dataclasses import dataclass

from shared.errors import ModelFileError
from shared.gguf import GgufFile

ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes in numbers, not bytes. `heads / kv_heads` query heads share a key-value head."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float  # of RMSNorm
    theta: float  # of RoPE

    def __post_init__(self) -> None:
        if min(self.vocab, self.hidden, self.layers, self.heads, self.kv_heads, self.ffn, self.context) < 1:
            raise ValueError("every size of a model must be at least 1")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"{self.heads} heads of {self.head_dim} do not go with {self.kv_heads} key-value heads")

    @property
    def kv_numbers(self) -> int:
        """Numbers that the KV cache keeps for each token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_config(file: GgufFile) -> ModelConfig:
    """Raises ModelFileError when the file is of another architecture or scales RoPE in a way that is not built."""
    kind = file.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelFileError(f"{file.path}: its architecture is {kind!r}, and only {ARCHITECTURES} are built.")
    scaling = file.text(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelFileError(f"{file.path}: it scales RoPE ({scaling}), which is not built. Choose another file.")
    heads = file.integer(f"{kind}.attention.head_count")
    hidden = file.integer(f"{kind}.embedding_length")
    head_dim = file.integer(f"{kind}.attention.key_length", hidden // max(heads, 1))
    if file.integer(f"{kind}.rope.dimension_count", head_dim) != head_dim:
        raise ModelFileError(f"{file.path}: RoPE turns a part of each head only, which is not built.")
    embedding = file.tensors.get("token_embd.weight")
    try:
        return ModelConfig(
            vocab=embedding.shape[0] if embedding else 0,
            hidden=hidden,
            layers=file.integer(f"{kind}.block_count"),
            heads=heads,
            kv_heads=file.integer(f"{kind}.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn=file.integer(f"{kind}.feed_forward_length"),
            context=file.integer(f"{kind}.context_length"),
            eps=file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
            theta=file.number(f"{kind}.rope.freq_base", 10_000.0),
        )
    except ValueError as error:
        raise ModelFileError(f"{file.path}: {error}. Choose another file.") from error
