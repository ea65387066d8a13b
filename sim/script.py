"""What replicas write in this world: token p of a reply with seed s is a function of (s, p), whoever writes it."""

from services.replica.core.detokenize import Vocabulary
from services.replica.core.randomness import draw

WORDS = 64
PROMPT = (1, 2, 3)
VOCABULARY = Vocabulary([f" w{word:02d}".encode() for word in range(WORDS)], frozenset())


def token(seed: int, position: int) -> int:
    return draw(seed, position) % WORDS


def script(seed: int, length: int) -> list[int]:
    return [token(seed, position) for position in range(length)]
