"""Queuing may be done again by anyone: what stands in the log decides."""

import dataclasses

import msgspec
import pytest

from services.conversation.queueing import Queueing
from shared import clock
from shared.bus.memory import MemoryServer
from shared.errors import RefusedError
from shared.log_store import LogStore
from shared.messages import (
    Accepted,
    End,
    Entry,
    GenerateRequest,
    Open,
    RequestEcho,
    Sampling,
    decoder,
    encode,
)
from shared.outcomes import EndReason, RefusalKind
from shared.subjects import Names
from shared.tiers import Tier
from shared.topology import topology

NAMES = Names()
SUBJECT = NAMES.lane_subject(Tier.FREE, "m", 0)
LANE = NAMES.lane_stream(Tier.FREE)


class Place:
    """A bus with its streams, the logs on it, and what its lane holds."""

    def __init__(self, *, lane_max: int = 10) -> None:
        self.server = MemoryServer()
        self.bus = self.server.bus()
        self.logs = LogStore(self.bus, NAMES)
        self._lane_max = lane_max

    async def start(self) -> "Place":
        streams, consumers = topology(NAMES, ["m"])
        sized = [
            dataclasses.replace(stream, max_messages=self._lane_max) if stream.name == LANE else stream
            for stream in streams
        ]
        await self.bus.apply(sized, consumers)
        return self

    async def lane(self) -> list[GenerateRequest]:
        found = await self.bus.read(LANE, SUBJECT, from_seq=1, most=100)
        return [decoder(GenerateRequest).decode(message.data) for message in found]

    async def write(self, reply: str, *entries: Entry) -> None:
        seq = (await self.logs.read(reply)).last_seq
        for entry in entries:
            seq = await self.logs.append(reply, seq, encode(entry))


def a_request(seed: int = 7) -> GenerateRequest:
    accepted = Accepted(
        reply_id=clock.new_reply_id("local", 0),
        org="o",
        user="u",
        created_s=1.0,
        model="m",
        tier=Tier.FREE,
        budget=9,
        seed=seed,
        input_tokens=1,
        deadline_s=600.0,
        echo=RequestEcho(),
    )
    return GenerateRequest(
        accepted=accepted, accepted_seq=0, prompt=b"", block_hashes=b"", sampling=Sampling(seed=seed)
    )


async def test_again_is_once() -> None:
    """The same request queued twice stands in the lane once, with the sequence of its `accepted`."""
    place, request = await Place().start(), a_request()
    queueing = Queueing(place.bus, place.logs)
    assert await queueing.queue(SUBJECT, request) is None
    assert await queueing.queue(SUBJECT, request) is None
    (queued,) = await place.lane()
    assert queued.accepted_seq == (await place.logs.read(request.reply_id)).accepted_seq


async def test_the_accepted_that_stands_counts() -> None:
    """When another had appended `accepted`, the request goes out with that one's seed: clients have seen it."""
    place, request = await Place().start(), a_request(seed=7)
    first = msgspec.structs.replace(request.accepted, seed=8)
    await place.write(request.reply_id, first)
    await Queueing(place.bus, place.logs).queue(SUBJECT, request)
    (queued,) = await place.lane()
    assert (queued.accepted, queued.sampling.seed) == (first, 8)


async def test_a_reply_that_runs_is_not_queued_again() -> None:
    """An `open` in the log says that the lane had it."""
    place, request = await Place().start(), a_request()
    opened = Open(attempt=1, replica="r", model_version="1", first_index=0)
    await place.write(request.reply_id, request.accepted, opened)
    assert await Queueing(place.bus, place.logs).queue(SUBJECT, request) is None
    assert await place.lane() == []


async def test_a_reply_that_has_ended_comes_back_whole() -> None:
    """No router will archive a reply that never was in a lane, so whoever queues it gets its end."""
    place, request = await Place().start(), a_request()
    await place.write(request.reply_id, request.accepted, End(reason=EndReason.USER_STOP, by="x", ended_s=2.0))
    ended = await Queueing(place.bus, place.logs).queue(SUBJECT, request)
    assert ended is not None
    assert (ended.reason, ended.ended_s) == (EndReason.USER_STOP, 2.0)
    assert await place.lane() == []


@pytest.mark.parametrize(("look_s", "remembered"), [(3600.0, True), (0.0, False)])
async def test_a_full_lane_is_remembered_for_a_moment(look_s: float, remembered: bool) -> None:
    """After a full lane the next is refused without any work, in that lane only, until it is time to look again."""
    place = await Place(lane_max=1).start()
    queueing = Queueing(place.bus, place.logs, look_s)
    queueing.check(Tier.FREE)
    await queueing.queue(SUBJECT, a_request())
    with pytest.raises(RefusedError) as caught:
        await queueing.queue(SUBJECT, a_request())
    assert caught.value.refusal.kind is RefusalKind.LANE_FULL
    queueing.check(Tier.PAID)
    if remembered:
        with pytest.raises(RefusedError):
            queueing.check(Tier.FREE)
    else:
        queueing.check(Tier.FREE)
