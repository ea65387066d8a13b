"""Tokenizers of Hugging Face folders: the same promises as a model file's own, and what the folder's files say."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelFileError
from shared.tokenizer import Tokenizer, load_tokenizer
from tests.unit.shared.gguf_files import byte_vocabulary, gguf, write
from tests.unit.shared.hf_folders import TEMPLATE, byte_level, sentence_pieces, write_folder

PARTS = (["he", "ll", "hell", "hello", "Ġw"], ["h e", "l l", "he ll", "hell o", "Ġ w"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("tiny"), byte_level(*PARTS)))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(["<|im_end|>", "a<|im_start|>system\n", "\ud800x"]))
def test_no_text_of_a_person_becomes_a_control_token(tokenizer: Tokenizer, text: str):
    """Whatever is typed is ordinary text, is never cut short, and decodes to itself."""
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()


def test_a_template_says_control_tokens(tokenizer: Tokenizer):
    """The template's own pieces become what they name; its end token and the known names end a reply."""
    start, end = tokenizer.special_ids["<|im_start|>"], tokenizer.special_ids["<|im_end|>"]
    assert tokenizer.encode_template("<|im_start|>hello<|im_end|>") == [start, *tokenizer.encode("hello"), end]
    assert tokenizer.stop_ids == {end, tokenizer.special_ids["<|endoftext|>"]}
    assert tokenizer.chat_template == TEMPLATE


def test_it_is_the_tokenizer_of_the_same_vocabulary_in_a_model_file(tokenizer: Tokenizer, tmp_path: Path):
    """Folder and GGUF file of one vocabulary give the same ids and the same bytes."""
    vocabulary = byte_vocabulary(*PARTS) | {"tokenizer.ggml.pre": "gpt-2"}
    other = load_tokenizer(write(tmp_path, gguf(vocabulary, {})))
    for text in ("hello world 2024", "  two  spaces\n\n", "Grüße, 世界"):
        assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.token_bytes[: other.vocab_size] == other.token_bytes


def test_ids_that_only_the_model_has_are_silent(tokenizer: Tokenizer):
    """The embedding may be longer than the vocabulary; what has no name has no text."""
    assert tokenizer.vocab_size == 300
    assert tokenizer.token_bytes[299] == b""


def test_sentence_pieces_have_spaces_and_bytes(tmp_path: Path):
    """U+2581 is a space, what has no letter goes byte by byte, and control tokens stay unsaid."""
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", sentence_pieces(), config={"eos_token_id": [2]}))
    assert [tokenizer.token_bytes[at] for at in tokenizer.encode("hello hello")] == [b" hello", b" hello"]
    assert tokenizer.decode(tokenizer.encode("é</s>")).strip() == "é</s>"
    assert tokenizer.stop_ids == {2}
    assert 2 not in tokenizer.encode("</s>")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"chat_template": "own {{ messages }}"}, "own {{ messages }}"),
        ({"tokenizer_config": {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}}, "d"),
        ({"tokenizer_config": {}}, ""),
    ],
)  # fmt: skip
def test_the_chat_template_stands_in_one_of_three_places(tmp_path: Path, files: dict, wanted: str):
    """A file of its own goes first, then the setting, of several the default; there may be none."""
    folder = write_folder(tmp_path / "m", byte_level(*PARTS), **files)
    assert load_tokenizer(folder).chat_template == wanted


def test_the_revision_names_vocabulary_and_template(tmp_path: Path, tokenizer: Tokenizer):
    """Another merge or another template is another revision; the folder's name is not."""
    same = load_tokenizer(write_folder(tmp_path / "same", byte_level(*PARTS)))
    other = load_tokenizer(write_folder(tmp_path / "other", byte_level(PARTS[0], PARTS[1][:-1])))
    worded = load_tokenizer(write_folder(tmp_path / "worded", byte_level(*PARTS), chat_template="x"))
    assert same.revision == tokenizer.revision
    assert len({same.revision, other.revision, worded.revision}) == 3


def test_broken_folders_are_refused(tmp_path: Path):
    """No file, another kind of model, no JSON, ids out of range, no end token: each a sentence, never a crash."""
    good = byte_level(*PARTS)
    folder = write_folder(tmp_path / "m", good)
    broken = {
        "cannot read": None,
        "only BPE": json.dumps(good | {"model": {"type": "Unigram", "vocab": {}}}),
        "cannot be used": "{",
        "cannot be used: ": json.dumps(good | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}),
        "below 0": json.dumps(good | {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
        "more than": json.dumps(good | {"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}),
    }
    for said, content in broken.items():
        (folder / "tokenizer.json").unlink(missing_ok=True)
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ModelFileError, match=said):
            load_tokenizer(folder)
    endless = good | {"added_tokens": []}
    with pytest.raises(ModelFileError, match="end tokens"):
        load_tokenizer(write_folder(tmp_path / "e", endless, config={}, tokenizer_config={}))
