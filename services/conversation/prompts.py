"""The models of the catalog as conversation needs them: tokenizer, template, and the ids around people's words."""

import asyncio
from functools import lru_cache

from services.conversation.assembly import Skeleton
from services.conversation.template import ChatTemplate
from shared.catalog import Catalog, ModelCard
from shared.tokenizer import Tokenizer, load_tokenizer

ENCODE_INLINE_CHARS_MAX = 20_000  # a longer text is encoded in a thread: the loop serves others meanwhile
SKELETONS_MAX = 1024  # kept per template; turns of a conversation repeat their roles
LITERALS_MAX = 1024
# Without a template of its own a model gets its messages one after the other.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class PromptModel:
    """One model's side of context assembly."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.card, self._tokenizer, self._template = card, tokenizer, template
        self.tokenizer_name = f"{tokenizer.name}:{tokenizer.revision}"
        self.stop_ids, self.vocab_size = tokenizer.stop_ids, tokenizer.vocab_size
        self._literal = lru_cache(LITERALS_MAX)(self._encode_literal)
        self.skeleton = lru_cache(SKELETONS_MAX)(self._render)

    async def encode(self, text: str) -> list[int]:
        """A person's words; never a control token."""
        words = text.strip() if self._template.trims else text
        if len(words) <= ENCODE_INLINE_CHARS_MAX:
            return self._tokenizer.encode(words)
        return await asyncio.to_thread(self._tokenizer.encode, words)

    def domain(self, tenant: bytes = b"") -> bytes:
        """Of the block hash chain: the model, its tokenizer's revision, and the tenant where isolation is on."""
        model = f"{self.card.id}:{self._tokenizer.revision}".encode()
        return model + b"\0" + tenant if tenant else model

    def _render(self, roles: tuple[str, ...]) -> Skeleton:
        """Raises TemplateError when the template does not take these roles."""
        rendered = self._template.render(roles)
        return Skeleton(tuple(self._literal(text) for text in rendered.literals), rendered.slots)

    def _encode_literal(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_template(text))


def load_models(catalog: Catalog) -> dict[str, PromptModel]:
    """Every model of the catalog by its id, files read once; raises ModelFileError. Takes a second per file."""
    parts: dict[str, tuple[Tokenizer, ChatTemplate]] = {}
    models: dict[str, PromptModel] = {}
    for card in catalog.models:
        if card.file not in parts:
            tokenizer = load_tokenizer(card.file)
            parts[card.file] = tokenizer, ChatTemplate(tokenizer.chat_template or PLAIN_TEMPLATE)
        models[card.id] = PromptModel(card, *parts[card.file])
    return models
