"""A stop is a stop whenever it comes: phase x cause x door x how often, on the whole of Chorus (scripted replicas).

phase   queued | prefill | first token | in the middle | a moment before its last token | after its end
cause   the stop button (once, twice at once, from the other gateway) | a newer message | the client left |
        its conversation was deleted
door    streamed | whole (one answer at the end) | background
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from ops.reach import operator_bus, reach_of
from shared.bus import Bus
from shared.messages import Chunk, SequencedEntry
from shared.outcomes import EndReason
from tests.drill.follower import stop
from tests.drill.observer import blocks_are_back, ends, lanes_empty, opens, read_log
from tests.drill.wire import Answer, CutError, ask
from tests.integration.system import System, running

pytestmark = pytest.mark.timeout(240)

TPS = 4.0  # slow enough to meet each phase: a step takes 250 ms, prefill is the first of them
ROOM = 24  # sequences a replica runs at once
TOKENS = 8  # of each reply
TOKENS_LEFT = 60  # of one that its client leaves: it is ended long before
ENVIRONMENT = {"CHORUS_RUNNING_MAX": str(ROOM), "CHORUS_IDLE_END_S": "1.5", "CHORUS_PRESENCE_S": "0.4"}

Log = Sequence[SequencedEntry]


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    flags = ("--stub", "--stub-tps", f"{TPS:g}", "--replicas", "1")
    with running(tmp_path_factory.mktemp("cancel") / "data", *flags, environment=ENVIRONMENT) as system:
        yield system


def tokens_of(log: Log) -> int:
    return sum(item.entry.count for item in log if isinstance(item.entry, Chunk))


def text_of(log: Log) -> str:
    return "".join(item.entry.text for item in log if isinstance(item.entry, Chunk))


PHASES: dict[str, Callable[[Log], bool]] = {
    "queued": lambda log: len(log) > 0,  # every place is taken: it waits at a router, or in its replica's short queue
    "prefill": lambda log: len(opens(log)) > 0,
    "first": lambda log: tokens_of(log) >= 1,
    "middle": lambda log: tokens_of(log) >= TOKENS // 2,
    "last": lambda log: tokens_of(log) >= TOKENS - 1,
    "ended": lambda log: len(ends(log)) > 0,
}
CAUSES = {
    "once": EndReason.USER_STOP,
    "twice": EndReason.USER_STOP,
    "elsewhere": EndReason.USER_STOP,
    "newer": EndReason.SUPERSEDED,
    "left": EndReason.IDLE,
    "deleted": None,  # nothing is left to look at
}
DOORS = ("streamed", "whole", "background")


@dataclass(frozen=True)
class Case:
    phase: str
    cause: str
    door: str

    @property
    def possible(self) -> bool:
        """Nobody waits for a background reply, and after the end there is nobody to leave."""
        return self.cause != "left" or (self.door != "background" and self.phase not in {"last", "ended"})


@dataclass
class Desk:
    """One user's two gateways, and the token logs from behind."""

    gateways: list[str]
    key: str
    bus: Bus

    async def call(self, gateway: int, method: str, path: str, body: object = None) -> Any:
        answer = await ask(self.gateways[gateway], method, path, self.key, body)
        try:
            said = await answer.json()
        finally:
            answer.close()
        assert answer.status == 200, (method, path, said)
        return said

    async def until(self, reply_id: str, condition: Callable[[Log], bool], what: str) -> Log:
        """The log, once it is so."""
        try:
            async with asyncio.timeout(20):
                while not condition(log := await read_log(self.bus, reply_id)):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not in time: {what}") from None
        return log


@asynccontextmanager
async def desk(chorus: System) -> AsyncIterator[Desk]:
    async with operator_bus(reach_of(chorus.data, os.environ)) as bus:
        yield Desk(chorus.gateways, chorus.key(), bus)


@dataclass
class Reader:
    """The client that asked; what it was told last."""

    answer: Answer | None = None
    status: str = ""
    closings: int = 0

    def close(self) -> None:
        if self.answer is not None:
            self.answer.close()

    async def read(self, at: Desk, body: dict[str, Any], door: str) -> None:
        more = {"streamed": {"stream": True}, "whole": {}, "background": {"background": True}}[door]
        self.answer = await ask(at.gateways[0], "POST", "/v1/responses", at.key, {**body, **more})
        assert self.answer.status == 200
        if door != "streamed":
            self.status = (await self.answer.json())["status"]
            return
        async for event in self.answer.events():
            if event.type in {"response.completed", "response.incomplete", "response.failed"}:
                self.closings += 1
                self.status = (event.response or {})["status"]


def message(conversation: str, tokens: int = TOKENS) -> dict[str, Any]:
    return {"model": "stub", "input": "Plan a day", "max_output_tokens": tokens, "conversation": conversation}


async def started(at: Desk, case: Case, reader: Reader) -> tuple[str, str, asyncio.Task[None]]:
    """A reply in a conversation of its own: (conversation, reply, the client's task)."""
    conversation = (await at.call(0, "POST", "/v1/conversations", {}))["id"]
    tokens = TOKENS_LEFT if case.cause == "left" else TOKENS
    reading = asyncio.create_task(reader.read(at, message(conversation, tokens), case.door))
    async with asyncio.timeout(10):
        while (found := (await at.call(1, "GET", f"/v1/conversations/{conversation}"))["head"]) is None:
            await asyncio.sleep(0.01)
    return conversation, found, reading


async def act(
    at: Desk, case: Case, conversation: str, reply_id: str, reader: Reader, reading: asyncio.Task[None]
) -> None:
    """What ends the reply."""
    if case.cause in {"once", "twice", "elsewhere"}:
        gateways = {"once": [0], "twice": [0, 0], "elsewhere": [1]}[case.cause]
        statuses = await asyncio.gather(*(stop(at.gateways[number], at.key, reply_id) for number in gateways))
        assert set(statuses) == {200}
    elif case.cause == "newer":
        await at.call(1, "POST", "/v1/responses", {**message(conversation, 1), "background": True})
    elif case.cause == "deleted":
        await at.call(1, "DELETE", f"/v1/conversations/{conversation}")
    else:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        reader.close()


async def play(at: Desk, case: Case) -> None:
    """One case: the reply ends once, for the right reason, and all who ask are told the same."""
    reader = Reader()
    try:
        conversation, reply_id, reading = await started(at, case, reader)
        await at.until(reply_id, PHASES[case.phase], f"{case} is in its phase")
        await act(at, case, conversation, reply_id, reader, reading)
        if case.cause == "deleted":
            await gone(at, conversation, reply_id)
        else:
            await ended(at, case, reply_id)
        await asyncio.wait_for(asyncio.gather(reading, return_exceptions=True), 10)
        if reading.cancelled():
            return
        if (error := reading.exception()) is not None:
            # Of a deleted reply nothing may be left to tell.
            assert case.cause == "deleted", error
            assert isinstance(error, CutError | AssertionError), error
        elif case.door == "streamed":
            assert reader.closings == 1
    finally:
        reader.close()


async def ended(at: Desk, case: Case, reply_id: str) -> None:
    log = await at.until(reply_id, lambda log: len(ends(log)) > 0, f"{case} ends")
    (end,) = ends(log)
    assert log[-1].entry == end, "nothing is written after the end"
    natural = end.reason is EndReason.MAX_TOKENS
    if case.phase == "ended":
        assert natural, "what has ended stays as it is"
    elif not (natural and case.phase == "last"):  # there the two race, and either is right
        assert end.reason is CAUSES[case.cause]
    if case.phase == "queued":
        assert not tokens_of(log), "nothing was computed for it"
    stored = await at.call(1, "GET", f"/v1/responses/{reply_id}")
    assert stored["status"] == ("incomplete" if natural else "cancelled")
    assert "".join(part["text"] for item in stored["output"] for part in item["content"]) == text_of(log)


async def gone(at: Desk, conversation: str, reply_id: str) -> None:
    """Deleted: the conversation is unknown, and so is its reply, on both gateways."""
    for number in (0, 1):
        for path in (f"/v1/conversations/{conversation}", f"/v1/responses/{reply_id}"):
            answer = await ask(at.gateways[number], "GET", path, at.key)
            await answer.body()
            answer.close()
            assert answer.status == 404


async def play_all(chorus: System, phase: str) -> None:
    cases = [Case(phase, cause, door) for cause, door in itertools.product(CAUSES, DOORS)]
    async with AsyncExitStack() as stack:
        at = await stack.enter_async_context(desk(chorus))
        if phase == "queued":
            await stack.enter_async_context(full_house(at))
        possible = [case for case in cases if case.possible]
        outcomes = await asyncio.gather(*(play(at, case) for case in possible), return_exceptions=True)
    wrong = [f"{case}: {type(out).__name__} {out}" for case, out in zip(possible, outcomes, strict=True) if out]
    assert not wrong, "\n".join(wrong)


@asynccontextmanager
async def full_house(at: Desk) -> AsyncIterator[None]:
    """Every place of the replica is taken by a long reply, until the block ends."""
    body = {"model": "stub", "input": "Long", "max_output_tokens": 2000, "background": True}
    taken = [await at.call(0, "POST", "/v1/responses", body) for _ in range(ROOM)]
    try:
        for reply in taken:
            await at.until(reply["id"], PHASES["first"], "the long replies run")
        yield
    finally:
        for reply in taken:
            await stop(at.gateways[0], at.key, reply["id"])


@pytest.mark.parametrize("phase", PHASES)
def test_stops_in_this_phase(chorus: System, phase: str) -> None:
    """One end for the right reason, the partial text kept, blocks and lanes back to where they were."""
    asyncio.run(play_all(chorus, phase))
    blocks_are_back(chorus)
    lanes_empty(chorus)
