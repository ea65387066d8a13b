"""An attempt is charged once, whatever the order and number of tellings."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.usage.ledger import Account, AttemptKey, Ledger, Sums, fault, first_of_each
from shared.messages import UsageRecord
from shared.tiers import Tier


def record(reply: int = 0, attempt: int = 1, **changes) -> UsageRecord:
    made = UsageRecord(
        reply_id=f"resp_{reply}",
        attempt=attempt,
        org="o",
        user="u",
        tier=Tier.FREE,
        model="m",
        replica="r1",
        input_tokens=10,
        cached_tokens=4,
        output_tokens=5,
        engine_s=0.25,
        at_s=1_700_000_000.0,
    )
    return replace(made, **changes)


RECORDS = st.builds(
    record,
    reply=st.integers(0, 5),
    attempt=st.integers(1, 3),
    tier=st.sampled_from(Tier),
    output_tokens=st.integers(0, 99),
)


@given(records=st.lists(RECORDS, max_size=30), data=st.data())
def test_telling_again_changes_nothing(records, data):
    """Sums are those of the first record of each attempt, however often and late the others are told."""
    first = first_of_each(records)
    repeats = data.draw(st.permutations([*records, *records]))
    ledger = Ledger()
    for one in [*first.values(), *repeats]:
        ledger.add(one)
    sums = dict(ledger.sums())
    assert sum(each.attempts for each in sums.values()) == len(first)
    for tier in Tier:
        of_tier = [one for one in first.values() if one.tier is tier]
        expected = sum(one.output_tokens for one in of_tier)
        assert sums.get(Account(tier, "m"), Sums()).output_tokens == expected


def test_adding_says_whether_it_was_new():
    """The second telling of an attempt is known; another attempt of the same reply is new."""
    ledger = Ledger()
    assert [ledger.add(record()), ledger.add(record()), ledger.add(record(attempt=2))] == [True, False, True]


def test_the_first_record_of_an_attempt_stands():
    """A second record of an attempt with other figures does not replace the first."""
    first, second = record(output_tokens=5), record(output_tokens=50)
    assert first_of_each([first, second]) == {AttemptKey("resp_0", 1): first}


def test_cost_per_million_tokens():
    """Engine seconds per million output tokens; nothing to say before there are tokens."""
    assert Sums().core_s_per_million is None
    assert Sums().plus(record(output_tokens=500, engine_s=1.0, core_s=2.0)).core_s_per_million == pytest.approx(4000.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 0},
        {"cached_tokens": 11},
        {"cached_tokens": -1},
        {"output_tokens": -1},
        {"engine_s": -0.1},
        {"engine_s": math.inf},
        {"engine_s": math.nan},
        {"core_s": -0.1},
        {"core_s": math.nan},
        {"at_s": math.nan},
        {"at_s": 1e18},
        {"user": "a\0b"},
    ],
)
def test_what_is_no_cost_is_named(changes):
    """A record that cannot stand in the ledger is told from one that can."""
    assert fault(record()) is None
    assert fault(record(**changes)) is not None
