"""The block pool against its drawing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.replica.core.block_pool import BlockPool


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_the_least_recently_freed_block_is_handed_out_first():
    """A freed block keeps its content until every block freed before it was handed out again."""
    pool = BlockPool(3)
    first, second, third = pool.take(3)
    for number, block in enumerate((first, second, third)):
        pool.publish(block, name(number))
    for block in (second, third, first):
        pool.release([block])
    assert pool.take(1) == (second,)
    assert pool.find(name(1)) is None
    assert pool.find(name(2)) == third
    assert pool.take(2) == (third, first)


def test_blocks_without_content_go_before_cached_ones():
    """Nothing that could be hit is forgotten while an empty block is free."""
    pool = BlockPool(2)
    cached, empty = pool.take(2)
    pool.publish(cached, name(0))
    pool.release([cached])
    pool.release([empty])
    assert pool.take(1) == (empty,)
    assert pool.find(name(0)) == cached


def test_a_table_is_evicted_from_its_tail():
    """The beginning of a prompt, which others may share, outlives its end."""
    pool = BlockPool(3)
    table = pool.take(3)
    for number, block in enumerate(table):
        pool.publish(block, name(number))
    pool.release(table)
    pool.take(1)
    assert [pool.find(name(number)) for number in range(3)] == [table[0], table[1], None]


def test_a_shared_block_is_free_when_its_last_holder_left():
    """References are counted; a revived block is no longer in the free list."""
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, name(0))
    pool.release([block])
    assert pool.is_free(block)
    pool.share([block])
    pool.share([block])
    assert pool.free == 1
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.free == 2


def test_one_hash_names_one_block():
    """Two sequences that computed the same content keep their own blocks; only the first can be found."""
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.publish(one, name(0))
    pool.publish(two, name(0))
    assert pool.find(name(0)) == one
    pool.release([one, two])
    pool.check([])
    assert pool.take(1) == (two,)


def test_changes_are_net():
    """What was stored and evicted since the last look is told without an order to get wrong."""
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.publish(block, name(0))
    pool.release([block])
    assert pool.take_changes() == ((name(0),), ())
    pool.take(1)
    pool.publish(block, name(0))
    assert pool.take_changes() == ((), ())
    pool.release([block])
    pool.take(1)
    assert pool.take_changes() == ((), (name(0),))


def test_misuse_is_refused():
    """Releasing twice, taking what is not there and publishing what nobody holds raise and change nothing."""
    pool = BlockPool(1)
    with pytest.raises(ValueError):
        pool.take(2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(ValueError):
        pool.release([block])
    with pytest.raises(ValueError):
        pool.publish(block, name(0))
    pool.check([])
    with pytest.raises(AssertionError):
        pool.check([[block]])
    with pytest.raises(ValueError):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Any order of takes, shares, publications and releases keeps the audit quiet and the reports true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.tables: list[list[int]] = []
        self.told: set[bytes] = set()
        self.numbers = 0

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count <= self.pool.free:
            self.tables.append(list(self.pool.take(count)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.publish(data.draw(st.sampled_from(table)), name(data.draw(st.integers(0, 9))))

    @rule(number=st.integers(0, 9))
    def share(self, number: int) -> None:
        block = self.pool.find(name(number))
        if block is not None:
            self.pool.share([block])
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def audit(self) -> None:
        self.pool.check(self.tables)

    @invariant()
    def reports_add_up(self) -> None:
        changes = self.pool.take_changes()
        assert not set(changes.stored) & self.told
        assert set(changes.evicted) <= self.told
        self.told = (self.told | set(changes.stored)) - set(changes.evicted)
        assert self.told == set(self.pool.cached())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
