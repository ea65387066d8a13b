"""Who is next: fair turns of tokens inside a lane, lanes in order with a trickle."""

import random
from collections import Counter

import pytest

from services.router.admission import FairLane, FairQueue, Waiting
from shared.limits import FAIR_QUANTUM_TOKENS, LANE_TRICKLE_SHARE
from shared.tiers import Tier


def waiting(reply: str, *, tier: Tier = Tier.PAID, user: str = "u", tokens: int = 100) -> Waiting:
    return Waiting(reply_id=reply, tier=tier, user=user, tokens=tokens, since_s=0.0)


def serve(queue: FairQueue, count: int) -> list[Waiting]:
    served = []
    for _ in range(count):
        candidates = queue.candidates()
        if not candidates:
            break
        queue.take(candidates[0])
        served.append(candidates[0])
    return served


def test_one_user_is_served_in_order():
    """Requests of one user keep their order."""
    lane = FairLane()
    for n in range(5):
        lane.add(waiting(f"r{n}", tokens=5000 - n))
    assert [lane.take().reply_id for _ in range(5)] == ["r0", "r1", "r2", "r3", "r4"]
    assert lane.head() is None


def test_turns_are_counted_in_tokens_not_requests():
    """A user with requests ten times as large is served a tenth as many, whoever came first."""
    lane = FairLane()
    for n in range(200):
        lane.add(waiting(f"big{n}", user="big", tokens=4000))
        lane.add(waiting(f"small{n}", user="small", tokens=400))
    tokens: Counter[str] = Counter()
    for _ in range(165):
        item = lane.take()
        tokens[item.user] += item.tokens
    assert abs(tokens["big"] - tokens["small"]) <= 4000 + FAIR_QUANTUM_TOKENS


def test_a_large_request_is_reached_though_new_small_users_keep_coming():
    """One-request users who come and go do not take the turns of a user who saves up for a large request."""
    lane = FairLane()
    lane.add(waiting("large", user="patient", tokens=20 * FAIR_QUANTUM_TOKENS))
    served = []
    for n in range(60):
        lane.add(waiting(f"s{n}", user=f"visitor{n}", tokens=10))
        served.append(lane.take().reply_id)
    assert "large" in served


def test_a_huge_request_alone_is_served_at_once():
    """Fairness among nobody costs nothing: a lone user pays any price at once."""
    lane = FairLane()
    lane.add(waiting("huge", tokens=135_000))
    assert lane.take().reply_id == "huge"


def test_the_head_stays_until_it_is_taken():
    """Asking who is next changes nothing."""
    lane = FairLane()
    for n in range(3):
        lane.add(waiting(f"r{n}", user=f"u{n}", tokens=3000))
    head = lane.head()
    assert [lane.head() for _ in range(5)] == [head] * 5
    assert lane.take() == head


def test_a_user_who_left_keeps_no_savings():
    """Deficits end with the flow, so that nobody saves up turns by coming and going."""
    lane = FairLane()
    lane.add(waiting("a", user="a", tokens=10))
    lane.take()
    lane.add(waiting("a2", user="a", tokens=FAIR_QUANTUM_TOKENS + 1))
    lane.add(waiting("b", user="b", tokens=10))
    assert lane.take().reply_id == "b"


@pytest.mark.parametrize("seed", range(20))
def test_order_predicts_the_service(seed: int):
    """What is said of positions is what happens when nobody else comes; saying it changes nothing."""
    rng = random.Random(seed)
    lane = FairLane()
    for n in range(40):
        lane.add(waiting(f"r{n}", user=f"u{rng.randrange(6)}", tokens=rng.randrange(1, 9000)))
    for _ in range(rng.randrange(5)):
        lane.take()
    said = lane.order(1000)
    assert lane.order(7) == said[:7]
    assert [lane.take() for _ in range(len(lane))] == said


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_lost_or_served_twice(seed: int):
    """Adds, removals and turns in any order conserve the requests."""
    rng = random.Random(seed)
    queue, inside, out = FairQueue(), set(), []
    for n in range(400):
        act = rng.random()
        if act < 0.5:
            item = waiting(
                f"r{n}", tier=rng.choice(list(Tier)), user=f"u{rng.randrange(5)}", tokens=rng.randrange(1, 9000)
            )
            queue.add(item, resumed=rng.random() < 0.1)
            queue.add(item)  # twice is once
            inside.add(item.reply_id)
        elif act < 0.6 and inside:
            gone = rng.choice(sorted(inside))
            removed = queue.remove(gone)
            assert removed is not None
            assert removed.reply_id == gone
            inside.discard(gone)
        else:
            served = serve(queue, 1)
            out += served
            inside -= {item.reply_id for item in served}
        assert len(queue) == len(inside) == len(list(queue))
        assert sum(queue.waiting(tier) for tier in Tier) == len(inside)
    out += serve(queue, 1000)
    assert len(queue) == 0
    assert len({item.reply_id for item in out}) == len(out)


def test_paid_goes_before_free_before_background():
    """A later lane waits while an earlier one has requests, up to its trickle."""
    queue = FairQueue()
    queue.add(waiting("b", tier=Tier.BACKGROUND))
    queue.add(waiting("f", tier=Tier.FREE))
    queue.add(waiting("p", tier=Tier.PAID))
    assert [item.reply_id for item in serve(queue, 3)] == ["p", "f", "b"]


def test_later_lanes_get_a_trickle_and_no_more():
    """While paid requests never end, a free lane is served its share of the tokens and the background lane too."""
    queue, tokens = FairQueue(), Counter()
    for n in range(30):
        queue.add(waiting(f"f{n}", tier=Tier.FREE))
        queue.add(waiting(f"b{n}", tier=Tier.BACKGROUND))
    for n in range(400):
        queue.add(waiting(f"p{n}", tier=Tier.PAID))
        for item in serve(queue, 1):
            tokens[item.tier] += item.tokens
    assert tokens[Tier.FREE] > 0
    assert tokens[Tier.BACKGROUND] > 0
    for lane in (Tier.FREE, Tier.BACKGROUND):
        assert tokens[lane] <= tokens[Tier.PAID] * LANE_TRICKLE_SHARE + 100


def test_a_trickle_turn_without_room_does_not_hold_back_the_first_lane():
    """When the later lane's head cannot be placed, the earlier lane's head is the next candidate."""
    queue = FairQueue()
    queue.add(waiting("f", tier=Tier.FREE, tokens=10))
    for n in range(20):
        queue.add(waiting(f"p{n}", tokens=100))
    serve(queue, 2)
    assert [item.reply_id for item in queue.candidates()] == ["f", "p2"]
    queue.take(queue.candidates()[1])
    assert [item.reply_id for item in queue.candidates()] == ["f", "p3"]


def test_a_lane_without_room_holds_back_the_lanes_after_it():
    """A small free request does not slip past a large paid one that waits for room."""
    queue = FairQueue()
    queue.add(waiting("p", tokens=100_000))
    queue.add(waiting("f", tier=Tier.FREE, tokens=1))
    assert [item.reply_id for item in queue.candidates()] == ["p"]


def test_replies_that_had_begun_go_first():
    """A reply cut off in mid-sentence is placed before anybody who has seen nothing yet, whatever its lane."""
    queue = FairQueue()
    queue.add(waiting("p"))
    queue.add(waiting("b", tier=Tier.BACKGROUND), resumed=True)
    assert [item.reply_id for item in serve(queue, 2)] == ["b", "p"]


def test_a_finished_head_does_not_block_the_lane():
    """A request that ended while it stood first is gone, and the next one is first."""
    queue = FairQueue()
    for n in range(3):
        queue.add(waiting(f"r{n}"))
    assert queue.candidates()[0].reply_id == "r0"
    queue.remove("r0")
    assert queue.remove("r0") is None
    assert [item.reply_id for item in queue.order(Tier.PAID, 9)] == ["r1", "r2"]
