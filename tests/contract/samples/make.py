"""Writes a frozen sample of each message type that has none yet: `python -m tests.contract.samples.make`.

A sample is two files: `<Type>.msgpack`, the bytes as they stood on the bus, and `<Type>.json`, what they mean. They
are made once, when a message is born, and never again: an old sample that no longer decodes to its meaning is a
broken promise, not a stale file.
"""

import itertools
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from shared import messages

FOLDER = Path(__file__).parent / "v1"


def message_types() -> list[type[messages.Message]]:
    """Those of the contract; a service may have a form of its own for one of them."""
    kinds = [kind for kind in messages.Message.__subclasses__() if kind.__module__ == messages.__name__]
    return sorted(kinds, key=lambda kind: kind.__name__)


class Maker:
    """Fills every field of a type, with values that tell the fields apart."""

    def __init__(self) -> None:
        self._numbers = itertools.count(11)

    def value(self, kind: inspect.Type, name: str) -> Any:
        number = next(self._numbers)
        if isinstance(kind, inspect.StructType):
            fields = {f.name: 1 if f.name == "v" else self.value(f.type, f.name) for f in kind.fields}
            return kind.cls(**fields)
        if isinstance(kind, inspect.UnionType):
            return self.value(next(one for one in kind.types if not isinstance(one, inspect.NoneType)), name)
        if isinstance(kind, inspect.EnumType):
            members = list(kind.cls)
            return members[number % len(members)]
        if isinstance(kind, inspect.VarTupleType):
            return tuple(self.value(kind.item_type, name) for _ in range(2))
        if isinstance(kind, inspect.DictType):
            return {self.value(kind.key_type, name): self.value(kind.value_type, name)}
        plain = {
            inspect.StrType: f"{name} {number} é",
            inspect.IntType: number,
            inspect.FloatType: number + 0.25,
            inspect.BoolType: number % 2 == 0,
            inspect.BytesType: messages.pack_ids([number, number + 1]),
            inspect.AnyType: [number],
        }
        return plain[type(kind)]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind in message_types():
        raw = FOLDER / f"{kind.__name__}.msgpack"
        if not raw.exists():
            made = Maker().value(inspect.type_info(kind), kind.__name__)
            raw.write_bytes(messages.encode(made))
            raw.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
            print("made", raw.name)  # noqa: T201


if __name__ == "__main__":
    main()
