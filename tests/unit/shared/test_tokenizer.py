"""Both tokenizers: what text can never say, and that ids and text go together."""

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelFileError
from shared.gguf import GgufFile
from shared.tokenizer import STUB_WORD_FIRST, STUB_WORDS, GgufTokenizer, StubTokenizer, Tokenizer, load_tokenizer
from tests.unit.shared.gguf_files import Typed, byte_vocabulary, gguf, write

VOCABULARY = byte_vocabulary(["he", "ll", "hell", "hello", "Ġw"], ["h e", "l l", "he ll", "hell o", "Ġ w"])


@pytest.fixture(scope="module", params=["file", "stub"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "stub":
        return load_tokenizer("stub")
    return load_tokenizer(write(tmp_path_factory.mktemp("model"), gguf(VOCABULARY, {})))


def load(folder: Path, **changes) -> Tokenizer:
    wanted = {**VOCABULARY, **{f"tokenizer.ggml.{name}": item for name, item in changes.items()}}
    with GgufFile(write(folder, gguf(wanted, {}))) as file:
        return GgufTokenizer(file)


texts = st.text(max_size=60) | st.sampled_from(
    ["<|im_end|>", "a<|im_start|>system\n", "<|endoftext|><|im_end|>", "\ud800x"]
)


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_no_text_of_a_person_becomes_a_control_token(tokenizer: Tokenizer, text: str):
    """Whatever is typed, control tokens written out included, is ordinary text, and decodes to itself."""
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()


def test_a_long_text_lets_other_threads_run(tmp_path: Path):
    """A service's loop serves others while a thread of it encodes: it is not held up for most of that time."""
    tokenizer = load(tmp_path)
    text, took = "hello world " * 100_000, []

    def encode() -> None:
        began = time.perf_counter()
        tokenizer.encode(text)
        took.append(time.perf_counter() - began)

    thread, longest = threading.Thread(target=encode), 0.0
    last = time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < took[0] / 2


def test_a_template_says_control_tokens(tokenizer: Tokenizer):
    """The template's own pieces become what they name; the text between stays text."""
    start, end = tokenizer.special_ids["<|im_start|>"], tokenizer.special_ids["<|im_end|>"]
    assert tokenizer.encode_template("<|im_start|>hello<|im_end|>\n") == [
        start,
        *tokenizer.encode("hello"),
        end,
        *tokenizer.encode("\n"),
    ]
    assert end in tokenizer.stop_ids
    assert start not in tokenizer.stop_ids


def test_special_tokens_have_no_text(tokenizer: Tokenizer):
    """What a control token would look like is never shown."""
    assert {tokenizer.token_bytes[token] for token in tokenizer.special_ids.values()} == {b""}
    assert tokenizer.vocab_size == len(tokenizer.token_bytes)
    assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.stop_ids)
    assert tokenizer.name
    assert tokenizer.revision
    assert "messages" in tokenizer.chat_template


def test_merges_and_digits_follow_the_file(tmp_path: Path):
    """The file's merges apply in order, and digits stand alone."""
    tokenizer = load(tmp_path)
    pieces = [tokenizer.token_bytes[token] for token in tokenizer.encode("hello world 2024")]
    assert pieces == [b"hello", b" w", b"o", b"r", b"l", b"d", b" ", b"2", b"0", b"2", b"4"]


def test_every_stub_word_has_a_text_of_its_own():
    """A lost, repeated or swapped token shows in the text."""
    stub = StubTokenizer()
    words = stub.token_bytes[STUB_WORD_FIRST : STUB_WORD_FIRST + STUB_WORDS]
    assert len(set(words)) == STUB_WORDS
    assert words[17] == b" w0017"
    assert stub.encode("€") == list("€".encode())


def test_the_revision_changes_with_what_ids_mean(tmp_path: Path):
    """Another vocabulary, merge order or template is another revision; the same file is the same."""
    revisions = {
        load(tmp_path).revision,
        load(tmp_path, merges=["l l", "h e", "he ll", "hell o", "Ġ w"]).revision,
        load(tmp_path, tokens=[*VOCABULARY["tokenizer.ggml.tokens"][:-1], "<|other|>"]).revision,
    }
    assert len(revisions) == 3
    assert load(tmp_path).revision in revisions


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "byte-level BPE"),
        ({"pre": "other"}, "split rule 'other'"),
        ({"merges": ["he xx"]}, "does not join"),
        ({"merges": ["hello"]}, "does not join"),
        ({"token_type": [Typed("i32", 1)]}, "one of 1 types"),
        ({"eos_token_id": Typed("u32", 10_000)}, "outside its"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_said(tmp_path: Path, changes: dict, says: str):
    """What is missing or does not fit together is one sentence with the file's name."""
    with pytest.raises(ModelFileError, match=says):
        load(tmp_path, **changes)
