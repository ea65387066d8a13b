"""Routers and replicas in one process on the in-memory bus, each replica with a real scheduler over scripted tokens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.scheduler import Scheduler, SchedulerLimits
from services.replica.core.step_fit import StepSample, StepTimes
from services.replica.engine import Engine
from services.replica.engine_messages import (
    CancelSequence,
    Command,
    EngineConfig,
    EngineReady,
    EngineStats,
    StepReport,
    SubmitSequence,
)
from services.replica.service import ReplicaService
from services.replica.settings import ReplicaSettings
from services.replica.stub_runner import STUB_VERSION, StubRunner, scripted_token
from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared import clock
from shared.blocks import block_hashes
from shared.bus import Bus
from shared.bus.memory import MemoryServer
from shared.catalog import Catalog, ModelCard
from shared.errors import EngineError
from shared.log_store import LogStore
from shared.messages import (
    Accepted,
    Cancel,
    End,
    EndedReply,
    GenerateRequest,
    JournalRecord,
    Presence,
    RequestEcho,
    SafetyCheck,
    Sampling,
    UsageRecord,
    Verdict,
    decoder,
    encode,
    pack_ids,
    unpack_ids,
)
from shared.outcomes import EndReason
from shared.subjects import Names, user_bucket
from shared.telemetry import Metrics
from shared.tiers import Tier
from shared.token_log import LogView
from shared.tokenizer import load_tokenizer
from shared.topology import topology

NAMES = Names("local")
MODEL = "stub"
CATALOG = Catalog(models=(ModelCard(id=MODEL, file="stub", context_tokens=8192, output_tokens_max=4096),))
PATIENCE_S = 20.0
_CHECK_S = 0.005
TOKENIZER = load_tokenizer("stub")
VOCABULARY = Vocabulary(TOKENIZER.token_bytes, TOKENIZER.stop_ids)

_ended, _usage, _journal = decoder(EndedReply), decoder(UsageRecord), decoder(JournalRecord)


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Until `condition()` is true, or fail after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(_CHECK_S)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


class _NoMarker:
    def begin(self, now: float, predicted_s: float) -> None: ...

    def end(self) -> None: ...


class PlaceEngine:
    """The engine port without a process: steps when it is asked for reports, as far as `allowed` steps go."""

    def __init__(self, *, running_max: int = 8, blocks: int = 512, step_s: float = 0.001) -> None:
        self.allowed = float("inf")
        self.dead = False
        self.stuck = False
        self.full = False
        self.step_s = step_s
        self.submitted: list[SubmitSequence] = []
        self._commands: list[Command] = []
        self._wake = asyncio.Event()
        self._scheduler = Scheduler(
            pool=BlockPool(blocks),
            vocabulary=VOCABULARY,
            limits=SchedulerLimits(
                running_max=running_max,
                waiting_max=64,
                step_tokens_max=256,
                mixed_tokens_max=64,
                reserve_blocks=0,
                context_max=8192,
            ),
        )
        runner = StubRunner(tps=0, blocks_total=blocks, context_max=8192)
        times = StepTimes([StepSample(1, 1, step_s)])
        self._engine = Engine(
            scheduler=self._scheduler, runner=runner, step_times=times, marker=_NoMarker(), clock=clock.now_s
        )
        self.ready = EngineReady(
            model_name="stub",
            model_version=STUB_VERSION,
            tokenizer_revision="",
            vocab_size=len(VOCABULARY),
            blocks_total=blocks,
            context_max=8192,
            running_max=running_max,
            step=times.model,
            phases_s={},
            step_tokens=256,
            mixed_tokens=64,
        )
        self.stats: EngineStats = self._engine.stats()

    def allow(self, steps: float) -> None:
        self.allowed = steps
        self._wake.set()

    def die(self) -> None:
        self.dead = True
        self._wake.set()

    def check(self) -> None:
        """Audit; and nothing is held when nobody is there."""
        self._scheduler.check()
        assert self._engine.idle
        assert self._scheduler.load().blocks_free == self.stats.blocks_total

    async def start(self, config: EngineConfig, *, on_progress: object = None) -> EngineReady:
        return self.ready

    async def stop(self) -> None:
        self.dead = True

    @property
    def alive(self) -> bool:
        return not self.dead

    def submit(self, sequence: SubmitSequence) -> bool:
        if self.full or self.dead:
            return False
        self.submitted.append(sequence)
        self._commands.append(sequence)
        self._wake.set()
        return True

    def cancel(self, sequence_id: str) -> None:
        self._commands.append(CancelSequence(sequence_id=sequence_id))
        self._wake.set()

    async def reports(self, timeout_s: float) -> list[StepReport]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.dead:
                    only_cancels = self._commands and all(isinstance(c, CancelSequence) for c in self._commands)
                    if (self._commands or not self._engine.idle) and (self.allowed > 0 or only_cancels):
                        await asyncio.sleep(self.step_s)
                        return self._step()
                    self._wake.clear()
                    await self._wake.wait()
        if self.dead:
            raise EngineError("the engine process ended")
        return []

    def _step(self) -> list[StepReport]:
        commands, self._commands = self._commands, []
        self.allowed -= 1
        report = self._engine.step(commands)
        if report is None:
            return []
        self.stats = report.stats
        return [report]

    def step_age_s(self) -> float:
        return 60.0 if self.stuck else 0.0

    def step_predicted_s(self) -> float:
        return 0.001 if self.stuck else 0.0


@dataclass
class Running:
    """A service in this process, with its own connection."""

    service: RouterService | ReplicaService
    bus: Bus
    task: asyncio.Task[None]
    engine: PlaceEngine | None = None

    async def kill(self) -> None:
        """Gone without a word, as by SIGKILL."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.bus.close()


class Plane:
    """A region: its server, what was sent, and what became of it."""

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server or MemoryServer()
        self.running: dict[str, Running] = {}
        self.flagged = False
        self._prompts: dict[str, GenerateRequest] = {}

    async def connect(self, user: str) -> Bus:
        """A connection for a service; on a real server as its own user."""
        return self.server.bus()

    async def apply(self) -> "Plane":
        """The test's own connection, and an empty region."""
        self.bus = await self.connect("ops")
        self.store = LogStore(self.bus, NAMES)
        await self.bus.apply(*topology(NAMES, [MODEL]))
        return self

    async def router(self, name: str = "router-1", **settings) -> Running:
        bus = await self.connect("router")
        made = RouterService(
            RouterSettings(name=name, catalog=__file__, **settings), CATALOG, bus, Metrics(), structlog.get_logger()
        )
        return await self._run(name, made, bus)

    async def replica(self, name: str = "replica-1", *, engine: PlaceEngine | None = None, **settings) -> Running:
        bus, engine = await self.connect("replica"), engine or PlaceEngine()
        made = ReplicaService(
            ReplicaSettings(name=name, model=MODEL, stub=True, **settings),
            bus,
            engine,
            Metrics(),
            structlog.get_logger(),
        )
        return await self._run(name, made, bus, engine)

    async def _run(
        self, name: str, service: RouterService | ReplicaService, bus: Bus, engine: PlaceEngine | None = None
    ) -> Running:
        await service.start()
        running = Running(service, bus, asyncio.create_task(service.run(), name=name), engine)
        self.running[name] = running
        return running

    async def safety(self) -> None:
        """Answers output checks: fine, unless `flagged`."""
        async for message in await self.bus.subscribe(NAMES.safety_check, queue="safety"):
            assert decoder(SafetyCheck).decode(message.data).stage == "output"
            verdict = Verdict(flagged=self.flagged, category="violence" if self.flagged else "")
            await self.bus.publish(message.reply, encode(verdict))

    # --- a person's side --------------------------------------------------------------------------------------

    async def send(
        self,
        *,
        tokens: int = 40,
        budget: int = 24,
        tier: Tier = Tier.FREE,
        user: str = "u",
        background: bool = False,
        deadline_s: float = 600.0,
        like: str | None = None,
    ) -> str:
        """A message as conversation queues it, with the prompt of reply `like` if given; returns the reply id."""
        reply = clock.new_reply_id("local", 1)
        prompt = [(7 * n + len(self._prompts)) % 200 for n in range(tokens)]
        if like is not None:
            prompt = unpack_ids(self._prompts[like].prompt)
        accepted = Accepted(
            reply_id=reply,
            org="o",
            user=user,
            created_s=clock.wall_s(),
            model=MODEL,
            tier=tier,
            budget=budget,
            seed=len(self._prompts) + 1,
            input_tokens=tokens,
            deadline_s=deadline_s,
            echo=RequestEcho(background=background),
        )
        seq = await self.store.append(reply, 0, encode(accepted))
        request = GenerateRequest(
            accepted=accepted,
            accepted_seq=seq,
            prompt=pack_ids(prompt),
            block_hashes=b"".join(block_hashes(prompt, b"stub")),
            sampling=Sampling(seed=accepted.seed, ignore_eos=True),
            domain=b"stub",
        )
        self._prompts[reply] = request
        subject = NAMES.lane_subject(tier, MODEL, user_bucket("o", user))
        await self.bus.append(subject, encode(request), message_id=reply, timeout_s=1.0)
        return reply

    async def cancel(self, reply: str, reason: EndReason = EndReason.USER_STOP) -> None:
        await self.store.end(reply, End(reason=reason, by="test"))
        await self.bus.publish(NAMES.cancel(reply), encode(Cancel(reply_id=reply, reason=reason)))

    async def present(self, reply: str) -> None:
        await self.bus.publish(NAMES.presence(reply), encode(Presence(reply_id=reply)))

    def request(self, reply: str) -> GenerateRequest:
        """What was queued for it."""
        return self._prompts[reply]

    def expected_ids(self, reply: str) -> list[int]:
        """What any attempt, anywhere, must write."""
        accepted = self._prompts[reply].accepted
        return [scripted_token(accepted.seed, position) for position in range(accepted.budget)]

    # --- what became of it ------------------------------------------------------------------------------------

    async def log(self, reply: str) -> LogView:
        return await self.store.read(reply)

    async def written(self, reply: str, tokens: int) -> LogView:
        """The log, once it holds `tokens` output tokens."""
        return await self._until(reply, lambda view: len(view.ids) >= tokens, f"{tokens} tokens of {reply}")

    async def opened(self, reply: str, attempt: int = 1) -> LogView:
        return await self._until(reply, lambda view: view.attempts >= attempt, f"attempt {attempt} of {reply}")

    async def _until(self, reply: str, true: Callable[[LogView], bool], what: str) -> LogView:
        async with _patience(what):
            while not true(view := await self.log(reply)):
                await asyncio.sleep(_CHECK_S)
        return view

    async def ended(self, reply: str) -> EndedReply:
        """The archived reply; there is exactly one, and it says what the log says."""
        async with _patience(f"the end of {reply}"):
            while not (kept := await self._kept(NAMES.ended_stream, NAMES.ended(reply))):
                await asyncio.sleep(_CHECK_S)
        assert len(kept) == 1
        reply_kept, view = _ended.decode(kept[0]), await self.log(reply)
        assert view.ended is not None
        assert (reply_kept.text, unpack_ids(reply_kept.ids)) == (view.text, view.ids)
        assert reply_kept.reason is view.ended.reason
        return reply_kept

    async def usage(self, reply: str) -> list[UsageRecord]:
        return [_usage.decode(data) for data in await self._kept(NAMES.usage_stream, NAMES.usage(reply))]

    async def journal(self, service: str, kind: str) -> list[JournalRecord]:
        kept = await self._kept(NAMES.journal_stream, NAMES.journal(service))
        return [record for record in map(_journal.decode, kept) if record.kind == kind]

    async def _kept(self, stream: str, subject: str) -> list[bytes]:
        return [message.data for message in await self.bus.read(stream, subject, from_seq=1, most=1000)]

    def deliveries(self, reply: str) -> int:
        """How often its lane message, still un-acked, was delivered."""
        for tier in Tier:
            stream = self.server.stream(NAMES.lane_stream(tier))
            for seq, entry in stream.entries.items():
                if decoder(GenerateRequest).decode(entry.data).reply_id == reply:
                    pending = [
                        consumer.pending[seq] for consumer in stream.consumers.values() if seq in consumer.pending
                    ]
                    return pending[0].delivered if pending else 0
        return 0

    def lane_left(self) -> int:
        """Messages in all lanes: what waits and what runs."""
        return sum(len(self.server.stream(NAMES.lane_stream(tier)).entries) for tier in Tier)

    async def calm(self) -> None:
        """Every lane message is acked, and no replica holds anything."""
        await eventually(lambda: self.lane_left() == 0, "empty lanes")
        for one in self.running.values():
            if one.engine is not None and not one.task.done():
                await eventually(
                    lambda one=one: one.engine.stats.blocks_free == one.engine.stats.blocks_total, "blocks"
                )
                one.engine.check()


@asynccontextmanager
async def _patience(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


@asynccontextmanager
async def plane(made: Plane | None = None) -> AsyncIterator[Plane]:
    """A region that is applied and empty; every service started in it is ended with it."""
    region = await (made or Plane()).apply()
    safety = asyncio.create_task(region.safety())
    try:
        yield region
    finally:
        tasks = [safety, *(one.task for one in region.running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in region.running.values():
            await one.bus.close()
        await region.bus.close()
