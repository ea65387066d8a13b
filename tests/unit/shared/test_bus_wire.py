"""JetStream's API as values: what we send, and what is read back."""

import msgspec
import pytest

from shared.bus import ConsumerSpec, StreamSpec, wire
from shared.errors import BusError, BusTimeoutError, StreamFullError, WrongLastSequenceError


def test_an_ack_subject_tells_its_delivery():
    """Both forms of ack subject, without and with a domain, give place, count and time."""
    for subject in (
        "$JS.ACK.S.c.3.17.40.1700000000500000000.2",
        "$JS.ACK.hub.hash.S.c.3.17.40.1700000000500000000.2.token",
    ):
        delivery = wire.delivery_of("lane.a", b"x", subject)
        assert (delivery.seq, delivery.delivered, delivery.stored_s) == (17, 3, 1_700_000_000.5)
        assert delivery.ack_subject == subject


@pytest.mark.parametrize("subject", ["", "_INBOX.1", "$JS.ACK.too.short", "$JS.API.a.b.c.d.e.f.g"])
def test_what_is_no_ack_subject_is_refused(subject):
    """Other reply subjects are not taken for deliveries."""
    with pytest.raises(ValueError, match="not an ack subject"):
        wire.delivery_of("x", b"", subject)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-11-30T04:45:25Z", 1796013925.0),
        ("2026-11-30T04:45:25.5Z", 1796013925.5),
        ("2026-11-30T04:45:25.203541738Z", 1796013925.203541738),
    ],
)
def test_server_times_are_read(text, seconds):
    """RFC 3339 with any number of fractional digits, nanoseconds included."""
    assert wire.parse_time_s(text) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (10071, "wrong last sequence: 41", WrongLastSequenceError),
        (10164, "wrong last sequence", WrongLastSequenceError),
        (10077, "maximum messages exceeded", StreamFullError),
        (10023, "insufficient resources", StreamFullError),
        (10008, "JetStream system temporarily unavailable", BusTimeoutError),
        (10100, "filtered consumer not unique", BusError),
    ],
)
def test_error_codes_become_our_errors(code, text, kind):
    """The server's code decides the exception, its text only informs."""
    error = wire.error_of(wire.ApiError(400, code, text), "lane.a")
    assert type(error) is kind
    if kind is WrongLastSequenceError:
        assert error.last_sequence == (41 if "41" in text else None)


def test_a_bucket_is_declared_as_one():
    """A history makes a stream a key-value bucket: per-key bound, direct reads, no deletes, republished."""
    config = wire.stream_config(
        StreamSpec(name="KV_b", subjects=("$KV.b.>",), history=64, max_age_s=2.5, republish_to="live.>")
    )
    assert (config["max_msgs_per_subject"], config["discard"], config["max_age"]) == (64, "new", 2_500_000_000)
    assert config["allow_direct"] and config["deny_delete"] and config["allow_rollup_hdrs"]
    assert config["republish"] == {"src": "$KV.b.>", "dest": "live.>"}


def test_a_lane_and_its_consumer_are_declared_unlimited_but_by_the_stream():
    """Lanes are work queues; their consumers bound neither deliveries nor what is un-acked."""
    lane = wire.stream_config(StreamSpec(name="L", subjects=("lane.>",), work_queue=True, max_messages=9))
    assert (lane["retention"], lane["max_msgs"], "republish" in lane) == ("workqueue", 9, False)
    consumer = wire.consumer_config(ConsumerSpec("L", "c", "lane.a", 2.0))["config"]
    assert (consumer["max_deliver"], consumer["max_ack_pending"], consumer["ack_wait"]) == (-1, -1, 2_000_000_000)


def test_bodies():
    """Reads start at 1 at the earliest, pulls expire in nanoseconds, a nak tells its delay."""
    assert msgspec.json.decode(wire.read_body("a", 0, 5))["seq"] == 1
    assert msgspec.json.decode(wire.pull_body(3, 0.5)) == {"batch": 3, "expires": 500_000_000}
    assert wire.nak_body(0.0) == b"-NAK"
    assert wire.nak_body(1.5) == b'-NAK {"delay": 1500000000}'
