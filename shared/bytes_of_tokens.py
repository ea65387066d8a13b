"""Tokens of a vocabulary as the bytes they stand for. Pure."""

from collections.abc import Iterable, Sequence


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter: itself where it is one, else the next from U+0100 on."""
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable_bytes}
    others = [byte for byte in range(0x100) if byte not in set(printable_bytes)]
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def byte_level_bytes(token: str) -> bytes:
    """Of a token in byte-level letters; what is no such letter stands for nothing."""
    return bytes(_BYTE_OF_LETTER[letter] for letter in token if letter in _BYTE_OF_LETTER)


def decode_bytes(token_bytes: Sequence[bytes], ids: Iterable[int]) -> str:
    """The text of whole ids; what is not UTF-8 shows as the replacement character."""
    return b"".join(token_bytes[token] for token in ids).decode(errors="replace")


def printable(text: str) -> str:
    """`text` with lone surrogates (JSON can carry them, UTF-8 cannot) replaced."""
    return text.encode(errors="replace").decode()
