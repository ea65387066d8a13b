"""Text from tokens, however the bytes were cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.replica.core.detokenize import ReplyText

few_letters = st.text(alphabet="ab€é", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab€é", min_size=1, max_size=5), max_size=4)


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    """`data` in pieces; what the lengths leave is the last piece."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return [*pieces, data[at:]]


def release(pieces: list[bytes], stops: list[str]) -> tuple[str, bool, list[str]]:
    """(text, stopped, text of each piece), the flush with the last."""
    text = ReplyText(stops)
    texts: list[str] = []
    for piece in pieces:
        released = text.push(piece)
        texts.append(released.text)
        if released.stopped:
            return "".join(texts), True, texts
    texts[-1] += text.flush()
    return "".join(texts), False, texts


def first_stop(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first (of those the longest); None when none is."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 4), max_size=20))
def test_joined_texts_are_the_bytes_decoded(data: bytes, lengths: list[int]):
    """Whatever bytes come in whatever pieces, the released text is what decoding them whole would give."""
    text, _, _ = release(cut(data, lengths), [])
    assert text == data.decode(errors="replace")


@settings(max_examples=500, deadline=None)
@given(few_letters, st.lists(st.integers(0, 4), max_size=20), stop_lists)
def test_nothing_at_or_after_a_stop_string_is_shown(text: str, lengths: list[int], stops: list[str]):
    """The shown text ends before the first complete stop string, however tokens split it; else it is whole."""
    shown, stopped, _ = release(cut(text.encode(), lengths), stops)
    before = first_stop(text, stops)
    assert (shown, stopped) == ((text, False) if before is None else (before, True))


@settings(max_examples=300, deadline=None)
@given(few_letters, st.lists(st.integers(0, 4), max_size=20), stop_lists, st.integers(0, 20))
def test_a_replayed_text_goes_on_as_if_never_cut(text: str, lengths: list[int], stops: list[str], at: int):
    """A second ReplyText that replayed the first tokens releases with each later token what the first one does."""
    pieces = cut(text.encode(), lengths)
    one, two = ReplyText(stops), ReplyText(stops)
    for piece in pieces[:at]:
        if one.push(piece).stopped:
            return
        two.push(piece)
    for piece in pieces[at:]:
        released = one.push(piece)
        assert two.push(piece) == released
        if released.stopped:
            return
    assert one.flush() == two.flush()


def test_a_split_stop_string_does_not_leak_its_first_half():
    """Text that could begin a stop string waits, and is released with the token that shows that it does not."""
    _, _, texts = release([b"go", b" S", b"T", b"O", b"lat"], ["STOP"])
    assert texts == ["go", " ", "", "", "STOlat"]
    text, stopped, texts = release([b"go ST", b"OP now"], ["STOP"])
    assert (text, stopped, texts) == ("go ", True, ["go ", ""])


def test_half_a_character_waits_for_its_other_half():
    """A character split over tokens belongs to the token that completes it; one cut off at the end shows as such."""
    euro = "€".encode()
    assert release([euro[:1], euro[1:2], euro[2:]], [])[2] == ["", "", "€"]
    assert release([b"a", euro[:2]], [])[2] == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_a_stop_string_that_overlaps_itself_is_found():
    """Falling back inside a stop string keeps what is still a beginning of it."""
    assert release([b"aab", b"aab", b"aac x"], ["aabaac"])[:2] == ("aab", True)
