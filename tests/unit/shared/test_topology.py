"""A region's streams and consumers fit each other, the names and the limits."""

import itertools

from shared.bus.memory import MemoryServer
from shared.bus.memory_streams import subject_matches
from shared.limits import LANE_MESSAGES_MAX, LOG_SHARDS, USER_BUCKETS
from shared.subjects import Names
from shared.tiers import Tier
from shared.topology import ARCHIVE_CONSUMER, LEDGER_CONSUMER, topology

NAMES = Names("local")
MODELS = ("chorus-fast", "chorus.mini")
REPLY = "resp_local0201M8NCVEB44XM76HGQ7G2411NW"


def captured_by(subject: str) -> list[str]:
    return [
        stream.name
        for stream in topology(NAMES, MODELS).streams
        if any(subject_matches(pattern, subject) for pattern in stream.subjects)
    ]


def test_each_subject_has_one_stream():
    """Every subject that is appended to is captured by exactly the stream named for it."""
    assert captured_by(NAMES.log_subject(REPLY)) == [NAMES.log_stream_of(REPLY)]
    assert captured_by(NAMES.ended(REPLY)) == [NAMES.ended_stream]
    assert captured_by(NAMES.usage(REPLY)) == [NAMES.usage_stream]
    assert captured_by(NAMES.journal("router")) == [NAMES.journal_stream]
    for tier in Tier:
        assert captured_by(NAMES.lane_subject(tier, "chorus.mini", 1)) == [NAMES.lane_stream(tier)]


def test_core_subjects_are_captured_by_none():
    """What is only said in passing is stored nowhere."""
    for subject in (NAMES.live(REPLY), NAMES.health("r1"), NAMES.cancel(REPLY), NAMES.conversation("send")):
        assert captured_by(subject) == []


def test_each_lane_request_has_one_consumer():
    """Each (tier, model, user bucket) is served by exactly one consumer, on its tier's stream."""
    _, consumers = topology(NAMES, MODELS)
    for tier, model, bucket in itertools.product(Tier, MODELS, range(USER_BUCKETS)):
        subject = NAMES.lane_subject(tier, model, bucket)
        serving = [one for one in consumers if subject_matches(one.filter_subject, subject)]
        assert [(one.name, one.stream) for one in serving] == [
            (NAMES.lane_consumer(tier, model, bucket), NAMES.lane_stream(tier))
        ]


def test_lanes_say_no_and_never_forget():
    """Lanes are bounded work queues without an age; token logs are republished and keep their history."""
    streams = {stream.name: stream for stream in topology(NAMES, MODELS).streams}
    for tier in Tier:
        lane = streams[NAMES.lane_stream(tier)]
        assert (lane.work_queue, lane.max_messages, lane.max_age_s) == (True, LANE_MESSAGES_MAX, 0.0)
    logs = [streams[NAMES.log_stream(shard)] for shard in range(LOG_SHARDS)]
    assert all(log.history > 0 and log.republish_to and not log.work_queue for log in logs)


def test_what_is_kept_has_its_reader():
    """ENDED is read by the archive, USAGE by the ledger, each through one durable consumer."""
    readers = {one.name: one.stream for one in topology(NAMES, ()).consumers}
    assert readers == {ARCHIVE_CONSUMER: NAMES.ended_stream, LEDGER_CONSUMER: NAMES.usage_stream}


async def test_the_whole_applies_twice():
    """The topology of two regions stands on one server, and may be applied again."""
    bus = MemoryServer().bus()
    for region in ("local", "far", "local"):
        await bus.apply(*topology(Names(region), MODELS, shards=2))
    assert await bus.stream_bytes(Names("far").log_stream(1)) == 0
