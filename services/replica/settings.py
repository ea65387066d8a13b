"""What a replica reads from its environment."""

from typing import Annotated

import msgspec

from services.replica.engine_messages import EngineConfig
from shared.catalog import STUB_FILE
from shared.limits import APPENDS_PER_S_MAX, APPENDS_PER_S_MAX_CPU, ENGINE_RUNNING_MAX, IDLE_END_S, MIB
from shared.settings import CommonSettings

Count = Annotated[int, msgspec.Meta(ge=0)]


class ReplicaSettings(CommonSettings, frozen=True, kw_only=True):
    model: str  # the id that requests name
    model_file: str = ""  # weights, a file or a folder; needed unless `stub`
    weights: str = "as-stored"  # these three are checked where the model is loaded: `model/load.py`
    kv_type: str = "auto"
    device: str = "cpu"
    stub: bool = False  # scripted tokens, no torch
    stub_tps: Annotated[float, msgspec.Meta(ge=0)] = 50.0  # of each sequence; 0: as fast as possible
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    context_tokens: Count = 0  # 0: the model's own
    kv_blocks: Count = 0  # 0: as many as kv_mib holds
    kv_mib: Annotated[int, msgspec.Meta(ge=1)] = 512
    running_max: Annotated[int, msgspec.Meta(ge=1)] = ENGINE_RUNNING_MAX
    idle_end_s: Annotated[float, msgspec.Meta(gt=0)] = IDLE_END_S

    @property
    def appends_per_s_max(self) -> int:
        """Where the engine computes on the processor, what an append costs is taken from its tokens."""
        return APPENDS_PER_S_MAX if self.stub or self.device != "cpu" else APPENDS_PER_S_MAX_CPU

    def engine_config(self) -> EngineConfig:
        """What the engine process is started with."""
        return EngineConfig(
            model_file=STUB_FILE if self.stub else self.model_file,
            weights=self.weights,
            kv_type=self.kv_type,
            device=self.device,
            stub_tps=self.stub_tps,
            threads=self.threads,
            context_max=self.context_tokens,
            running_max=self.running_max,
            blocks=self.kv_blocks,
            kv_bytes=self.kv_mib * MIB,
        )
