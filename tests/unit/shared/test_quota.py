"""Token buckets: what may be reserved when, and that every token is accounted for once."""

from hypothesis import given
from hypothesis import strategies as st

from shared.quota import UNITS, Bucket, Grant, Limit

MINUTE = Limit(600, 600)  # ten a second
LEASE_MS = 10_000


def test_a_reservation_takes_and_a_settlement_gives_the_rest_back():
    """What was not used comes back at once, and a second settlement changes nothing."""
    bucket = Bucket()
    assert bucket.reserve("a", 500, MINUTE, 0, LEASE_MS) == Grant(0, 100, 50_000)
    assert bucket.reserve("b", 150, MINUTE, 0, LEASE_MS) == Grant(5_000, 100, 50_000)
    assert bucket.settle("a", 40, MINUTE, 0)
    assert not bucket.settle("a", 40, MINUTE, 0)
    assert bucket.totals == (500, 40, 460)
    assert bucket.reserve("b", 150, MINUTE, 0, LEASE_MS) == Grant(0, 410, 19_000)


def test_time_gives_tokens_and_a_clock_that_goes_back_gives_none():
    """A bucket refills by the millisecond up to its capacity; time that was counted is not counted again."""
    bucket = Bucket()
    bucket.reserve("a", 600, MINUTE, 10_000, LEASE_MS)
    assert bucket.reserve("b", 1, MINUTE, 10_099, LEASE_MS).wait_ms == 1
    assert bucket.reserve("b", 1, MINUTE, 10_100, LEASE_MS).wait_ms == 0
    assert bucket.reserve("c", 1, MINUTE, 5_000, LEASE_MS).wait_ms == 100
    assert bucket.reserve("c", 1, MINUTE, 10_150, LEASE_MS).wait_ms == 50


def test_the_same_reservation_twice_is_once():
    """A retry with the same id takes nothing more."""
    bucket = Bucket()
    for _ in range(3):
        assert bucket.reserve("a", 200, MINUTE, 0, LEASE_MS) == Grant(0, 400, 20_000)
    assert bucket.totals.reserved == 200


def test_more_than_a_bucket_holds_needs_a_full_one():
    """A large request is let in when the bucket is full, and its debt is paid before anything else."""
    bucket = Bucket()
    assert bucket.reserve("a", 1200, MINUTE, 0, LEASE_MS) == Grant(0, 0, 120_000)
    assert bucket.reserve("b", 1, MINUTE, 60_000, 600_000).wait_ms == 0  # a's lease has run out meanwhile
    assert bucket.totals == (1201, 0, 1200)
    assert bucket.reserve("c", 1200, MINUTE, 60_000, LEASE_MS).wait_ms == 100


def test_a_lease_that_runs_out_comes_back_whole():
    """Nobody settled: all of it is refunded, and a settlement that comes too late charges nothing."""
    bucket = Bucket()
    bucket.reserve("a", 600, Limit(600, 1), 0, LEASE_MS)
    assert bucket.reserve("b", 600, Limit(600, 1), LEASE_MS - 1, LEASE_MS).wait_ms > 0
    assert bucket.reserve("b", 600, Limit(600, 1), LEASE_MS, LEASE_MS).wait_ms == 0
    assert not bucket.settle("a", 600, Limit(600, 1), LEASE_MS)
    assert bucket.totals == (1200, 0, 600)


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("abcdef"), st.integers(0, 900), st.integers(-100, 6_000)), max_size=60
    )
)
def test_every_token_is_accounted_for(steps):
    """Whatever happens, reserved is settled, refunded or leased, and the level never passes the capacity."""
    bucket, now_ms = Bucket(), 0
    for reserve, key, amount, passed_ms in steps:
        now_ms += passed_ms
        if reserve:
            bucket.reserve(key, amount, MINUTE, now_ms, LEASE_MS)
        else:
            bucket.settle(key, amount, MINUTE, now_ms)
        leased = sum(lease.amount for lease in bucket.leases.values())
        assert bucket.totals.reserved == bucket.totals.settled + bucket.totals.refunded + leased
        assert bucket.level is None or bucket.level <= MINUTE.capacity * UNITS
