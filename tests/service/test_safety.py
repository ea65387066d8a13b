"""The safety service on the in-memory bus: what is flagged ends, or is taken back, and what is clean is left alone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import structlog

from services.safety.classifier import RuleClassifier
from services.safety.rules import CANARY, DEFAULT_RULES
from services.safety.service import SafetyService
from services.safety.settings import SafetySettings
from services.safety.verdicts import Rules
from shared import clock
from shared.bus.memory import MemoryServer
from shared.log_store import LogStore
from shared.messages import (
    Accepted,
    Cancel,
    Chunk,
    Done,
    End,
    Entry,
    Message,
    Open,
    Refused,
    RequestEcho,
    SafetyCheck,
    SafetyWatch,
    Verdict,
    WithdrawReply,
    decoder,
    encode,
    pack_ids,
)
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import Metrics
from shared.tiers import Tier
from shared.topology import topology

NAMES = Names("local")
PATIENCE_S = 20.0
_answer = decoder(Verdict | Done | Refused)  # type: ignore[arg-type]


class Region:
    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = self.server.bus()
        self.store = LogStore(self.bus, NAMES)

    async def begin(self) -> "Reply":
        reply = Reply(self, clock.new_reply_id("local", 2))
        await reply.append(
            Accepted(
                reply_id=reply.id,
                org="o",
                user="u",
                created_s=clock.wall_s(),
                model="m",
                tier=Tier.FREE,
                budget=4096,
                seed=1,
                input_tokens=3,
                deadline_s=600.0,
                echo=RequestEcho(),
            )
        )
        await reply.append(Open(attempt=1, replica="r1", model_version="1", first_index=0))
        return reply

    async def ask(self, subject: str, message: Message):
        return _answer.decode((await self.bus.request(subject, encode(message))).data)


class Reply:
    """Its log's writer."""

    def __init__(self, region: Region, reply_id: str) -> None:
        self.region, self.id = region, reply_id
        self.seq = self.tokens = 0

    async def append(self, entry: Entry) -> None:
        self.seq = await self.region.store.append(self.id, self.seq, encode(entry))

    async def write(self, text: str) -> None:
        self.tokens += 1
        await self.append(
            Chunk(attempt=1, first_index=self.tokens - 1, ids=pack_ids([1]), text=text, text_ends=(len(text),))
        )

    async def end(self, reason: EndReason = EndReason.STOP_TOKEN) -> None:
        await self.append(End(reason=reason, by="r1/1"))


async def eventually(holds: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


@asynccontextmanager
async def running(region: Region, **settings) -> AsyncIterator[SafetyService]:
    bus = region.server.bus()
    service = SafetyService(
        SafetySettings(name="safety-1", **settings),
        bus=bus,
        store=LogStore(bus, NAMES),
        classifier=RuleClassifier(Rules(DEFAULT_RULES)),
        metrics=Metrics(),
        log=structlog.get_logger(),
    )
    await service.start()
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for subscription in (service._checks_in, service._watches_in):
            await subscription.close()
        assert task.cancelled(), task
        await bus.close()


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.bus.apply(*topology(NAMES, ["m"]))
    yield made
    await made.bus.close()


@pytest.fixture
async def safety(region: Region) -> AsyncIterator[SafetyService]:
    async with running(region) as service:
        yield service


@asynccontextmanager
async def conversation(region: Region, answers: list[Message]) -> AsyncIterator[list[WithdrawReply]]:
    """A conversation service that is asked to withdraw; the last answer stands for all that follow."""
    heard: list[WithdrawReply] = []
    inbox = await region.bus.subscribe(NAMES.conversation("withdraw"), queue="conversation")

    async def serve() -> None:
        async for message in inbox:
            heard.append(decoder(WithdrawReply).decode(message.data))
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            await region.bus.publish(message.reply, encode(answer))

    task = asyncio.create_task(serve())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_check_says_what_the_rules_say(region, safety):
    """A flagged text gets its category, an ordinary one a clean verdict, on both stages."""
    for stage in ("input", "output"):
        verdict = await region.ask(NAMES.safety_check, SafetyCheck(stage=stage, text=f"please, {CANARY}."))
        assert verdict == Verdict(flagged=True, category="canary", rule="canary")
        assert await region.ask(NAMES.safety_check, SafetyCheck(stage=stage, text="hello")) == Verdict(flagged=False)


@pytest.mark.parametrize("cut", range(1, len(CANARY), 4))
async def test_a_phrase_split_over_chunks_ends_the_reply(region, safety, cut):
    """Wherever a phrase is cut, the reply ends as `safety` with its category, and the replica is told."""
    cancels = await region.bus.subscribe(NAMES.cancel("*"))
    reply = await region.begin()
    assert await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id)) == Done()
    await reply.write("Well: " + CANARY[:cut])
    await reply.write(CANARY[cut:] + ". And")
    cancel = await cancels.next(PATIENCE_S)
    assert cancel is not None
    assert decoder(Cancel).decode(cancel.data) == Cancel(reply_id=reply.id, reason=EndReason.SAFETY)
    view = await region.store.read(reply.id)
    assert view.ended is not None
    assert (view.ended.reason, view.ended.detail, view.ended.by) == (EndReason.SAFETY, "canary", "safety-1")


async def test_a_clean_reply_is_left_alone(region, safety):
    """A reply without a flagged phrase is read to its end, and then nothing of it stays here."""
    reply = await region.begin()
    await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id))
    for _ in range(300):
        await reply.write("A canary is a bird. ")
    await reply.end()
    await eventually(lambda: not safety._watches, "the watch is over")
    view = await region.store.read(reply.id)
    assert view.ended is not None
    assert view.ended.reason is EndReason.STOP_TOKEN


async def test_a_flag_after_the_end_withdraws_the_reply(region, safety):
    """Text that is flagged once the reply has ended is taken back, again and again until conversation has done it."""
    reply = await region.begin()
    for text in ("It is ", CANARY):
        await reply.write(text)
    await reply.end()
    not_yet = Refused(refusal=Refusal(kind=RefusalKind.NOT_FOUND, message="not stored yet"))
    async with conversation(region, [not_yet, Done()]) as heard:
        await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id))
        await eventually(lambda: not safety._watches, "the watch is over")
    assert heard == [WithdrawReply(reply_id=reply.id, category="canary", shown_tokens=2)] * 2
    view = await region.store.read(reply.id)
    assert view.ended is not None
    assert view.ended.reason is EndReason.STOP_TOKEN


async def test_a_reply_that_another_ended_for_safety_is_not_withdrawn(region, safety):
    """When the replica's own last check has ended it, there is nothing more to do."""
    reply = await region.begin()
    await reply.write(CANARY)
    await reply.end(EndReason.SAFETY)
    async with conversation(region, [Done()]) as heard:
        await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id))
        await eventually(lambda: not safety._watches, "the watch is over")
    assert heard == []


async def test_a_reply_is_watched_once(region, safety):
    """A second attempt asks for a second watch: one is enough."""
    reply = await region.begin()
    for _ in range(3):
        assert await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id)) == Done()
    assert list(safety._watches) == [reply.id]


async def test_past_its_bound_a_watch_is_refused(region):
    """A bounded number of replies is watched; what is refused is said, and counted."""
    async with running(region, watches_max=1):
        first, second = await region.begin(), await region.begin()
        assert await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=first.id)) == Done()
        answer = await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=second.id))
        assert isinstance(answer, Refused)
        assert answer.refusal.kind is RefusalKind.UNAVAILABLE


async def test_a_purged_log_ends_its_watch(region, safety):
    """A deleted reply is no longer watched, and the service goes on."""
    reply = await region.begin()
    await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id))
    await reply.write("hello")
    await region.store.purge(reply.id)
    await eventually(lambda: not safety._watches, "the watch is over")
    assert await region.ask(NAMES.safety_check, SafetyCheck(stage="input", text="hello")) == Verdict(flagged=False)


async def test_a_drained_service_hands_its_watches_on(region):
    """The watches of an instance that leaves go to another one, which reads the reply from its start."""
    reply = await region.begin()
    async with running(region) as leaving:
        await region.ask(NAMES.safety_watch, SafetyWatch(reply_id=reply.id))
        await reply.write(CANARY[:7])
        async with running(region) as staying:
            await leaving.drain(5.0)
            await eventually(lambda: reply.id in staying._watches, "the other one watches")
            await reply.write(CANARY[7:] + ".")
            await eventually(lambda: not staying._watches, "the watch is over")
    view = await region.store.read(reply.id)
    assert view.ended is not None
    assert view.ended.reason is EndReason.SAFETY


async def test_garbage_harms_nobody(region, safety):
    """Undecodable messages and ids that are none do not stop the service."""
    for subject in (NAMES.safety_check, NAMES.safety_watch):
        await region.bus.publish(subject, b"\xc1")
    assert isinstance(await region.ask(NAMES.safety_watch, SafetyWatch(reply_id="resp_>")), Refused)
    assert await region.ask(NAMES.safety_check, SafetyCheck(stage="input", text="hello")) == Verdict(flagged=False)
