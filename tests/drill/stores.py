"""PostgreSQL stopped at once, Valkey killed, paused and flushed, under load: what runs goes on, what ended is stored.

A new message while PostgreSQL is away is refused honestly (503); a reply that was accepted is written to its end.
"""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence

import redis

from shared.messages import unpack_ids
from tests.drill.follower import Story
from tests.drill.load import Load
from tests.drill.observer import all_ready, blocks_are_back, lanes_empty, rows, tracebacks
from tests.drill.report import Report
from tests.integration.system import System, eventually

_ROWS = "SELECT id, status, reason, output_tokens, token_ids FROM replies WHERE id = ANY($1::text[])"


def postgres_stop(system: System, *, streams: int = 24, times: int = 10) -> Report:
    report, random_ = Report("postgres_immediate_stop"), random.Random(31)
    all_ready(system)
    before = len(tracebacks(system.data))
    with Load(system, streams=streams, tokens=(30, 80), seed=23, pause_s=0.2) as load:
        for _ in range(times):
            load.until(lambda: load.writing >= 0.5 * streams, "the replies are being written", 60)
            load.pass_time(random_.random())
            old = system.kill("postgres", signal.SIGQUIT)
            eventually(lambda old=old: system.pid("postgres") not in (0, old), "PostgreSQL is started again", 30)
            all_ready(system)
    report.stories(load.stories, errors=True)
    report.figures["stops"] = times
    _only_503(report, load.stories)
    _stored_once(system, report, load.stories)
    report.must(len(tracebacks(system.data)) == before, f"tracebacks: {tracebacks(system.data)[before:][:3]}")
    lanes_empty(system, 30)
    blocks_are_back(system)
    return report


def valkey(system: System, *, streams: int = 24, asleep_s: float = 3.0) -> Report:
    """Killed, paused and emptied: it is a cache and a set of limits, never the only place of a fact."""
    report = Report("valkey_kill_pause_flush")
    all_ready(system)
    before = len(tracebacks(system.data))
    with Load(system, streams=streams, tokens=(30, 80), seed=29, pause_s=0.2) as load:
        load.until(lambda: load.writing >= 0.5 * streams, "the replies are being written", 60)
        old = system.kill("valkey")
        eventually(lambda: system.pid("valkey") not in (0, old), "Valkey is started again", 30)
        load.pass_time(1.0)
        pid = system.kill("valkey", signal.SIGSTOP)
        load.pass_time(asleep_s)
        os.kill(pid, signal.SIGCONT)
        load.pass_time(1.0)
        with redis.Redis.from_url(system.ready["redis"]) as client:
            client.flushall()
        load.pass_time(1.0)
    report.stories(load.stories)
    _stored_once(system, report, load.stories)
    report.must(len(tracebacks(system.data)) == before, f"tracebacks: {tracebacks(system.data)[before:][:3]}")
    return report


def _only_503(report: Report, stories: Sequence[Story]) -> None:
    errors = Counter(error.split(":", 1)[0] for story in stories for error in story.errors)
    report.figures["errors"] = dict(errors)
    report.must(set(errors) <= {"503"}, f"errors other than 503: {dict(errors)}")


def _stored_once(system: System, report: Report, stories: Sequence[Story]) -> None:
    """Each end that a client saw is a row with the same tokens, and was archived once."""
    ids = [story.reply_id for story in stories]

    def stored() -> dict[str, dict[str, object]]:
        found = {str(row["id"]): dict(row) for row in rows(system.data, _ROWS, ids)}
        return found if all(found.get(each, {}).get("status") == "ended" for each in ids) else {}

    found = eventually(stored, "every ended reply is stored", 30)
    unlike = [story.reply_id for story in stories if unpack_ids(found[story.reply_id]["token_ids"]) != story.ids]
    report.must(not unlike, f"{len(unlike)} rows hold other tokens than the client saw: {unlike[:3]}")
    wanted, told = set(ids), Counter[str]()
    for log in (system.data / "logs").glob("conversation-*.log"):
        for line in log.read_text().splitlines():
            if '"reply_finished"' in line:
                told[json.loads(line)["reply_id"]] += 1
    twice = [each for each in wanted if told[each] > 1]
    report.must(not twice, f"archived more than once: {twice[:3]}")
    report.figures["stored"] = len(found)
