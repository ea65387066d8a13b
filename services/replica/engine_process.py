"""The engine in a process of its own, seen from asyncio. What a replica's bus shell uses, whole:

    engine = EngineHandle()
    ready = await engine.start(EngineConfig(model_file="stub", stub_tps=50.0))   raises ConfigError, EngineError
    taken = engine.submit(SubmitSequence(sequence_id="resp_…#1", tier=…, prompt=pack_ids(…), budget=64, sampling=…))
    engine.cancel("resp_…#1")                                   answered by one FreedSequence in a later report
    for report in await engine.reports(timeout_s=1.0): …        StepReport: tokens, freed, refused, stored, evicted
    engine.stats, engine.step_age_s(), engine.step_predicted_s()     read without waiting
    await engine.stop()

After `submit` returned True exactly one of these ends a sequence: a SequenceTokens with `finish`, a SequenceRefused,
or, when it was cancelled, a FreedSequence. One may also follow a `finish`: the cancel came later; ignore it.
The types are in `engine_messages`. When the process dies, `reports` raises EngineError, and goes on doing so.

    parent                                   child (engine_main)
      EngineHandle ══ socket: frames ══════════ step loop
             │ ─ ─ ─ shared marker ─ ─ ─ ─ ─ ─ ─ ─ │ "a step began at …"
             └────── its standard input ─────────── thread that waits for its end: dies with the parent
"""

import asyncio
import contextlib
import mmap
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import msgspec

from services.replica.engine_messages import (
    MARKER,
    CancelSequence,
    EngineConfig,
    EngineFailed,
    EngineReady,
    EngineStarting,
    EngineStats,
    FrameBuffer,
    FromEngine,
    StepReport,
    StopEngine,
    SubmitSequence,
    frame,
)
from shared.clock import now_s
from shared.errors import ConfigError, EngineError
from shared.limits import ENGINE_REPORTS_MAX, ENGINE_START_S, ENGINE_STOP_S, STUCK_STEP_FACTOR

_ROOT = Path(__file__).resolve().parents[2]
# Torch's threads wait for each other between operations, some hundred times a step: to sleep each time costs a third of
# their speed, to spin for as long as they like costs the others on a busy machine more. So many turns are about 0.2 ms.
QUIET_THREADS = {"GOMP_SPINCOUNT": "20000"}
_EXIT_S = 1.0  # a process whose socket closed is gone within this
_STUCK_S_MIN = 1.0  # a short step on a busy machine is not stuck


class EngineHandle:
    """One engine process. Used from one event loop; `start` once."""

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self.exit_status: int | None = None  # of the process, once it is gone; negative: killed by that signal
        self._clock = clock
        self._link = _Link()
        self._process: asyncio.subprocess.Process | None = None
        self._marker: mmap.mmap | None = None
        self._ready: EngineReady | None = None
        self._unended: set[str] = set()
        self._places = 0

    # --- life --------------------------------------------------------------------------------------------

    async def start(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[EngineStarting], None] | None = None,
        timeout_s: float = ENGINE_START_S,
    ) -> EngineReady:
        """Start the process and wait until it is warm. Raises ConfigError (a file or setting is wrong) or EngineError.

        `on_progress` hears of each phase. Whatever goes wrong, cancellation included, no process is left.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn()
                self._link.send(config)
                self._ready = await self._until_ready(on_progress or (lambda _: None))
        except TimeoutError as error:
            await self._kill()
            raise EngineError(f"the engine was not ready after {timeout_s:.0f} s") from error
        except BaseException:
            await self._kill()
            raise
        self._places = config.running_max + config.waiting_max
        return self._ready

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            await self._exec(theirs)
            await asyncio.get_running_loop().create_connection(lambda: self._link, sock=ours)
        except BaseException:
            ours.close()
            raise

    async def _exec(self, theirs: socket.socket) -> None:
        with tempfile.TemporaryFile() as memory, theirs:
            memory.truncate(mmap.PAGESIZE)
            self._marker = mmap.mmap(memory.fileno(), MARKER.size)
            paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.replica.engine_main",
                str(theirs.fileno()),
                str(memory.fileno()),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(), memory.fileno()),
                env={**QUIET_THREADS, **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    async def _until_ready(self, on_progress: Callable[[EngineStarting], None]) -> EngineReady:
        while True:
            await self._link.wait()
            for message in self._link.take():
                if isinstance(message, EngineReady):
                    return message
                if isinstance(message, EngineStarting):
                    on_progress(message)
                if isinstance(message, EngineFailed):
                    raise (ConfigError if message.config else EngineError)(message.detail)
            if self._link.lost:
                raise await self._death("the engine process ended while it started")

    async def stop(self, timeout_s: float = ENGINE_STOP_S) -> None:
        """Ask it to end, and end it when it does not; idempotent."""
        if self._process is None:
            return
        self._link.discard()
        self._link.send(StopEngine())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)
        await self._kill()

    async def _kill(self) -> None:
        """No process is left afterwards, whoever is cancelled meanwhile."""
        process, self._process = self._process, None
        self._link.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            self.exit_status = await asyncio.shield(process.wait())
        if self._marker is not None:
            self._marker.close()
            self._marker = None

    async def _death(self, what: str) -> EngineError:
        """The error that says how the process ended."""
        failed = self._link.failed
        if failed is not None:
            return EngineError(f"the engine failed: {failed.detail}")
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self._process.wait(), _EXIT_S)
        return EngineError(what if code is None else f"{what} (exit status {code})")

    # --- sequences ---------------------------------------------------------------------------------------

    def submit(self, sequence: SubmitSequence) -> bool:
        """Hand a sequence over; False when as many as the engine may hold are there already, or it is gone."""
        if len(self._unended) >= self._places or not self.alive:
            return False
        self._unended.add(sequence.sequence_id)
        self._link.send(sequence)
        return True

    def cancel(self, sequence_id: str) -> None:
        """It leaves at the engine's next step; a FreedSequence says when. Idempotent; unknown ids are answered too."""
        self._link.send(CancelSequence(sequence_id=sequence_id))

    async def reports(self, timeout_s: float) -> list[StepReport]:
        """All reports that came, oldest first; waits for one at most `timeout_s`, then []. EngineError: it is gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._link.wait()
        reports = [message for message in self._link.take() if isinstance(message, StepReport)]
        for report in reports:
            self._unended.difference_update(tokens.sequence_id for tokens in report.tokens if tokens.finish)
            self._unended.difference_update(freed.sequence_id for freed in report.freed)
            self._unended.difference_update(refused.sequence_id for refused in report.refused)
        if not reports and self._link.lost:
            raise await self._death("the engine process ended")
        return reports

    async def __aiter__(self) -> AsyncIterator[StepReport]:
        """Reports for ever, one by one, until the engine is gone (EngineError)."""
        while True:
            for report in await self.reports(timeout_s=3600.0):
                yield report

    # --- read without waiting ----------------------------------------------------------------------------

    @property
    def ready(self) -> EngineReady:
        """What `start` returned."""
        if self._ready is None:
            raise EngineError("the engine was not started")
        return self._ready

    @property
    def alive(self) -> bool:
        return self._ready is not None and self._process is not None and not self._link.lost

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def unended(self) -> int:
        """Sequences submitted and, as far as taken reports tell, not ended."""
        return len(self._unended)

    @property
    def stats(self) -> EngineStats:
        """As of the newest report that came, taken or not; before the first step: all free."""
        if self._link.stats is not None:
            return self._link.stats
        ready = self.ready
        total = ready.blocks_total
        return EngineStats(
            blocks_total=total, blocks_free=total, running=0, waiting=0, waiting_tokens={}, step=ready.step
        )

    def step_age_s(self) -> float:
        """How long the running step has been running; 0.0 when none is."""
        began, _ = self._mark()
        return max(0.0, self._clock() - began) if began else 0.0

    def step_predicted_s(self) -> float:
        """How long the running step should take; 0.0 when none is."""
        return self._mark()[1]

    @property
    def stuck(self) -> bool:
        """The running step takes far longer than predicted: the replica is not healthy."""
        return self.step_age_s() > max(_STUCK_S_MIN, STUCK_STEP_FACTOR * self.step_predicted_s())

    def _mark(self) -> tuple[float, float]:
        if self._marker is None:
            return 0.0, 0.0
        began, predicted_s = MARKER.unpack_from(self._marker)
        return began, predicted_s


class _Link(asyncio.BufferedProtocol):
    """The socket's asyncio side: frames in, into a bounded inbox; when it is full the engine is held back."""

    def __init__(self) -> None:
        self.lost = False
        self.failed: EngineFailed | None = None
        self.stats: EngineStats | None = None
        self._inbox: deque[FromEngine] = deque()  # bounded by pausing the reading
        self._something = asyncio.Event()
        self._frames = FrameBuffer()
        self._buffer = bytearray(1 << 16)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._discarding = False

    def send(self, message: EngineConfig | SubmitSequence | CancelSequence | StopEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    async def wait(self) -> None:
        """Until there is something to take, or the process is gone."""
        await self._something.wait()

    def take(self) -> list[FromEngine]:
        taken = list(self._inbox)
        self._inbox.clear()
        if not self.lost:
            self._something.clear()
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return taken

    def discard(self) -> None:
        """Nobody will take anything any more: an engine held back must not stay held."""
        self._discarding = True
        self.take()

    def close(self) -> None:
        self.lost = True
        self._something.set()
        if self._transport is not None:
            self._transport.close()

    # asyncio calls these
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        for body in self._frames.feed(bytes(memoryview(self._buffer)[:nbytes])):
            message = self._decoder.decode(body)
            if isinstance(message, StepReport):
                self.stats = message.stats
            if isinstance(message, EngineFailed):
                self.failed = message
            if not self._discarding:
                self._inbox.append(message)
        if self._inbox:
            self._something.set()
        if len(self._inbox) >= ENGINE_REPORTS_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = True
        self._something.set()
