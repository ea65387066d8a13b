"""What is believed of the replicas: silence is not overload, claims survive flapping, gaps hide prefixes."""

from services.router.fleet_view import SILENT_AFTER_S, FleetView, NeedBlocks, Restarted
from shared.limits import BLOCK_TOKENS, DISPATCH_CLAIM_S, PROBE_AFTER_S, REPLICA_FORGET_S
from shared.messages import BlocksChanged, ReplicaHealth, StepModel


def health(replica: str = "r1", *, boot: str = "b1", **changes) -> ReplicaHealth:
    figures = {
        "model": "m",
        "model_version": "m@1",
        "accepting": True,
        "blocks_total": 100,
        "blocks_free": 100,
        "running": 0,
        "running_max": 4,
        "waiting": 0,
        "waiting_tokens": {},
        "step": StepModel(base_s=0.01, per_token_s=0.001),
        "step_age_s": 0.0,
        "step_predicted_s": 0.0,
        "tokens_per_s": 0.0,
        **changes,
    }
    return ReplicaHealth(replica=replica, boot_id=boot, **figures)


def block(n: int) -> bytes:
    return n.to_bytes(16, "big")


def changed(number: int, *, stored=(), evicted=(), boot: str = "b1") -> BlocksChanged:
    return BlocksChanged(
        replica="r1",
        boot_id=boot,
        number=number,
        stored=b"".join(map(block, stored)),
        evicted=b"".join(map(block, evicted)),
    )


def test_a_first_heartbeat_asks_for_the_prefix_blocks():
    """Until the snapshot came, nothing is held to be cached."""
    fleet = FleetView()
    assert fleet.on_health(health(), 0.0) == [NeedBlocks("r1")]
    assert fleet.on_health(health(), 0.25) == []
    view = fleet.get("r1")
    assert view is not None
    assert view.prefix_tokens([block(1)]) == 0


def test_prefix_is_the_leading_run():
    """Blocks after the first missing one do not count."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    fleet.on_blocks_snapshot(changed(7, stored=(1, 2, 4)))
    assert fleet.on_blocks(changed(8, stored=(5,), evicted=(4,))) == []
    view = fleet.get("r1")
    assert view is not None
    assert view.prefix_tokens([block(n) for n in (1, 2, 3, 4, 5)]) == 2 * BLOCK_TOKENS
    assert view.prefix == {block(1), block(2), block(5)}


def test_a_gap_in_block_numbers_hides_the_set_until_a_snapshot():
    """A lost eviction would promise a cache hit that is not there."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    fleet.on_blocks_snapshot(changed(1, stored=(1,)))
    assert fleet.on_blocks(changed(3, stored=(2,))) == [NeedBlocks("r1")]
    view = fleet.get("r1")
    assert view is not None
    assert view.prefix_tokens([block(1)]) == 0
    assert fleet.on_blocks(changed(4)) == [], "one question is enough"
    fleet.on_blocks_snapshot(changed(4, stored=(1, 2)))
    assert view.prefix_tokens([block(1), block(2)]) == 2 * BLOCK_TOKENS
    assert fleet.on_blocks(changed(2, evicted=(1,))) == [], "an old message is late, not a gap"
    assert view.prefix_tokens([block(1)]) == BLOCK_TOKENS


def test_blocks_of_another_boot_are_not_believed():
    """Messages of the process before do not touch the set of the one now."""
    fleet = FleetView()
    fleet.on_health(health(boot="b2"), 0.0)
    fleet.on_blocks_snapshot(changed(1, stored=(1,), boot="b1"))
    view = fleet.get("r1")
    assert view is not None
    assert view.blocks_number is None


def test_missing_heartbeats_make_silent_not_overloaded():
    """Silence takes a replica out of the choice and leaves its last figures as they were."""
    fleet = FleetView()
    fleet.on_health(health(blocks_free=80), 0.0)
    assert len(fleet.alive("m", SILENT_AFTER_S)) == 1
    assert fleet.alive("m", SILENT_AFTER_S + 0.01) == []
    view = fleet.get("r1")
    assert view is not None
    assert view.blocks_free() == 80


def test_suspect_is_silent_or_stuck():
    """Missing heartbeats, or a step far past its prediction; a long predicted step is no hang."""
    fleet = FleetView()
    fleet.on_health(health(step_age_s=5.0, step_predicted_s=4.0), 0.0)
    assert not fleet.suspect("r1", 0.1)
    assert fleet.suspect("r1", SILENT_AFTER_S + 0.1)
    fleet.on_health(health(step_age_s=5.0, step_predicted_s=0.1), 1.0)
    assert fleet.suspect("r1", 1.0)
    assert fleet.suspect("r9", 1.0), "nothing speaks for a replica nobody has heard of"


def test_nobody_listening_is_as_good_as_missed_heartbeats():
    """A late replica is probed once; if nobody is there it is suspect, until it speaks again."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    assert fleet.late(PROBE_AFTER_S) == []
    assert fleet.late(PROBE_AFTER_S + 0.01) == ["r1"]
    assert fleet.late(PROBE_AFTER_S + 0.02) == [], "one probe a silence"
    fleet.nobody_there("r1", "another boot")
    assert not fleet.suspect("r1", PROBE_AFTER_S + 0.02)
    fleet.nobody_there("r1", "b1")
    assert fleet.suspect("r1", PROBE_AFTER_S + 0.02)
    assert fleet.alive("m", PROBE_AFTER_S + 0.02) == []
    fleet.on_health(health(), 0.5)
    assert not fleet.suspect("r1", 0.5)
    fleet.nobody_there("r1", "b1")
    assert not fleet.suspect("r1", 0.5), "the answer of a probe that a heartbeat has overtaken"


def test_whoever_is_deaf_blames_nobody():
    """What a router did not hear while it was cut off counts only from when it hears again."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    fleet.deaf(10.0)
    assert fleet.late(10.1) == []
    assert not fleet.suspect("r1", 10.0 + SILENT_AFTER_S - 0.1)
    assert fleet.suspect("r1", 10.0 + SILENT_AFTER_S + 0.1)


def test_suspicion_is_told_once_each_time_it_begins():
    """Leases hear of a replica when it becomes suspect, not four times a second."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    assert fleet.new_suspects(0.1) == []
    assert fleet.new_suspects(2.0) == ["r1"]
    assert fleet.new_suspects(2.1) == []
    fleet.on_health(health(), 2.2)
    assert fleet.new_suspects(2.2) == []
    assert fleet.new_suspects(4.0) == ["r1"]


def test_another_boot_id_is_a_restart():
    """A replica that speaks again as another process has lost what it ran, and that is said."""
    fleet = FleetView()
    fleet.on_health(health(boot="b1"), 0.0)
    assert fleet.on_health(health(boot="b2"), 0.25) == [Restarted("r1"), NeedBlocks("r1")]
    assert fleet.on_health(health(boot="b2"), 0.5) == []


def test_claims_take_room_until_a_heartbeat_covers_them():
    """A dispatch counts at once, and exactly once, whatever the order of its answer and the heartbeats."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    view = fleet.get("r1")
    assert view is not None
    fleet.claim("r1", "reply", tokens=160, blocks=11, now=0.0)
    assert (view.blocks_free(), view.queue_tokens(), view.places_taken()) == (89, 160, 1)
    fleet.on_health(health(dispatches=0), 0.1)
    assert view.blocks_free() == 89, "that heartbeat was sent before it"
    fleet.confirm("r1", "reply", number=1)
    fleet.on_health(health(dispatches=1, waiting=1, waiting_tokens={"paid": 160}), 0.2)
    assert (view.blocks_free(), view.queue_tokens(), view.places_taken()) == (90, 160, 1)


def test_a_claim_confirmed_after_its_heartbeat_is_not_counted_twice():
    """The heartbeat that covers the dispatch may overtake the answer."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    view = fleet.get("r1")
    assert view is not None
    fleet.claim("r1", "reply", tokens=16, blocks=2, now=0.0)
    fleet.on_health(health(dispatches=1, running=1), 0.1)
    fleet.confirm("r1", "reply", number=1)
    assert view.places_taken() == 1


def test_claims_survive_flapping():
    """A replica that was silent and speaks again still has what was sent to it."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    fleet.claim("r1", "reply", tokens=16, blocks=2, now=0.0)
    fleet.confirm("r1", "reply", number=5)
    fleet.on_health(health(dispatches=4), 10.0)
    view = fleet.get("r1")
    assert view is not None
    assert view.places_taken() == 1
    fleet.on_health(health(boot="b2"), 10.25)
    view = fleet.get("r1")
    assert view is not None
    assert view.places_taken() == 0, "another process has none of it"


def test_claims_do_not_leak():
    """A dispatch that was refused, is over, or was never answered gives its room back."""
    fleet = FleetView()
    fleet.on_health(health(), 0.0)
    view = fleet.get("r1")
    assert view is not None
    for n in range(3):
        fleet.claim("r1", f"reply{n}", tokens=16, blocks=2, now=0.0)
    fleet.release("r1", "reply0")
    assert view.places_taken() == 2
    fleet.on_health(health(), DISPATCH_CLAIM_S + 0.1)
    assert view.places_taken() == 0


def test_replicas_long_gone_are_forgotten():
    """The view stays as large as the fleet."""
    fleet = FleetView()
    fleet.on_health(health("r1"), 0.0)
    fleet.on_health(health("r2"), REPLICA_FORGET_S)
    assert fleet.forget(REPLICA_FORGET_S + 1.0) == ["r1"]
    assert fleet.get("r2") is not None
