"""Messages are additive only: frozen samples of every version still decode to what they meant."""

import typing
from pathlib import Path

import msgspec
import pytest

from shared import messages
from tests.contract.samples.make import message_types

SAMPLES = sorted((Path(__file__).parent / "samples").glob("v*/*.msgpack"))


def name_of(sample: Path) -> str:
    return f"{sample.parent.name}/{sample.stem}"


def decoded(sample: Path, data: bytes | None = None):
    kind = getattr(messages, sample.stem)
    return messages.decoder(kind).decode(sample.read_bytes() if data is None else data)


def holds(now, then) -> bool:
    """Whether `now` still says all that `then` said; what was added since does not count."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(holds, now, then))
    return now == then


# maps, not structs: any key belongs to them
PLAIN_MAPS = {"metadata", "logit_bias", "waiting_tokens", "data"}


def with_unknown(value, key=""):
    """The same message as a later version might send it: every struct has fields we do not know."""
    if isinstance(value, dict) and key not in PLAIN_MAPS:
        return {name: with_unknown(inner, name) for name, inner in value.items()} | {"not_yet_known": [1, {"deep": 2}]}
    return [with_unknown(inner) for inner in value] if isinstance(value, list) else value


def test_every_message_has_a_sample():
    """A new message type comes with its sample (`python -m tests.contract.samples.make`)."""
    assert {kind.__name__ for kind in message_types()} == {sample.stem for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_a_sample_means_what_it_meant(sample):
    """The bytes decode, with every field of their time and its value."""
    then = msgspec.json.decode(sample.with_suffix(".json").read_bytes())
    now = msgspec.json.decode(msgspec.json.encode(decoded(sample)))
    assert holds(now, then), (now, then)


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_unknown_fields_are_ignored(sample):
    """Fields of a later version, at any depth, change nothing for us."""
    raw = msgspec.msgpack.decode(sample.read_bytes())
    assert decoded(sample, msgspec.msgpack.encode(with_unknown(raw))) == decoded(sample)


@pytest.mark.parametrize("union", ["Request", "Answer", "Event", "Entry"])
def test_unions_tell_their_members_apart(union):
    """Each member of a union is decoded as itself, by its tag."""
    members = typing.get_args(getattr(messages, union))
    decoder = messages.decoder(getattr(messages, union))
    by_name = {sample.stem: sample for sample in SAMPLES}
    for member in members:
        assert type(decoder.decode(by_name[member.__name__].read_bytes())) is member


def test_another_message_is_refused():
    """A message is never taken for another type that has the same fields."""
    end = messages.encode(messages.Done())
    with pytest.raises(msgspec.ValidationError):
        messages.decoder(messages.Presence).decode(end)
