"""Who may do what on the bus, as a matrix: each act names exactly the users that may do it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.permissions import OPERATOR, SERVICES, USERS, inbox_prefix, matches, may_publish, may_subscribe, permissions
from shared.ids import reply_id
from shared.subjects import Names
from shared.tiers import Tier

NAMES = Names("local")
SHARDS = 4
TABLE = permissions(NAMES, SHARDS)
REPLY = reply_id("local", 3, 1, b"0123456789")
LANES = [NAMES.lane_stream(tier) for tier in Tier]

WRITERS = {"conversation", "router", "replica", "safety"}
READERS = WRITERS | {"relay"}
DECLARERS = {"conversation", "router"}

PUBLISH = {
    NAMES.log_subject(REPLY): WRITERS,
    f"$JS.API.DIRECT.GET.{NAMES.log_stream_of(REPLY)}": READERS,
    f"$JS.API.DIRECT.GET.{NAMES.log_stream_of(REPLY)}.{NAMES.log_subject(REPLY)}": READERS,
    f"$JS.API.STREAM.PURGE.{NAMES.log_stream_of(REPLY)}": {"conversation"},
    f"$JS.API.STREAM.PURGE.{NAMES.ended_stream}": {"conversation"},
    f"$JS.API.STREAM.INFO.{NAMES.log_stream_of(REPLY)}": DECLARERS,
    f"$JS.API.STREAM.CREATE.{NAMES.ended_stream}": DECLARERS,
    f"$JS.API.STREAM.UPDATE.{NAMES.usage_stream}": DECLARERS | {"usage"},
    f"$JS.API.CONSUMER.CREATE.{NAMES.usage_stream}.usage_ledger.x": DECLARERS | {"usage"},
    f"$JS.API.CONSUMER.CREATE.{LANES[0]}.lane_paid_m_0.x": DECLARERS,
    f"$JS.API.STREAM.DELETE.{NAMES.ended_stream}": set(),
    f"$JS.API.STREAM.DELETE.{NAMES.log_stream_of(REPLY)}": set(),
    f"$JS.API.STREAM.MSG.GET.{LANES[0]}": set(),
    NAMES.lane_subject(Tier.PAID, "m", 0): {"conversation"},
    NAMES.ended(REPLY): {"router"},
    NAMES.usage(REPLY): {"replica"},
    NAMES.conversation("send"): {"gateway"},
    NAMES.conversation("withdraw"): {"gateway", "safety"},
    NAMES.relay_open: {"gateway"},
    NAMES.credit("relay-1"): {"gateway"},
    NAMES.frames("gateway-1", "s"): {"relay"},
    NAMES.relay_alive: {"relay"},
    NAMES.presence(REPLY): {"relay"},
    NAMES.dispatch("replica-1"): {"router"},
    NAMES.ask("replica-1"): {"router"},
    NAMES.health("replica-1"): {"replica"},
    NAMES.blocks("replica-1"): {"replica"},
    NAMES.attempt_over("router-1"): {"replica"},
    NAMES.queue(Tier.FREE, "m"): {"router"},
    NAMES.cancel(REPLY): {"conversation", "router", "safety"},
    NAMES.drain("replica-1"): {"fleet"},
    NAMES.safety_check: {"conversation", "replica"},
    NAMES.safety_watch: {"router", "safety"},
    NAMES.keys: set(),
    f"$JS.ACK.{LANES[0]}.lane_paid_m_0.1.1.1.1.0": {"router", "replica"},
    f"$JS.ACK.{NAMES.ended_stream}.conversation_archive.1.1.1.1.0": {"conversation"},
    f"$JS.ACK.{NAMES.usage_stream}.usage_ledger.1.1.1.1.0": {"usage"},
    f"$JS.API.CONSUMER.MSG.NEXT.{LANES[2]}.lane_background_m_3": {"router"},
    f"$JS.API.CONSUMER.MSG.NEXT.{NAMES.ended_stream}.conversation_archive": {"conversation"},
    f"$JS.API.CONSUMER.MSG.NEXT.{NAMES.usage_stream}.usage_ledger": {"usage"},
    f"$JS.API.CONSUMER.DELETE.{LANES[0]}.lane_paid_m_0": set(),
    Names("other").conversation("send"): set(),
}

SUBSCRIBE = {
    NAMES.frames("gateway-1", "*"): {"gateway"},
    NAMES.relay_alive: {"gateway"},
    NAMES.keys: {"gateway"},
    NAMES.conversation("send"): {"conversation"},
    NAMES.relay_open: {"relay"},
    NAMES.credit("relay-1"): {"relay"},
    NAMES.live(REPLY): {"relay", "safety"},
    NAMES.log_subject(REPLY): set(),
    NAMES.lane_filter(Tier.PAID): set(),
    NAMES.ended(REPLY): set(),
    NAMES.queue(Tier.FREE, "m"): {"relay", "fleet"},
    NAMES.health("*"): {"router", "fleet"},
    NAMES.blocks("*"): {"router"},
    NAMES.presence("*"): {"router", "replica"},
    NAMES.cancel("*"): {"router", "replica"},
    NAMES.attempt_over("router-1"): {"router"},
    NAMES.dispatch("replica-1"): {"replica"},
    NAMES.drain("replica-1"): {"replica"},
    NAMES.safety_check: {"safety"},
    NAMES.safety_watch: {"safety"},
    ">": set(),
    "$JS.>": set(),
}


@pytest.mark.parametrize("subject", PUBLISH)
def test_exactly_these_users_may_publish(subject):
    """Of all services, those named and no other may publish to the subject; the operator always may."""
    assert {user for user in USERS if may_publish(TABLE[user], subject)} == PUBLISH[subject] | {OPERATOR}


@pytest.mark.parametrize("subject", SUBSCRIBE)
def test_exactly_these_users_may_subscribe(subject):
    """Of all services, those named and no other may subscribe to the subject; the operator always may."""
    assert {user for user in USERS if may_subscribe(TABLE[user], subject)} == SUBSCRIBE[subject] | {OPERATOR}


@pytest.mark.parametrize("user", SERVICES)
def test_an_inbox_and_a_journal_are_ones_own(user):
    """Each service listens to its own inbox only, and writes the journal under its own name only."""
    inbox, journal = f"{inbox_prefix(user)}.a.1", NAMES.journal(user)
    for other in SERVICES:
        assert may_subscribe(TABLE[other], inbox) is (other == user)
        assert may_publish(TABLE[other], inbox) is (other == user)
        assert may_publish(TABLE[other], journal) is (other == user)


def test_who_answers_requests():
    """Those who are asked over the bus may answer where they were asked to, and no other."""
    assert {user for user in SERVICES if TABLE[user].responds} == {"conversation", "replica", "relay", "safety"}


def test_no_bucket_past_the_declared_shards():
    """Buckets are named one by one: a shard that is not declared belongs to nobody."""
    assert not any(may_publish(TABLE[user], f"$KV.{NAMES.log_bucket(SHARDS)}.x") for user in SERVICES)


@pytest.mark.parametrize(
    ("pattern", "subject", "covered"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a*", "ab", False),
    ],
)
def test_patterns_cover_what_the_server_says(pattern, subject, covered):
    """`*` is one whole token, `>` at least one at the end."""
    assert matches(pattern, subject) is covered


tokens = st.sampled_from(["a", "b", "c"])


@given(st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, min_size=1, max_size=4))
def test_a_pattern_without_wildcards_covers_itself_alone(one, other):
    """A plain subject covers exactly the equal subject."""
    assert matches(".".join(one), ".".join(other)) is (one == other)
