"""Filter, score, pick: room and targets first, then the longest prefix unless it is too hot, else the least load."""

import pytest

from services.replica.core.step_budget import StepBudget, room_s
from services.replica.core.step_fit import predict
from services.router.fleet_view import FleetView
from services.router.placement import Demand, Placed, Wait, place, predicted_ttft_s
from shared.limits import BLOCK_TOKENS, REPLICA_QUEUE_MAX
from shared.messages import BlocksChanged, ReplicaHealth, StepModel
from shared.tiers import Tier
from tests.unit.replica.machine import Machine
from tests.unit.replica.machine import demand as prompt

STEP = StepModel(base_s=0.01, per_token_s=0.001)


def fleet(*replicas: dict, cached: dict[str, int] | None = None) -> list:
    """Replicas r1, r2, ... with the given figures; `cached` counts the leading blocks each holds of `HASHES`."""
    view = FleetView()
    for n, changes in enumerate(replicas, 1):
        figures = {
            "model": "m",
            "model_version": "m@1",
            "accepting": True,
            "blocks_total": 1000,
            "blocks_free": 1000,
            "running": 0,
            "running_max": 8,
            "waiting": 0,
            "waiting_tokens": {},
            "step": STEP,
            "step_age_s": 0.0,
            "step_predicted_s": 0.0,
            "tokens_per_s": 0.0,
            **changes,
        }
        view.on_health(ReplicaHealth(replica=f"r{n}", boot_id="b", **figures), 0.0)
        held = (cached or {}).get(f"r{n}", 0)
        view.on_blocks_snapshot(BlocksChanged(replica=f"r{n}", boot_id="b", number=0, stored=b"".join(HASHES[:held])))
    return view.alive("m", 0.0)


HASHES = [n.to_bytes(16, "big") for n in range(64)]


def demand(tokens: int = 160, **changes) -> Demand:
    figures = {
        "tier": Tier.PAID,
        "tokens": tokens,
        "tokens_max": tokens + 64,
        "hashes": HASHES[: tokens // BLOCK_TOKENS],
    }
    return Demand(**{**figures, **changes})


def chosen(outcome: Placed | Wait) -> tuple[str, str]:
    assert isinstance(outcome, Placed), outcome
    return outcome.replica, outcome.why


def test_nobody_to_ask():
    """No replica that accepts is another answer than replicas without room."""
    assert place(demand(), fleet()) is Wait.NO_REPLICA
    assert place(demand(), fleet({"accepting": False})) is Wait.NO_REPLICA


def test_too_large_for_every_replica_is_said_at_once():
    """A request whose prompt and budget exceed every block pool can never run."""
    assert place(demand(tokens_max=16_001), fleet({}, {})) is Wait.NEVER_FITS
    assert chosen(place(demand(tokens_max=16_001), fleet({}, {"blocks_total": 1001})))[0] == "r2"


def test_no_blocks_no_admission():
    """Blocks that waiting prompts will need are not free."""
    assert place(demand(160), fleet({"blocks_free": 10})) is Wait.SATURATED
    assert chosen(place(demand(160), fleet({"blocks_free": 11})))[0] == "r1"
    waiting = {"blocks_free": 20, "waiting": 1, "waiting_tokens": {"free": 160}}
    assert place(demand(160), fleet(waiting)) is Wait.SATURATED


def test_full_replicas_get_a_short_queue_only():
    """Requests bind late: past a few ahead of a free place they stay where they can still move."""
    full = {"running": 8, "waiting": REPLICA_QUEUE_MAX - 1}
    assert chosen(place(demand(), fleet(full)))[0] == "r1"
    assert place(demand(), fleet({**full, "waiting": REPLICA_QUEUE_MAX})) is Wait.SATURATED


def test_a_queue_that_misses_the_target_takes_no_more():
    """Paid requests wait in their lane where a background request would still enter."""
    busy = {"waiting": 1, "waiting_tokens": {"free": 3000}}
    assert place(demand(tier=Tier.PAID), fleet(busy)) is Wait.SATURATED
    assert chosen(place(demand(tier=Tier.BACKGROUND), fleet(busy)))[0] == "r1"


def test_a_long_prompt_runs_where_nothing_waits():
    """A prompt that cannot meet the target anywhere is not kept from running for ever."""
    outcome = place(demand(8000), fleet({}))
    assert isinstance(outcome, Placed)
    assert outcome.ttft_s > 1.0


def test_longest_prefix_wins():
    """Affinity: the replica that holds most of the prompt, even when it is busier."""
    replicas = fleet({"running": 3}, {}, {}, cached={"r1": 10, "r2": 4})
    assert chosen(place(demand(), replicas)) == ("r1", "prefix")


def test_a_hot_prefix_overflows():
    """A prefix everybody shares must not make one hot replica: predicted first token decides."""
    hot = {"waiting": 1, "waiting_tokens": {"paid": 600}}
    assert chosen(place(demand(), fleet(hot, {}, {"running": 1}, cached={"r1": 10}))) == ("r2", "overflow")
    warm = {"waiting": 1, "waiting_tokens": {"paid": 200}}
    assert chosen(place(demand(), fleet(warm, {}, cached={"r1": 10}))) == ("r1", "prefix")


def test_a_miss_goes_to_the_least_load():
    """Not to the emptiest cache: to who has least before it."""
    replicas = fleet({"running": 5}, {"running": 2}, {"waiting": 1, "waiting_tokens": {"free": 512}}, cached={"r1": 0})
    assert chosen(place(demand(), replicas)) == ("r2", "least_load")


def test_load_decides_before_speed():
    """A slightly faster replica does not draw everything: its places count first."""
    faster = StepModel(base_s=0.009, per_token_s=0.001)
    assert chosen(place(demand(), fleet({"running": 5, "step": faster}, {"running": 4})))[0] == "r2"
    assert chosen(place(demand(), fleet({"running": 4, "step": faster}, {"running": 4})))[0] == "r1"


def test_replicas_to_avoid_are_the_last_resort():
    """Who just refused or was lost with the reply is asked again only when nobody else is there."""
    assert chosen(place(demand(avoid=frozenset({"r1"})), fleet({}, {"running": 7})))[0] == "r2"
    assert chosen(place(demand(avoid=frozenset({"r1"})), fleet({})))[0] == "r1"


def test_predicted_ttft_counts_tokens_not_requests():
    """What stands before it, its own uncached tokens, and a token for each running sequence in each step."""
    (view,) = fleet({"running": 6, "waiting": 1, "waiting_tokens": {"free": 90}, "step_tokens": 256})
    # 90 + 160 tokens need one step of 250; that step also decodes 6: 256 tokens
    assert abs(predicted_ttft_s(view, 160, 0) - (0.01 + 0.256)) < 1e-9
    # fully cached: the last token is computed again
    assert abs(predicted_ttft_s(view, 160, 160) - (0.01 + 0.097)) < 1e-9


@pytest.mark.parametrize(("decodes", "tokens"), [(0, 4000), (16, 1000), (16, 4000), (16, 7000)])
def test_predicted_ttft_of_a_long_prompt_is_about_what_the_scheduler_takes(decodes: int, tokens: int):
    """Chunks become shorter towards its end, and the decodes beside it grow meanwhile."""
    model = StepModel(base_s=0.004, per_token_s=0.0004, per_attended_s=3e-7)
    machine = Machine(blocks=4000, running_max=20, step_tokens_max=512, mixed_tokens_max=208, context_max=8192)

    def step() -> float:
        plan = machine.scheduler.plan(0.0, model)
        machine.scheduler.commit(plan, machine.runner.run(plan), 0.0, model)
        return predict(model, plan.tokens, plan.attended)

    for number in range(decodes):
        machine.submit(prompt(chr(97 + number), 130, budget=4000))
        step()
    load = machine.scheduler.load()
    held = (4000 - load.blocks_free) * 16
    decodes_s = predict(model, decodes, held)
    room = room_s(model, decodes_s=decodes_s, decodes=decodes, prompts=1)
    step_tokens = decodes + StepBudget(machine.scheduler.limits.prompt_tokens(decodes), room, model).take(0, 512)
    (view,) = fleet({"running": decodes, "step": model, "step_tokens": step_tokens, "blocks_total": 4000,
                     "blocks_free": load.blocks_free})  # fmt: skip
    machine.submit(prompt("zz", tokens, budget=1))
    taken = 0.0
    while "zz" in machine.scheduler._sequences:
        taken += step()
    assert 0.65 * taken < predicted_ttft_s(view, tokens, 0) < 1.3 * taken


def test_predicted_ttft_waits_for_the_running_step():
    """The rest of the step in progress stands before any other."""
    idle, busy = fleet({}, {"step_predicted_s": 0.4, "step_age_s": 0.1})
    assert abs(predicted_ttft_s(busy, 16, 0) - predicted_ttft_s(idle, 16, 0) - 0.3) < 1e-9
