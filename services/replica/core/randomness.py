"""Counter-based randomness: a number is a function of (seed, position) and of nothing else.

So a continuation on another replica draws what the lost one would have drawn, and a batch changes no one's draw.
Pure: the seed is drawn elsewhere, once per reply.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """64 bits in, 64 well-mixed bits out (the splitmix64 finaliser)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(seed: int, position: int) -> int:
    """64 bits for output token `position` of a reply with `seed`."""
    return mix(mix(seed) + _GOLDEN * (position + 1))


def unit(seed: int, position: int) -> float:
    """[0, 1), with 53 bits."""
    return (draw(seed, position) >> 11) / (1 << 53)
