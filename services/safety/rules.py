"""The rules that hold unless a file of rules takes their place. Few and unmistakable: a learned classifier decides
what needs judgement; phrases only stop what needs none. Pure.
"""

from services.safety.verdicts import Rule

CANARY = "chorus-canary-flag"  # harmless: what tests and drills send to see the path work

DEFAULT_RULES = (
    Rule(category="canary", name="canary", phrases=(CANARY,)),
    Rule(
        category="weapons",
        name="mass_harm",
        phrases=(
            "how to build a pipe bomb",
            "how to make a pipe bomb",
            "how to make nerve gas",
            "how to synthesize sarin",
            "how to synthesise sarin",
            "how to culture anthrax",
        ),
    ),
    Rule(
        category="minors",
        name="sexual_minors",
        phrases=("sexual story about a child", "sexual story about a minor", "child pornograph*"),
    ),
    Rule(
        category="self_harm",
        name="self_harm_methods",
        phrases=("painless way to kill myself", "best way to kill myself", "best way to kill yourself"),
    ),
)
