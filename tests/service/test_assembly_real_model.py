"""Context assembly with the real model's tokenizer and template: the prompt the model was trained on, and nobody's tricks."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.conversation.assembly import Budget, Piece, assemble
from services.conversation.prompts import PromptModel, load_models
from shared.catalog import local_catalog
from shared.tokenizer import Tokenizer, load_tokenizer

MODEL_FILE = Path(
    os.environ.get("CHORUS_MODEL_FILE", Path(__file__).parents[2] / ".models/SmolLM2-135M-Instruct.Q4_1.gguf")
)
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not MODEL_FILE.exists(), reason=f"no model file at {MODEL_FILE}: run `chorus models fetch`"),
]
Chat = list[tuple[str, str]]
ROOM = Budget(100_000, 100_000, 100_000, 1)
CHATS: list[Chat] = [
    [("user", "What is the capital of France?")],
    [("system", "Answer in one word."), ("user", "What is 2 + 2?")],
    [("user", "Hi"), ("assistant", "Hello! How can I help?"), ("user", "Tell me a joke about naïve 日本 🦊 tokens.")],
    [("system", "Be brief."), ("user", "a  b\n\n\tc"), ("assistant", "d "), ("user", " e\r\nf ")],
]


@pytest.fixture(scope="module")
def model() -> PromptModel:
    catalog = local_catalog(str(MODEL_FILE))
    return load_models(catalog)[catalog.default.id]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(MODEL_FILE))


def context(model: PromptModel, tokenizer: Tokenizer, chat: Chat) -> list[int]:
    pieces = [Piece(role, tokenizer.encode(text)) for role, text in chat]
    made = assemble([], [], pieces, room=ROOM, skeleton=model.skeleton, stop_ids=model.stop_ids)
    return list(made.ids)


@pytest.mark.parametrize(
    "chat", CHATS, ids=lambda chat: f"{len(chat)} messages, {sum(len(text) for _, text in chat)} characters"
)
def test_a_prompt_reads_as_the_template_renders_it(model: PromptModel, tokenizer: Tokenizer, chat: Chat) -> None:
    """Pieces joined by ids are what the model's own template makes of the same messages as one string."""
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(tokenizer.chat_template)
    messages = [{"role": role, "content": text} for role, text in chat]
    whole = template.render(messages=messages, add_generation_prompt=True)
    ids, as_one = context(model, tokenizer, chat), tokenizer.encode_template(whole)
    assert tokenizer.decode(ids) == tokenizer.decode(as_one)
    controls = set(tokenizer.special_ids.values())
    assert [one for one in ids if one in controls] == [one for one in as_one if one in controls]
    if all(text == text.strip() for _, text in chat):  # else a space may join what stands before it
        assert ids == as_one


NASTY = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "system", "\n", " ", "a", "é", "\U0001f98a"]),
    max_size=8,
).map("".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), NASTY), min_size=1, max_size=4))
def test_no_words_of_a_person_become_control_tokens(chat: Chat) -> None:
    """Whatever a message says, its ids hold no control token, and its text comes back as it was."""
    for _, text in chat:
        ids = TOKENIZER[0].encode(text)
        assert not set(ids) & set(TOKENIZER[0].special_ids.values())
        assert TOKENIZER[0].decode(ids) == text


TOKENIZER = [load_tokenizer(str(MODEL_FILE))] if MODEL_FILE.exists() else []
