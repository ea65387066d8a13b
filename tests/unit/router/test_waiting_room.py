"""Fair turns meet room in the fleet; shares keep a flood of one user bucket from taking all that a router may hold."""

import random

import pytest

from services.router.fleet_view import FleetView
from services.router.shares import Shares
from services.router.waiting_room import Match, Unfit, WaitingRoom
from shared.limits import REPLICA_QUEUE_MAX, ROUTER_SHARE_MIN
from shared.messages import Accepted, GenerateRequest, RequestEcho, Sampling, pack_ids
from shared.tiers import Tier
from tests.unit.replica_shell.health import health


def request(n: int, *, tier: Tier = Tier.FREE, user: str = "u", model: str = "m", prompt: int = 32) -> GenerateRequest:
    accepted = Accepted(
        reply_id=f"r{n}",
        org="o",
        user=user,
        created_s=0.0,
        model=model,
        tier=tier,
        budget=16,
        seed=1,
        input_tokens=prompt,
        deadline_s=600.0,
        echo=RequestEcho(),
    )
    return GenerateRequest(
        accepted=accepted,
        accepted_seq=1,
        prompt=pack_ids(range(prompt)),
        block_hashes=b"",
        sampling=Sampling(seed=1),
    )


def enter(room: WaitingRoom, n: int, now: float = 0.0, *, resumed: bool = False, avoid: str = "", **changes) -> None:
    room.enter(request(n, **changes), written=0, resumed=resumed, avoid=avoid, now=now)


def play(room: WaitingRoom, now: float = 0.0) -> list[str]:
    return [f"{result.reply_id}@{result.placed.replica}" for result in room.matches(now) if isinstance(result, Match)]


def test_nobody_there_everybody_waits():
    """Requests wait until a replica is heard of, and go there in turn, as many as it has places for."""
    fleet = FleetView()
    room = WaitingRoom(fleet)
    for n in range(8):
        enter(room, n)
    assert play(room) == []
    fleet.on_health(health(running_max=3), 1.0)
    room.stir("m")
    assert play(room, 1.0) == [f"r{n}@r1" for n in range(3 + REPLICA_QUEUE_MAX)]
    assert len(room) == 8 - 3 - REPLICA_QUEUE_MAX


def test_a_claim_holds_the_room_until_the_heartbeat_does():
    """Placements between two heartbeats do not pile up on one replica."""
    fleet = FleetView()
    room = WaitingRoom(fleet)
    for name in ("r1", "r2"):
        fleet.on_health(health(name, running_max=4), 0.0)
    for n in range(6):
        enter(room, n)
    assert sorted(match.split("@")[1] for match in play(room)) == ["r1"] * 3 + ["r2"] * 3


def test_who_left_is_not_placed():
    """A request that ended while it waited is out of the queue."""
    fleet = FleetView()
    room = WaitingRoom(fleet)
    enter(room, 1)
    enter(room, 2)
    room.leave("r1")
    room.leave("r1")
    fleet.on_health(health(), 0.0)
    assert play(room) == ["r2@r1"]
    assert len(room) == 0


def test_models_do_not_wait_for_each_other():
    """A model without room holds back nobody of another model."""
    fleet = FleetView()
    room = WaitingRoom(fleet)
    fleet.on_health(health(), 0.0)
    enter(room, 1, model="other")
    enter(room, 2)
    assert play(room) == ["r2@r1"]


def test_unfit_is_said_and_leaves():
    """What no replica could ever run leaves the queue with a sentence; who stands behind it is served."""
    fleet = FleetView()
    room = WaitingRoom(fleet)
    fleet.on_health(health(blocks_total=4, blocks_free=4), 0.0)
    enter(room, 1, prompt=100)
    enter(room, 2, prompt=16)
    results = list(room.matches(0.0))
    assert isinstance(results[0], Unfit)
    assert "116 tokens" in results[0].detail
    assert isinstance(results[1], Match)


def test_views_say_the_order_of_service():
    """Each queue in which somebody waits is named once, with the first of those who wait."""
    room = WaitingRoom(FleetView())
    enter(room, 1, tier=Tier.PAID)
    for n in (2, 3, 4):
        enter(room, n, user=f"u{n}")
    views = {view.tier: view for view in room.views("router-1", 1.0)}
    assert set(views) == {Tier.PAID, Tier.FREE}
    assert views[Tier.FREE].reply_ids == ("r2", "r3", "r4")
    assert (views[Tier.FREE].waiting, views[Tier.FREE].served_per_s) == (3, 0.0)


def test_a_round_is_played_only_when_something_changed():
    """Events that change neither queue nor replicas cost nothing."""
    fleet = FleetView()
    room = WaitingRoom(fleet)
    enter(room, 1)
    assert play(room) == []
    fleet.on_health(health(), 0.0)
    assert play(room) == [], "nobody said that the replicas changed"
    room.stir("m")
    assert play(room) == ["r1@r1"]
    room.stir("unknown")
    assert play(room) == []


def test_a_flood_of_one_bucket_leaves_the_others_their_share():
    """Each consumer has its own share, a small one included when there are very many."""
    shares = Shares(["a", "b"], most=20)
    for n in range(10):
        shares.hold(f"r{n}", "a")
    shares.hold("r0", "a")  # a redelivery is the same message
    assert (shares.room("a"), shares.room("b"), len(shares)) == (0, 10, 10)
    assert shares.free("r3")
    assert not shares.free("r3")
    assert shares.room("a") == 1
    assert Shares([f"c{n}" for n in range(1000)], most=20).room("c1") == ROUTER_SHARE_MIN


@pytest.mark.parametrize("seed", range(20))
def test_everybody_is_served_and_no_replica_is_overfilled(seed: int):
    """Random arrivals, departures, heartbeats and ends: places are never exceeded, and in the end nobody waits."""
    rng = random.Random(seed)
    fleet, room = FleetView(), WaitingRoom(FleetView())
    room = WaitingRoom(fleet)
    running: dict[str, set[str]] = {"r1": set(), "r2": set()}
    taken = dict.fromkeys(running, 0)
    entered, now = 0, 0.0
    for turn in range(600):
        now += 0.05
        if turn < 400 and rng.random() < 0.6:
            enter(room, entered, now, user=f"u{rng.randrange(4)}", tier=rng.choice(list(Tier)))
            entered += 1
        for result in room.matches(now):
            assert isinstance(result, Match)
            running[result.placed.replica].add(result.reply_id)
            taken[result.placed.replica] += 1
            fleet.confirm(result.placed.replica, result.reply_id, taken[result.placed.replica])
            assert len(running[result.placed.replica]) <= 4 + REPLICA_QUEUE_MAX
        name = rng.choice(sorted(running))
        if running[name] and rng.random() < 0.5:
            gone = rng.choice(sorted(running[name]))
            running[name].discard(gone)
            fleet.release(name, gone)
        for name, here in running.items():
            if turn % 5 == 0:
                fleet.on_health(
                    health(name, running=min(4, len(here)), waiting=max(0, len(here) - 4), dispatches=taken[name]), now
                )
                room.stir("m")
    assert len(room) == 0
    assert sum(taken.values()) == entered
