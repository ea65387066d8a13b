"""The models a region serves, read from one JSON file that every service is given the path of."""

import msgspec

from shared.errors import ConfigError
from shared.limits import OUTPUT_TOKENS_MAX

STUB_FILE = "stub"  # a model without weights: scripted replicas and the stub tokenizer


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model as users see it. `file` is a weights path or STUB_FILE; the tokenizer comes from the same place."""

    id: str
    file: str
    context_tokens: int  # prompt and output together
    output_tokens_max: int
    role: str = "fast"  # fast | mini
    owned_by: str = "chorus"
    note: str = ""  # said in /v1/models, when something about the model should be
    created_s: int = 0


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelCard, ...]

    def get(self, model: str) -> ModelCard | None:
        return next((card for card in self.models if card.id == model), None)

    @property
    def default(self) -> ModelCard:
        """What answers when a client leaves the choice to us."""
        return next((card for card in self.models if card.role == "fast"), self.models[0])

    @property
    def mini(self) -> ModelCard | None:
        """What answers past a limit, and says so."""
        return next((card for card in self.models if card.role == "mini"), None)


def parse_catalog(data: bytes) -> Catalog:
    """JSON -> Catalog; raises ConfigError with the first thing that is wrong."""
    try:
        catalog = msgspec.json.decode(data, type=Catalog)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the model catalog is not valid: {error}") from error
    names = [card.id for card in catalog.models]
    if not names:
        raise ConfigError("the model catalog lists no model: name at least one")
    if len(set(names)) != len(names):
        raise ConfigError(f"the model catalog names a model twice: {sorted(names)}")
    for card in catalog.models:
        if not 0 < card.output_tokens_max <= min(card.context_tokens, OUTPUT_TOKENS_MAX):
            raise ConfigError(
                f"model {card.id!r}: output_tokens_max must be 1..{min(card.context_tokens, OUTPUT_TOKENS_MAX)}"
            )
    return catalog


def local_catalog(model_file: str) -> Catalog:
    """What `chorus up` serves: one fast model, and its mini twin with smaller limits that says what it is."""
    stub = model_file == STUB_FILE
    base = "stub" if stub else "smollm2-135m"
    return Catalog(
        models=(
            ModelCard(
                id=base,
                file=model_file,
                context_tokens=8192 if stub else 2048,
                output_tokens_max=4096 if stub else 1024,
                note="scripted tokens, no model" if stub else "SmolLM2-135M-Instruct, 4-bit weights",
            ),
            ModelCard(
                id=f"{base}-mini",
                file=model_file,
                context_tokens=4096 if stub else 1024,
                output_tokens_max=1024 if stub else 256,
                role="mini",
                note=f"the same weights as {base} with smaller limits; a smaller model may take its place",
            ),
        )
    )
