"""Kill a router or a replica between a message's way into its lane and its first token: it is written all the same.

posted ── lane ── pulled ── open ── dispatched ── first token
              ╳ router            ╳ replica, router
"""

import asyncio
import random
import time
from dataclasses import dataclass

from tests.drill.follower import Follower, Story
from tests.drill.load import Clients
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty
from tests.drill.report import Report, quantile
from tests.integration.system import System, eventually

RESUBMITTED_S = 2.5
BURST = 10  # replies of one kill


@dataclass
class _Hit:
    story: Story
    killed_s: float

    @property
    def late_s(self) -> float:
        """The kill -> the first token."""
        return self.story.arrivals[0][0] - self.killed_s if self.story.arrivals else float("inf")


async def _burst(system: System, random_: random.Random, victim: str) -> tuple[list[Story], list[_Hit], int]:
    """(all stories, those that had no token when the victim was killed, its pid)."""
    followers = [
        Follower(system.gateways, system.key(), seed=random_.getrandbits(31), tokens=random_.randint(5, 20))
        for _ in range(BURST)
    ]
    running = [asyncio.create_task(follower.run()) for follower in followers]
    stories = [follower.story for follower in followers]
    while sum(bool(story.reply_id) for story in stories) < random_.randint(1, BURST // 2):
        await asyncio.sleep(0.001)
    await asyncio.sleep(random_.random() * 0.04)
    pid, killed_s = system.kill(victim), time.monotonic()
    early = [story for story in stories if story.reply_id and not story.ids]
    await asyncio.gather(*running)
    return stories, [_Hit(story, killed_s) for story in early], pid


def before_first_token(system: System, *, hits: int = 200, rounds_max: int = 120) -> Report:
    report, random_ = Report("kill_before_first_token"), random.Random(13)
    all_ready(system)
    stories: list[Story] = []
    found: list[_Hit] = []
    kills = 0
    with Clients() as clients:
        while len(found) < hits and kills < rounds_max:
            victim = random_.choice(["router-1", "router-2", "replica-1", "replica-2"])
            eventually(lambda name=victim: system.pid(name), f"{victim} is there", 30)
            seen, early, pid = clients.do(_burst(system, random_, victim), 90.0)
            stories, found, kills = stories + seen, found + early, kills + 1
            system.restarted(victim, pid)
    report.stories(stories)
    late = [hit.late_s for hit in found]
    report.figures |= {"kills": kills, "hit": len(found), "late_s_p50": round(quantile(late, 0.5), 3)}
    report.must(len(found) >= hits, f"only {len(found)} of {hits} replies were caught before their first token")
    report.target("late_s_max", max(late, default=0.0), RESUBMITTED_S)
    lanes_empty(system)
    blocks_are_back(system)
    return report
