"""The streams, buckets and consumers of one region, as values; any service may apply them at start. Pure.

lanes      3 work queues; one consumer per (tier, model, user bucket)
buckets    `shards` token-log buckets, republished to the live subjects
ENDED      each ended reply whole         ──> conversation_archive
USAGE      cost records per attempt       ──> usage_ledger
JOURNAL    state changes and decisions    (read by people, no consumer)
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared.bus import ConsumerSpec, StreamSpec
from shared.limits import (
    ACK_WAIT_S,
    ARCHIVE_ACK_WAIT_S,
    DEDUPLICATION_S,
    ENDED_AGE_S,
    JOURNAL_AGE_S,
    LANE_BYTES_MAX,
    LANE_MESSAGES_MAX,
    LOG_AGE_S,
    LOG_BUCKET_BYTES,
    LOG_HISTORY_MAX,
    LOG_SHARDS,
    STREAM_BYTES_MAX,
    USAGE_AGE_S,
    USER_BUCKETS,
)
from shared.subjects import Names
from shared.tiers import LANE_ORDER, Tier

ARCHIVE_CONSUMER = "conversation_archive"
LEDGER_CONSUMER = "usage_ledger"


class Topology(NamedTuple):
    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...]


def topology(names: Names, models: Sequence[str], *, shards: int = LOG_SHARDS, replicas: int = 1) -> Topology:
    """Everything a region's bus must hold: `await bus.apply(*topology(names, models))`.

    `shards` is the number of log buckets, `replicas` the copies of each stream in a cluster.
    """
    streams = [_lane(names, tier, replicas) for tier in LANE_ORDER]
    streams += [log_bucket(names, shard, replicas) for shard in range(shards)]
    streams += [
        _kept(names.ended_stream, names.ended(">"), ENDED_AGE_S, replicas),
        _kept(names.journal_stream, names.journal(">"), JOURNAL_AGE_S, replicas),
        _kept(names.usage_stream, names.usage(">"), USAGE_AGE_S, replicas),
    ]
    consumers = [lane for tier in LANE_ORDER for model in models for lane in lane_consumers(names, tier, model)]
    consumers += [
        ConsumerSpec(names.ended_stream, ARCHIVE_CONSUMER, names.ended(">"), ARCHIVE_ACK_WAIT_S),
        ConsumerSpec(names.usage_stream, LEDGER_CONSUMER, names.usage(">"), ARCHIVE_ACK_WAIT_S),
    ]
    return Topology(tuple(streams), tuple(consumers))


def lane_consumers(names: Names, tier: Tier, model: str) -> list[ConsumerSpec]:
    """One per user bucket: users are hashed over them, so that a router can be fair between buckets."""
    return [
        ConsumerSpec(
            stream=names.lane_stream(tier),
            name=names.lane_consumer(tier, model, bucket),
            filter_subject=names.lane_subject(tier, model, bucket),
            ack_wait_s=ACK_WAIT_S,
        )
        for bucket in range(USER_BUCKETS)
    ]


def log_bucket(names: Names, shard: int, replicas: int = 1) -> StreamSpec:
    """The stream of one token-log bucket."""
    return StreamSpec(
        name=names.log_stream(shard),
        subjects=(names.log_filter(shard),),
        max_bytes=LOG_BUCKET_BYTES,
        max_age_s=LOG_AGE_S,
        history=LOG_HISTORY_MAX,
        deduplication_s=DEDUPLICATION_S,
        republish_to=names.live_filter(shard),
        replicas=replicas,
    )


def _lane(names: Names, tier: Tier, replicas: int) -> StreamSpec:
    """Bounded, without an age: a request leaves it when its reply has ended, never silently."""
    return StreamSpec(
        name=names.lane_stream(tier),
        subjects=(names.lane_filter(tier),),
        work_queue=True,
        max_bytes=LANE_BYTES_MAX,
        max_messages=LANE_MESSAGES_MAX,
        deduplication_s=DEDUPLICATION_S,
        replicas=replicas,
    )


def _kept(name: str, subject: str, age_s: float, replicas: int) -> StreamSpec:
    return StreamSpec(
        name=name,
        subjects=(subject,),
        max_bytes=STREAM_BYTES_MAX,
        max_age_s=age_s,
        deduplication_s=DEDUPLICATION_S,
        replicas=replicas,
    )
