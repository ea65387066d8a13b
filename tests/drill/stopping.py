"""Stop a reply at any moment of its life: one end on every screen within 250 ms, and its blocks are back.

phases   just posted | queued | first tokens | in the middle | near its end | a moment before its natural end
"""

import asyncio
import random
import time
from dataclasses import dataclass

from tests.drill.follower import Follower, Story, stop
from tests.drill.load import Clients
from tests.drill.observer import all_ready, blocks_are_back, ends, lanes_empty, read_logs
from tests.drill.report import Report, quantile
from tests.integration.system import System

END_S, FREE_S = 0.25, 0.25
TOGETHER = 8  # replies at a time


@dataclass
class Stopped:
    story: Story
    pressed_s: float = 0.0
    answered_s: float = 0.0
    statuses: tuple[int, ...] = ()

    @property
    def seen_s(self) -> float:
        """Pressed -> the end on the screen. A reply that had ended by itself has no such time."""
        return self.story.ended_s - self.pressed_s


async def _one(system: System, random_: random.Random) -> Stopped:
    """One reply, stopped at its moment, sometimes twice, sometimes from the other gateway."""
    tokens = random_.randint(8, 60)
    follower = Follower(system.gateways, system.key(), seed=random_.getrandbits(31), tokens=tokens)
    after, delay_s = random_.choice((0, 1, 3, tokens // 2, tokens - 1)), random_.random() * 0.05
    stopped, story = Stopped(follower.story), follower.story
    reading = asyncio.create_task(follower.run())
    while not story.over and (not story.reply_id or len(story.ids) < after):
        await asyncio.sleep(0.002)
    await asyncio.sleep(delay_s)
    gateway = random_.choice(system.gateways)
    stopped.pressed_s = time.monotonic()
    presses = [stop(gateway, system.key(), story.reply_id) for _ in range(random_.choice((1, 1, 2)))]
    stopped.statuses = tuple(await asyncio.gather(*presses))
    stopped.answered_s = time.monotonic()
    await reading
    return stopped


async def _all(system: System, count: int) -> list[Stopped]:
    random_, found = random.Random(11), list[Stopped]()
    places = asyncio.Semaphore(TOGETHER)

    async def in_turn() -> None:
        async with places:
            found.append(await _one(system, random_))

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(in_turn())
    return found


def stopping(system: System, *, count: int = 200) -> Report:
    report = Report("stop")
    all_ready(system)
    with Clients() as clients:
        found = clients.do(_all(system, count), 300.0)
    stories = [each.story for each in found]
    report.tokens_right(stories)
    report.no_errors(stories)
    report.must(all(status == 200 for each in found for status in each.statuses), "a stop was not answered with 200")
    stopped = [each for each in found if each.story.reason == "cancelled"]
    report.must(all(each.story.complete or each.story.reason == "cancelled" for each in found), "another end")
    report.must(len(stopped) > count // 2, f"only {len(stopped)} of {count} were stopped in time")
    logs = read_logs(system.data, [story.reply_id for story in stories])
    report.must(all(len(ends(log)) == 1 for log in logs.values()), "not exactly one end in each log")
    report.figures["stopped"] = len(stopped)
    seen = [each.seen_s for each in stopped]
    report.figures["end_s_p50"] = round(quantile(seen, 0.5), 3)
    report.figures["end_s_p99"] = round(quantile(seen, 0.99), 3)
    report.target("end_s_max", max(seen, default=0.0), END_S)
    blocks_are_back(system)
    lanes_empty(system)
    _freed(system, report)
    return report


def _freed(system: System, report: Report) -> None:
    """From the replicas' own histograms: told to drop a sequence -> its blocks free."""
    counted, within, spent = 0.0, 0.0, 0.0
    for name in ("replica-1", "replica-2", "replica-3"):
        for sample, value in system.metrics(name).items():
            if 'cause="user_stop"' not in sample:
                continue
            if sample.startswith("chorus_replica_cancel_to_free_seconds_count"):
                counted += value
            elif sample.startswith("chorus_replica_cancel_to_free_seconds_sum"):
                spent += value
            elif 'le="0.25"' in sample:
                within += value
    report.figures["freed"], report.figures["freed_s_mean"] = counted, round(spent / max(counted, 1.0), 4)
    report.target("freed_late", counted - within, 0.0)
