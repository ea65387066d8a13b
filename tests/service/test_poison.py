"""Messages that nobody could work on: they leave, are counted, and hurt no other reply."""

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from shared.messages import Dispatch, encode
from shared.tiers import Tier
from tests.service.serving_plane import MODEL, NAMES, Plane, eventually, plane


@pytest.fixture
async def region() -> AsyncIterator[Plane]:
    async with plane() as made:
        yield made


@pytest.mark.parametrize("reply_id", ["r1", "resp_elsewhere00" + "0" * 26, "a b.>"])
async def test_a_request_that_names_no_log_leaves_its_lane(region: Plane, reply_id: str):
    """It decodes, but no log can be read for it: dropped, and the router goes on with the next."""
    await region.replica()
    router = await region.router()
    good = region.request(await region.send(budget=4))
    poison = structs.replace(good, accepted=structs.replace(good.accepted, reply_id=reply_id))
    await region.bus.append(NAMES.lane_subject(Tier.FREE, MODEL, 0), encode(poison), timeout_s=1.0)
    reply = await region.send(budget=4)
    await region.ended(reply)
    await region.calm()
    assert not router.task.done()


async def test_a_fault_over_one_reply_ends_no_other(region: Plane, monkeypatch: pytest.MonkeyPatch):
    """An act that raises what nobody foresaw is counted; the router serves all other replies."""
    await region.replica()
    router = await region.router()
    hands = router.service._hands
    act, failed = hands.do, []

    async def clumsy(command, known=None):
        if not failed:
            failed.append(command)
            raise ValueError("nobody foresaw this")
        return await act(command, known)

    monkeypatch.setattr(hands, "do", clumsy)
    await region.send(budget=4)
    await eventually(lambda: failed, "the fault")
    await region.ended(await region.send(budget=4))
    assert not router.task.done()


async def test_a_dispatch_that_names_no_log_is_refused(region: Plane):
    """A replica refuses it as a bad request and serves on."""
    replica = await region.replica()
    await region.router()
    reply = await region.send(budget=4)
    await region.ended(reply)
    await region.bus.publish(NAMES.dispatch("replica-1"), _dispatch(region, reply))
    await region.ended(await region.send(budget=4))
    await region.calm()
    assert not replica.task.done()


def _dispatch(region: Plane, like: str) -> bytes:
    request = region.request(like)
    return encode(
        Dispatch(
            request=structs.replace(request, accepted=structs.replace(request.accepted, reply_id="r1")),
            attempt=1,
            open_seq=1,
            written=b"",
            router="router-1",
            ack_subject="",
            deadline_left_s=10.0,
        )
    )
