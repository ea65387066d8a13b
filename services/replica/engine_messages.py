"""What passes between a replica's bus shell and its engine process. Both run the same code, so nothing here has a
version: msgpack maps with a type tag, in frames of a 4-byte little-endian length and the body.

    shell  ── SubmitSequence, CancelSequence, StopEngine ──────────────────────────────> engine
    shell  <── EngineStarting…, EngineReady, then one StepReport per step; EngineFailed ── engine
"""

import struct

import msgspec

from services.replica.core.scheduler import WhyNot
from shared.limits import ENGINE_FRAME_BYTES_MAX, ENGINE_RUNNING_MAX, ENGINE_WAITING_MAX, MIB
from shared.messages import Sampling, StepModel, TokenLogprob
from shared.outcomes import EndReason
from shared.tiers import Tier


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an engine is started with. 0 means: as the model, the memory or a measurement gives."""

    model_file: str  # a GGUF file, a folder of config.json and safetensors, or "stub"
    weights: str = "as-stored"  # or what float matrices are quantised to at load: q8_0, q4_1, q4_0
    kv_type: str = "auto"  # of keys and values: float32, bfloat16, float16, int8, float8; auto: the runner's own
    device: str = "cpu"  # or cuda
    stub_tps: float = 0.0  # tokens per second of each sequence; 0: as fast as possible
    threads: int = 1
    context_max: int = 0  # prompt and output together; 0: the model's own
    running_max: int = ENGINE_RUNNING_MAX
    waiting_max: int = ENGINE_WAITING_MAX
    blocks: int = 0  # KV blocks; 0: as many as `kv_bytes` holds
    kv_bytes: int = 512 * MIB
    reserve_blocks: int | None = None  # None: a share of the blocks
    step_tokens_max: int = 0  # 0: from the measured step time
    mixed_tokens_max: int = 0


# --- to the engine ---------------------------------------------------------------------------------------


class SubmitSequence(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this. `sequence_id` is the shell's, new for each attempt; `sampling.seed` must be filled in."""

    sequence_id: str
    tier: Tier
    prompt: bytes  # packed int32
    budget: int  # most output tokens, the written ones included
    sampling: Sampling
    written: bytes = b""  # packed int32: output tokens that stand in the log already
    domain: bytes = b""


class CancelSequence(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave at the next step. Answered by one FreedSequence, known or not."""

    sequence_id: str


class StopEngine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the process; what runs is dropped."""


Command = SubmitSequence | CancelSequence | StopEngine

# --- from the engine -------------------------------------------------------------------------------------


class EngineStarting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress of the start: read | build | warm_up, and how much of it is done."""

    phase: str
    share: float
    detail: str = ""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A test token was drawn; sequences may come."""

    model_name: str
    model_version: str  # content hash and precision
    tokenizer_revision: str
    vocab_size: int
    blocks_total: int
    context_max: int
    running_max: int
    step: StepModel
    phases_s: dict[str, float]  # start-up by phase
    step_tokens: int  # of prompts, most in a step when nobody decodes
    mixed_tokens: int  # and beside decodes
    cores: int = 1  # of a processor, or GPUs, that a step takes


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one sequence wrote in a step. With `finish` its blocks are free and nothing more comes for it."""

    sequence_id: str
    ids: tuple[int, ...]
    texts: tuple[str, ...]  # per token, the text it releases
    cached_tokens: int | None = None  # with the first token
    queued_s: float | None = None  # with the first token
    finish: EndReason | None = None
    engine_s: float = 0.0  # with `finish`
    logprobs: tuple[TokenLogprob, ...] = ()  # per token, when asked for


class SequenceRefused(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A submitted sequence that was not taken in; nothing more comes for it."""

    sequence_id: str
    reason: WhyNot
    detail: str


class FreedSequence(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A cancelled sequence holds no block any more (one that was unknown or had finished never did)."""

    sequence_id: str
    engine_s: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The engine after a step."""

    blocks_total: int
    blocks_free: int  # cached ones included
    running: int
    waiting: int
    waiting_tokens: dict[str, int]  # per tier: tokens not yet computed
    step: StepModel  # refitted as steps are measured
    step_s: float = 0.0  # the last step
    step_predicted_s: float = 0.0
    step_tokens: int = 0  # rows it computed
    step_attended: int = 0  # pairs of a row and a token it attended to
    steps: int = 0
    sampled_tokens: int = 0  # since the start
    computed_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    preemptions: int = 0


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything a step has to say; sent once a step, also for a step that only freed or refused."""

    number: int
    stats: EngineStats
    tokens: tuple[SequenceTokens, ...] = ()
    freed: tuple[FreedSequence, ...] = ()
    refused: tuple[SequenceRefused, ...] = ()
    preempted: tuple[str, ...] = ()  # they stay; they will be computed again
    stored: bytes = b""  # prefix block hashes, 16 bytes each
    evicted: bytes = b""
    sampled_s: float = 0.0  # when the step was over, on the machine's monotonic clock


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's last words. `config`: a setting or file is at fault, starting it again will not help."""

    detail: str
    config: bool = False


FromEngine = EngineStarting | EngineReady | StepReport | EngineFailed
ToEngine = EngineConfig | Command

# --- frames ----------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")
# Memory that both see: when the running step began (0: none runs), and how many seconds it should take.
MARKER = struct.Struct("<dd")
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    if len(body) > ENGINE_FRAME_BYTES_MAX:
        raise ValueError(f"{type(message).__name__} of {len(body)} bytes is more than a frame may hold")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they come in, frame bodies out."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies of the frames that are now whole; ValueError when a length is not ours."""
        self._data += data
        bodies, at = [], 0
        while len(self._data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > ENGINE_FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._data) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            bodies.append(bytes(self._data[at : at + length]))
            at += length
        del self._data[:at]
        return bodies
