"""The real model: a replica is killed in mid-sentence, and the text is what it would have been.

Each of the replies is written once undisturbed, then again with a kill; greedy and seeded, token by token.
"""

import random
from collections.abc import Sequence
from typing import Any

from tests.drill.follower import Follower, Story
from tests.drill.load import Clients
from tests.drill.observer import all_ready, lanes_empty, opens, read_logs
from tests.drill.report import Report
from tests.integration.system import System, eventually

MODEL = "smollm2-135m"
_TASKS = (
    "Tell a short story about a lighthouse.",
    "Explain how rain forms.",
    "Write a letter to a friend about a walk in the hills.",
    "List what to pack for a week at the sea, with reasons.",
)


def _bodies(count: int, tokens: int) -> list[tuple[int, dict[str, Any]]]:
    """(seed, body): half of them greedy, half drawn with a seed."""
    found = []
    for number in range(count):
        warm = {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.8, "top_p": 0.95}
        text = f"{_TASKS[number % len(_TASKS)]} Mention the number {number}."
        found.append((1000 + number, {"input": text, "max_output_tokens": tokens, **warm}))
    return found


async def _follow(followers: Sequence[Follower]) -> None:
    for follower in followers:
        await follower.run()


def _in_the_middle(followers: Sequence[Follower]) -> bool:
    return any(3 < len(each.story.ids) < each.story.budget - 3 for each in followers if not each.story.over)


def _write(system: System, count: int, tokens: int, kills: int) -> list[Story]:
    """The same replies, four at a time; `kills` replicas die while they are written."""
    random_ = random.Random(count)
    followers = [
        Follower(system.gateways, system.key(), seed=seed, tokens=tokens, model=MODEL, scripted=False, more=body)
        for seed, body in _bodies(count, tokens)
    ]
    with Clients() as clients:
        running = [clients.start(_follow(followers[lane::4])) for lane in range(4)]
        for _ in range(kills):
            eventually(lambda: _in_the_middle(followers) or all(each.story.over for each in followers), "mid", 300)
            if all(each.story.over for each in followers):
                break
            victim = random_.choice(["replica-1", "replica-2"])
            pid = system.kill(victim)
            system.restarted(victim, pid, 120)
        for each in running:
            each.result(300)
    return [follower.story for follower in followers]


def real_model(system: System, *, count: int = 20, tokens: int = 200, kills: int = 8) -> Report:
    report = Report("real_model_sigkill")
    all_ready(system, 120)
    calm = _write(system, count, tokens, 0)
    disturbed = _write(system, count, tokens, kills)
    report.must(all(story.final for story in disturbed), "a reply did not end")
    logs = read_logs(system.data, [story.reply_id for story in disturbed])
    moved = [story for story in disturbed if len(opens(logs[story.reply_id])) > 1]
    apart = [
        {
            "reply": after.reply_id,
            "greedy": number % 2 == 0,
            "token": next((at for at, (a, b) in enumerate(zip(before.ids, after.ids, strict=False)) if a != b), -1),
            "continued_at": [each.first_index for each in opens(logs[after.reply_id])][1:],
        }
        for number, (before, after) in enumerate(zip(calm, disturbed, strict=True))
        if before.ids != after.ids
    ]
    report.figures |= {
        "replies": count,
        "moved": len(moved),
        "match_rate": round(1 - len(apart) / count, 4),
        "diverged": apart,
        "pause_s_max": round(max((story.longest_pause() for story in moved), default=0.0), 2),
    }
    report.must(moved, "no reply was moved: nothing was drilled")
    report.must(not apart, f"{len(apart)} replies differ from their undisturbed text: {apart[:3]}")
    lanes_empty(system, 30)
    return report
