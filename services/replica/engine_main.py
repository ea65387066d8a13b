"""The engine's process: `python -m services.replica.engine_main SOCKET_FD MARKER_FD`, started by `engine_process`.

Its first frame is an EngineConfig. It reads, builds, warms up, says EngineReady, and steps until StopEngine, the end of
the socket, or the end of its standard input: the parent holds the other end and never writes, so its death is seen here
at once, also in the middle of a step.
"""

import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.replica.core.block_pool import BlockPool
from services.replica.core.detokenize import Vocabulary
from services.replica.core.scheduler import Scheduler, SchedulerLimits
from services.replica.core.step_fit import StepSample, StepTimes
from services.replica.engine import Engine, run_engine
from services.replica.engine_messages import (
    MARKER,
    Command,
    EngineConfig,
    EngineFailed,
    EngineReady,
    EngineStarting,
    FrameBuffer,
    StepReport,
    frame,
)
from services.replica.runner import Runner
from services.replica.stub_runner import StubRunner
from services.replica.warm_up import SHAPES, draw_test_token, settle_memory, step_budgets, step_clock, warm_up
from shared.catalog import STUB_FILE
from shared.clock import now_s
from shared.errors import ChorusError, ConfigError
from shared.tokenizer import Tokenizer, load_tokenizer

_RECEIVE_BYTES = 1 << 18
_STUB_BLOCKS = 4096
_STUB_STEP_TOKENS = 8192  # as a GPU would: prompts cost a scripted step nothing
_STUB_CONTEXT = 8192
_UNPACED_STEP_S = 1e-5
_RESERVE_SHARE = 32  # one block in this many is kept for growth
EXIT_ORPHANED = 3


class SocketPort:
    """The engine's end of the socket: inbox and outbox. A full socket holds the engine back."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(EngineConfig | Command)

    def take(self, *, wait: bool) -> list[Command]:
        return [message for message in self._receive(wait=wait) if not isinstance(message, EngineConfig)]

    def take_config(self) -> EngineConfig:
        while True:
            for message in self._receive(wait=True):
                if isinstance(message, EngineConfig):
                    return message

    def _receive(self, *, wait: bool) -> list[EngineConfig | Command]:
        messages: list[EngineConfig | Command] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the replica closed the socket")
            messages += map(self._decoder.decode, self._frames.feed(data))

    def put(self, report: StepReport) -> None:
        self.send(report)

    def send(self, message: EngineStarting | EngineReady | StepReport | EngineFailed) -> None:
        self._socket.sendall(frame(message))


class SharedMarker:
    """The running step's start, in memory that the shell reads."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, MARKER.size)

    def begin(self, now: float, predicted_s: float) -> None:
        MARKER.pack_into(self._memory, 0, now, predicted_s)

    def end(self) -> None:
        MARKER.pack_into(self._memory, 0, 0.0, 0.0)


@dataclass(frozen=True)
class Built:
    name: str
    runner: Runner
    pace: tuple[StepSample, ...] = ()  # what is known of its step time without measuring
    step_tokens_max: int = 0  # and of how much fits a step


Progress = Callable[[str, float, str], None]


def build(config: EngineConfig, tokenizer: Tokenizer, progress: Progress) -> Built:
    """The runner that the configuration asks for. numpy, and torch, are imported only when a model is to run."""
    if config.model_file == STUB_FILE:
        context = min(config.context_max or _STUB_CONTEXT, _STUB_CONTEXT)
        blocks = config.blocks or _STUB_BLOCKS
        stub = StubRunner(tps=config.stub_tps, blocks_total=blocks, context_max=context)
        step_s = 1.0 / config.stub_tps if config.stub_tps > 0 else _UNPACED_STEP_S
        pace = (StepSample(1, 1, step_s), StepSample(64, 8192, step_s))
        return Built(tokenizer.name, stub, pace, _STUB_STEP_TOKENS)
    from services.replica.model.load import load_runner  # noqa: PLC0415

    return Built(tokenizer.name, load_runner(config, tokenizer.vocab_size, progress))


def start(port: SocketPort, config: EngineConfig, marker: SharedMarker) -> Engine:
    """Read, build, warm up, each timed and told; the engine is ready when a test token was drawn."""
    phases: dict[str, float] = {}
    began = now_s()

    def progress(phase: str, share: float, detail: str = "") -> None:
        port.send(EngineStarting(phase=phase, share=share, detail=detail))

    def phase_over(phase: str) -> None:
        nonlocal began
        phases[phase] = now_s() - began
        began = now_s()
        progress(phase, 1.0)

    tokenizer = load_tokenizer(config.model_file)
    vocabulary = Vocabulary(tokenizer.token_bytes, tokenizer.stop_ids)
    phase_over("read")
    built = build(config, tokenizer, progress)
    info = built.runner.info
    phase_over("build")
    draw_test_token(built.runner, vocabulary, now_s)
    clock = step_clock(config.device, config.threads)
    step_times = StepTimes(built.pace or warm_up(built.runner, vocabulary, SHAPES, clock))
    phase_over("warm_up")
    asked = config.step_tokens_max or built.step_tokens_max
    alone, mixed = step_budgets(step_times.model, config.running_max, asked, config.mixed_tokens_max)
    reserve = info.blocks_total // _RESERVE_SHARE if config.reserve_blocks is None else config.reserve_blocks
    limits = SchedulerLimits(
        running_max=config.running_max,
        waiting_max=config.waiting_max,
        step_tokens_max=alone,
        mixed_tokens_max=mixed,
        reserve_blocks=reserve,
        context_max=info.context_max,
    )
    scheduler = Scheduler(pool=BlockPool(info.blocks_total), vocabulary=vocabulary, limits=limits)
    engine = Engine(scheduler=scheduler, runner=built.runner, step_times=step_times, marker=marker, clock=now_s)
    port.send(
        EngineReady(
            model_name=built.name,
            model_version=info.model_version,
            tokenizer_revision=tokenizer.revision,
            vocab_size=info.vocab_size,
            blocks_total=info.blocks_total,
            context_max=info.context_max,
            running_max=config.running_max,
            step=step_times.model,
            phases_s=phases,
            step_tokens=alone,
            mixed_tokens=mixed,
            cores=config.threads,
        )
    )
    return engine


def _die_with_parent() -> None:
    """Blocks on standard input for ever; its end is the parent's."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(socket_fd: int, marker_fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; the parent decides
    _die_with_parent()
    port = SocketPort(socket.socket(fileno=socket_fd))
    try:
        config = port.take_config()
        engine = start(port, config, SharedMarker(marker_fd))
        settle_memory()
        run_engine(engine, port, port)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return EXIT_ORPHANED
    except Exception as error:  # noqa: BLE001 - last words, whatever it was
        if not isinstance(error, ChorusError):
            traceback.print_exc()
        port.send(EngineFailed(detail=str(error) or repr(error), config=isinstance(error, ConfigError)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
