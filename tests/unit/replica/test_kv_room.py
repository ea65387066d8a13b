"""As many conversations are held at once as the formula of the KV memory says."""

import pytest

from services.replica.model.config import ModelConfig
from services.replica.model.kv_size import KvType, conversations_held, kv_block_bytes
from tests.unit.replica.machine import Machine, demand

MEMORY, TOKENS, WRITTEN = 2_000_000_000, 2_000, 6
SMALL = ModelConfig(
    vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, context=8192, eps=1e-5, theta=1e5
)  # SmolLM2-135M
HELD = {KvType.FLOAT32: 21, KvType.BFLOAT16: 43, KvType.FLOAT16: 43, KvType.INT8: 81, KvType.FLOAT8: 81}


@pytest.mark.parametrize("kv", KvType, ids=lambda kv: kv.value)
def test_two_gigabytes_hold_as_many_conversations_as_the_formula_says(kv: KvType):
    """All decode side by side and nobody makes room; one more waits until the first of them has gone."""
    assert conversations_held(SMALL, kv, MEMORY, TOKENS) == HELD[kv]
    machine = Machine(
        blocks=MEMORY // kv_block_bytes(SMALL, kv),
        running_max=200,
        waiting_max=200,
        step_tokens_max=200_000,
        mixed_tokens_max=199_000,
        reserve_blocks=0,
    )
    for number in range(HELD[kv] + 1):
        # Prompts that share no block, and places for 2,000 tokens: the last one drawn is never computed.
        prompt = [97 + (number * (7 + at) + at * at) % 26 if at > 1 else 33 + number for at in range(TOKENS - WRITTEN)]
        machine.submit(demand(str(number), prompt, budget=WRITTEN + 1))
    most = 0
    while machine.scheduler.has_work:
        machine.step()
        most = max(most, machine.scheduler.load().running)
    assert most == HELD[kv]
    assert not machine.preempted
    assert all(len(record.ids) == WRITTEN + 1 for record in machine.records.values())
