"""Incidents, written as one would tell them. Each asserts what a person would have seen."""

import itertools
from collections.abc import Callable, Mapping

from shared.outcomes import EndReason
from sim.actors.client import Client
from sim.region import Region
from sim.swarm import Swarm
from sim.world import Weather

FAIR = Weather()


def _region(*, trace: bool, seed: int = 1, **swarm: float) -> Region:
    """A region in fair weather in which nothing happens but what the scenario does."""
    return Region(seed, Swarm(weather=FAIR, running_max=64, blocks=512, step_s=0.05, **swarm), trace=trace)  # type: ignore[arg-type]  # counts are ints


def pause_s_max(client: Client) -> float:
    """The longest gap between two tokens on a screen."""
    times = client.token_times
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def ended(region: Region, client: Client) -> EndReason:
    end = region.checks.facts[client.reply_id].end
    assert end is not None
    return end.reason


def replica_dies(*, trace: bool = False) -> None:
    """One of two replicas dies with eight replies on it: all go on within 2.5 s, and are whole."""
    region = _region(trace=trace)
    users = [region.say(tokens=60) for _ in range(16)]
    region.run(1.5)
    region.replica("r1").kill()
    region.run(2.5)
    assert all(len(user.tokens) > 20 for user in users)
    region.run_to_rest()
    assert region.checks.failovers > 0
    assert max(map(pause_s_max, users)) < 2.5
    assert all(ended(region, user) is EndReason.MAX_TOKENS for user in users)


def zombie_writes(*, trace: bool = False) -> None:
    """A replica sleeps for ten seconds and wakes up: what it still appends is refused, and no screen shows it."""
    region = _region(trace=trace)
    users = [region.say(tokens=60) for _ in range(8)]
    region.run(1.5)
    region.replica("r1").pause(10.0)
    region.run_to_rest()
    assert region.checks.failovers > 0
    assert max(map(pause_s_max, users)) < 3.0
    assert all(ended(region, user) is EndReason.MAX_TOKENS for user in users)


def router_dies_between_pull_and_open(*, trace: bool = False) -> None:
    """The router that has just pulled a message dies: the bus gives it to the other one."""
    region = _region(trace=trace)
    user = region.say(tokens=5)
    while not any(len(router.table) for router in region.routers):
        region.run(0.001)
    next(router for router in region.routers if len(router.table)).crash(30.0)
    region.run(3.0)
    assert user.tokens
    region.run_to_rest()
    assert ended(region, user) is EndReason.MAX_TOKENS


def election_while_all_is_well(*, trace: bool = False) -> None:
    """The bus elects another leader and delivers everything again: questions are asked, and nobody is replaced."""
    region = _region(trace=trace)
    users = [region.say(tokens=80) for _ in range(8)]
    region.run(1.5)
    region.bus.lane.election()
    region.run_to_rest()
    assert region.checks.failovers == 0
    assert all(ended(region, user) is EndReason.MAX_TOKENS for user in users)


def every_replica_gone(*, trace: bool = False) -> None:
    """All replicas are gone for a while: replies wait where they were, and go on when one is back."""
    region = _region(trace=trace)
    users = [region.say(tokens=60) for _ in range(4)]
    region.run(1.0)
    for replica in region.replicas:
        replica.kill(8.0)
    region.run_to_rest()
    assert all(ended(region, user) is EndReason.MAX_TOKENS for user in users)


def stop_wins_over_failover(*, trace: bool = False) -> None:
    """The user stops a reply in the very moment in which its replica dies: it ends as stopped, and once."""
    region = _region(trace=trace)
    user = region.say(tokens=200)
    region.run(1.5)
    for replica in region.replicas:
        if replica.table.of_reply(user.reply_id):
            replica.kill()
    user.stop()
    region.run_to_rest()
    assert ended(region, user) is EndReason.USER_STOP


def next_turn_supersedes(*, trace: bool = False) -> None:
    """A second message in the same conversation ends the first reply, which keeps what was shown."""
    region = _region(trace=trace)
    first = region.say(tokens=200, conversation="talk")
    region.run(1.5)
    second = region.say(tokens=10, conversation="talk")
    region.run_to_rest()
    assert ended(region, first) is EndReason.SUPERSEDED
    assert first.tokens
    assert ended(region, second) is EndReason.MAX_TOKENS


SCENARIOS: Mapping[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        replica_dies,
        zombie_writes,
        router_dies_between_pull_and_open,
        election_while_all_is_well,
        every_replica_gone,
        stop_wins_over_failover,
        next_turn_supersedes,
    )
}
