"""The scheduler, one known class of bug after another."""

import pytest

from services.replica.core.plan import StepResult
from services.replica.core.scheduler import NotTaken, WhyNot
from services.replica.stub_runner import scripted_token
from shared.blocks import block_hashes
from shared.messages import Sampling
from shared.outcomes import EndReason
from shared.tiers import Tier
from tests.unit.replica.machine import STUB, Machine, Script, demand, limits

PROMPT = list(range(33, 33 + 40))  # two full blocks and a half


def scripted(name: str, count: int) -> list[int]:
    return [scripted_token(sum(name.encode()), at) for at in range(count)]


# --- steps -----------------------------------------------------------------------------------------------


def test_prompts_are_cut_into_chunks_beside_running_decodes():
    """Decodes come first and never wait for a long prompt, which takes the rest of the budget, step by step."""
    machine = Machine(step_tokens_max=32, mixed_tokens_max=16)
    machine.submit(demand("a", 5, budget=12))
    machine.step()
    machine.submit(demand("b", 40, budget=2))
    shapes = [[(chunk.sequence_id, len(chunk.ids)) for chunk in machine.step().chunks] for _ in range(4)]
    assert shapes == [
        [("a", 1), ("b", 16)],
        [("a", 1), ("b", 16)],
        [("a", 1), ("b", 8)],
        [("a", 1), ("b", 1)],
    ]
    machine.run()
    assert len(machine.records["a"].ids) == 12


def test_a_chunk_samples_only_when_it_reaches_the_last_token():
    """Half a prompt draws no token: usage would be wrong and the text would be noise."""
    machine = Machine(step_tokens_max=16, mixed_tokens_max=16, running_max=1)
    machine.submit(demand("a", 40, budget=3))
    assert [machine.step().chunks[0].sample is not None for _ in range(4)] == [False, False, True, True]
    machine.run()
    assert machine.records["a"].ids == scripted("a", 3)


def test_usage_counts_each_token_once_with_chunked_prefill():
    """However the prompt was cut, the reply has its budget of tokens and the positions to draw from are 0, 1, 2 …"""
    machine = Machine(step_tokens_max=10, mixed_tokens_max=5, running_max=4)
    for name in "abc":
        machine.submit(demand(name, 23, budget=7))
    machine.run()
    for name in "abc":
        assert machine.records[name].ids == scripted(name, 7)
        assert machine.records[name].cached_tokens == 0


def test_lanes_are_served_in_order_and_each_first_come_first_served():
    """A paid arrival overtakes what waits in the free lane, never what came before it in its own."""
    machine = Machine(running_max=1)
    for name, tier in [
        ("f1", Tier.FREE),
        ("b1", Tier.BACKGROUND),
        ("f2", Tier.FREE),
        ("p1", Tier.PAID),
        ("p2", Tier.PAID),
    ]:
        machine.submit(demand(name, 4, budget=1, tier=tier))
    order = []
    while machine.scheduler.has_work:
        order += [chunk.sequence_id for chunk in machine.step().chunks]
    assert order == ["p1", "p2", "f1", "f2", "b1"]


def test_a_paid_prompt_overtakes_a_free_one_between_chunks():
    """The step's budget goes lane by lane, also to prompts that are half done."""
    machine = Machine(step_tokens_max=16, mixed_tokens_max=16)
    machine.submit(demand("free", 64, budget=1, tier=Tier.FREE))
    machine.step()
    machine.submit(demand("paid", 16, budget=1))
    machine.step()
    assert [chunk.sequence_id for chunk in machine.step().chunks] == ["paid"] or machine.records["paid"].finish
    assert machine.records["free"].finish is None


def test_a_step_of_nobody_is_empty():
    """With nothing to do a plan has no chunks, and the machine knows that it has no work."""
    machine = Machine()
    assert machine.step().chunks == ()
    assert not machine.scheduler.has_work


def test_engine_seconds_are_shared_out_whole():
    """The seconds of all steps are the sum of the sequences' shares, the cancelled one's included."""
    machine = Machine()
    for name in "abcd":
        machine.submit(demand(name, 30, budget=6))
    machine.step()
    machine.step()
    machine.cancel("b")
    machine.run()
    assert machine.records["b"].engine_s > 0
    assert sum(record.engine_s for record in machine.records.values()) == pytest.approx(machine.seconds)


# --- the prefix cache ------------------------------------------------------------------------------------


def test_a_block_is_published_only_once_it_is_computed():
    """Between plan and commit nobody finds the block: its slots are not written yet."""
    machine = Machine()
    machine.submit(demand("a", PROMPT))
    plan = machine.scheduler.plan(0.0)
    hashes = block_hashes(PROMPT, b"")
    assert [machine.pool.find(block_hash) for block_hash in hashes] == [None, None]
    machine.scheduler.commit(plan, machine.runner.run(plan), 1.0)
    assert None not in [machine.pool.find(block_hash) for block_hash in hashes]


def test_a_prompt_half_computed_publishes_only_the_full_blocks():
    """A chunk that ends inside a block leaves that block unknown until it is full."""
    machine = Machine(step_tokens_max=24, mixed_tokens_max=8, running_max=2)
    machine.submit(demand("a", PROMPT))
    machine.step()
    found = [machine.pool.find(block_hash) is not None for block_hash in block_hashes(PROMPT, b"")]
    assert found == [True, False]


def test_a_fully_cached_prompt_still_computes_its_last_token():
    """A prompt of whole blocks that are all cached keeps its last block for itself, so that there is a row to sample."""
    machine = Machine()
    machine.submit(demand("a", PROMPT[:32]))
    machine.run()
    machine.submit(demand("b", PROMPT[:32], seed=7))
    chunk = machine.step().chunks[0]
    assert (chunk.start, len(chunk.ids)) == (16, 16)
    assert chunk.sample is not None
    machine.run()
    assert machine.records["b"].cached_tokens == 16


def test_shared_blocks_are_held_by_both_and_written_by_none():
    """A hit takes no new block for the shared part, and computes only what comes after it."""
    machine = Machine()
    machine.submit(demand("a", PROMPT, budget=30))
    machine.step()
    machine.submit(demand("b", [*PROMPT[:32], 99, 98], budget=2))
    first = machine.plans[-1].chunks[0]
    second = machine.step().chunks[1]
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert second.start == 32
    machine.run()


def test_decoded_blocks_are_cached_too():
    """Turn 6 sends turn 5's reply back as prompt: all its full blocks are hits."""
    machine = Machine()
    machine.submit(demand("a", PROMPT, budget=40))
    machine.run()
    written = [*PROMPT, *machine.records["a"].ids]
    machine.submit(demand("b", [*written, 50, 51]))
    machine.run()
    assert machine.records["b"].cached_tokens == 64  # 79 of 80 tokens were computed: the last one never is


def test_another_domain_shares_nothing():
    """Tenants with a salt of their own do not find each other's blocks."""
    machine = Machine()
    machine.submit(demand("a", PROMPT, domain=b"model|tenant-a"))
    machine.run()
    for name, domain, cached in (("b", b"model|tenant-b", 0), ("c", b"model|tenant-a", 32)):
        machine.submit(demand(name, PROMPT, domain=domain))
        machine.run()
        assert machine.records[name].cached_tokens == cached


def test_stored_and_evicted_hashes_are_reported():
    """What the router is told adds up to what the cache holds."""
    machine = Machine(blocks=6, reserve_blocks=0)
    known: set[bytes] = set()
    for round_ in range(4):
        machine.submit(demand("abcd"[round_], 50, budget=20))
        while machine.scheduler.has_work:
            machine.step()
            changes = machine.pool.take_changes()
            known = (known | set(changes.stored)) - set(changes.evicted)
    assert known == set(machine.pool.cached())
    assert 0 < len(known) <= 6


# --- memory ----------------------------------------------------------------------------------------------


def test_the_newest_of_the_lowest_lane_makes_room():
    """When blocks run out, the one that loses least goes back to its lane, and everyone's reply is unchanged."""
    machine = Machine(blocks=8, reserve_blocks=0)
    machine.submit(demand("old", 30, budget=40))
    machine.submit(demand("free", 14, budget=40, tier=Tier.FREE))
    machine.submit(demand("new", 30, budget=40))
    machine.run()
    assert machine.preempted[0] == "free"
    assert "old" not in machine.preempted
    for name in ("old", "free", "new"):
        assert machine.records[name].ids == scripted(name, 40)
        assert machine.records[name].finish is EndReason.MAX_TOKENS


def test_a_preempted_sequence_keeps_its_place_in_front():
    """It came before all who wait in its lane, so it is readmitted before them."""
    machine = Machine(blocks=6, reserve_blocks=0, running_max=2)
    machine.submit(demand("a", 30, budget=50))
    machine.submit(demand("b", 30, budget=30))
    machine.submit(demand("c", 30, budget=4))
    while "b" not in machine.preempted:
        machine.step()
    before = len(machine.plans)
    machine.run()
    later = [chunk.sequence_id for plan in machine.plans[before:] for chunk in plan.chunks]
    assert later.index("b") < later.index("c")


def test_a_reserve_is_kept_for_those_who_run():
    """An arrival that would leave less than the reserve waits, unless nobody runs."""
    machine = Machine(blocks=8, reserve_blocks=3)
    machine.submit(demand("a", 60, budget=2))  # 4 blocks
    machine.submit(demand("b", 20, budget=2))  # 2 blocks: would leave 2
    assert [chunk.sequence_id for chunk in machine.step().chunks] == ["a"]
    machine.run()
    assert machine.records["b"].finish is EndReason.MAX_TOKENS
    whole = Machine(blocks=8, reserve_blocks=3)
    whole.submit(demand("c", 120, budget=8))  # all 8 blocks
    whole.run()
    assert whole.records["c"].finish is EndReason.MAX_TOKENS


def test_a_head_that_does_not_fit_is_not_overtaken_by_lower_lanes():
    """Smaller requests of later lanes must not keep taking the blocks that the head waits for."""
    machine = Machine(blocks=8, reserve_blocks=0)
    machine.submit(demand("run", 60, budget=5))
    machine.step()
    machine.submit(demand("big", 100, budget=2))
    machine.submit(demand("small", 5, budget=2, tier=Tier.FREE))
    assert [chunk.sequence_id for chunk in machine.step().chunks] == ["run"]
    machine.run()
    assert machine.records["small"].finish is EndReason.MAX_TOKENS


@pytest.mark.parametrize(("prompt", "budget"), [(129, 1), (100, 30), (1, 200)])
def test_what_can_never_fit_is_refused_at_once(prompt: int, budget: int):
    """More tokens than the pool holds would wait for ever, or preempt itself for ever."""
    machine = Machine(blocks=8)
    answer = machine.submit(demand("a", prompt, budget=budget))
    assert isinstance(answer, NotTaken)
    assert answer.reason is WhyNot.NEVER_FITS
    assert not machine.scheduler.has_work


def test_what_fits_exactly_runs():
    """The last token is drawn and never computed, so 128 places serve 129 tokens."""
    machine = Machine(blocks=8)
    assert machine.submit(demand("a", 100, budget=29)) is None
    machine.run()
    assert len(machine.records["a"].ids) == 29


def test_more_than_the_context_is_refused():
    """Prompt and budget together are held against the context, with both numbers in the sentence."""
    machine = Machine(context_max=64)
    answer = machine.submit(demand("a", 60, budget=5))
    assert isinstance(answer, NotTaken)
    assert answer.reason is WhyNot.NEVER_FITS
    assert "65" in answer.detail
    assert "64" in answer.detail


def test_a_full_queue_says_so():
    """The engine's own queue is short: past its bound a sequence is refused, not piled up."""
    machine = Machine(running_max=1, waiting_max=2)
    answers = [machine.submit(demand(name, 4)) for name in "abc"]
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], NotTaken)
    assert answers[2].reason is WhyNot.FULL


def test_bad_ids_are_refused_at_the_door():
    """A token id, a bias or an empty prompt that would break the model never reaches it."""
    machine = Machine()
    size = STUB.vocab_size
    bad = [
        demand("a", [1, size]),
        demand("b", [-1]),
        demand("c", []),
        demand("d", [1], written=[size]),
        demand("e", [1], sampling=Sampling(logit_bias={size: 1.0})),
    ]
    for wanted in bad:
        answer = machine.submit(wanted)
        assert isinstance(answer, NotTaken)
        assert answer.reason is WhyNot.BAD_REQUEST
    assert machine.submit(demand("f", [size - 1])) is None
    answer = machine.submit(demand("f", [1]))
    assert isinstance(answer, NotTaken), "the same sequence twice"


def test_load_counts_what_is_still_to_compute():
    """Waiting tokens are those of waiting prompts and of the rest of running ones, by tier."""
    machine = Machine(step_tokens_max=16, mixed_tokens_max=16, running_max=1)
    machine.submit(demand("a", 40, budget=2, tier=Tier.FREE))
    machine.submit(demand("b", 25, budget=2))
    machine.submit(demand("c", 5, budget=2, tier=Tier.FREE))
    machine.step()
    load = machine.scheduler.load()
    assert load.waiting_tokens == {"paid": 9, "free": 45, "background": 0}
    assert (load.running, load.waiting) == (1, 2)
    assert load.blocks_free == 64 - 2


def test_limits_that_do_not_go_together_are_refused():
    """A step must hold all decodes and some of a prompt."""
    with pytest.raises(ValueError):
        limits(running_max=64, step_tokens_max=64)
    with pytest.raises(ValueError):
        limits(mixed_tokens_max=0)


# --- cancel ----------------------------------------------------------------------------------------------


def test_a_cancelled_head_does_not_block_its_lane():
    """A waiting sequence that left is gone at the next plan; who stood behind it is admitted in that very step."""
    machine = Machine(running_max=1)
    for name in ("run", "head", "next"):
        machine.submit(demand(name, 4, budget=2))
    machine.step()
    machine.cancel("head")
    machine.step()
    assert machine.records["head"].freed
    machine.run()
    assert machine.records["next"].ids == scripted("next", 2)
    assert machine.records["head"].ids == []


@pytest.mark.parametrize("steps", range(9))
def test_a_cancel_frees_everything_at_the_next_plan(steps: int):
    """Waiting, half-way through the prompt, decoding or over: after one plan no block is held and nothing more comes."""
    machine = Machine(step_tokens_max=16, mixed_tokens_max=16)
    machine.submit(demand("a", 40, budget=4))
    for _ in range(steps):
        machine.step()
    over = machine.records["a"].finish is not None
    machine.cancel("a")
    machine.cancel("a")
    plan = machine.scheduler.plan(9.0)
    assert [freed.sequence_id for freed in plan.freed] == ["a"]
    assert plan.chunks == ()
    assert machine.pool.free == machine.pool.total
    assert not machine.scheduler.has_work
    assert (machine.records["a"].finish is not None) == over


def test_a_preempted_sequence_can_be_cancelled():
    """It waits again, holds nothing, and leaves like any other."""
    machine = Machine(blocks=6, reserve_blocks=0)
    machine.submit(demand("a", 30, budget=50))
    machine.submit(demand("b", 30, budget=30))
    while "b" not in machine.preempted:
        machine.step()
    machine.cancel("b")
    machine.run()
    assert machine.records["b"].freed
    assert machine.records["a"].ids == scripted("a", 50)


def test_the_result_of_a_cancelled_sequence_is_ignored():
    """A token that was being computed when the cancel came is not shown: nothing follows the user's stop."""
    machine = Machine()
    machine.submit(demand("a", 20))
    machine.submit(demand("b", 20))
    plan = machine.scheduler.plan(0.0)
    machine.cancel("a")
    outputs = machine.scheduler.commit(plan, machine.runner.run(plan), 1.0)
    assert [output.sequence_id for output in outputs] == ["b"]
    machine.run()


def test_a_late_result_does_not_touch_a_new_stay():
    """A plan from before a sequence left the batch is not believed after it came back, even under the same name."""
    machine = Machine()
    machine.submit(demand("a", 20))
    late = machine.scheduler.plan(0.0)
    machine.cancel("a")
    machine.step()
    machine.submit(demand("a", PROMPT))
    machine.step()
    before = list(machine.records["a"].ids)
    assert machine.scheduler.commit(late, StepResult([300]), 1.0) == []
    machine.scheduler.check()
    machine.run()
    assert machine.records["a"].ids[: len(before)] == before
    assert machine.records["a"].ids == scripted("a", 4)


def test_an_unknown_cancel_is_answered():
    """Whoever asks hears that nothing is held, and need not wait for ever."""
    machine = Machine()
    machine.cancel("nobody")
    assert [freed.sequence_id for freed in machine.step().freed] == ["nobody"]


# --- ends and continuations ------------------------------------------------------------------------------

END = STUB.special_ids["<|im_end|>"]


def words(text: str) -> list[int]:
    return STUB.encode(text)


def test_a_stop_token_ends_the_reply_and_shows_nothing():
    """The stop token is a token of the log, releases what was held back, and has no text of its own."""
    script = Script({"a": [*words("so ST"), END, *words("never")]})
    machine = Machine(runner=script)
    machine.submit(demand("a", 4, budget=20, sampling=Sampling(stop=("STOP",))))
    machine.run()
    record = machine.records["a"]
    assert record.finish is EndReason.STOP_TOKEN
    assert record.texts == ["s", "o", " ", "", "", "ST"]
    assert record.ids[-1] == END


def test_ignore_eos_goes_on_to_the_budget():
    """Benches fix the length: a stop token is then a token like others, still without text."""
    script = Script({"a": [*words("ab"), END, *words("cd")]})
    machine = Machine(runner=script)
    machine.submit(demand("a", 4, budget=5, sampling=Sampling(ignore_eos=True)))
    machine.run()
    assert machine.records["a"].text == "abcd"
    assert machine.records["a"].finish is EndReason.MAX_TOKENS


def test_a_stop_string_ends_the_reply_before_itself():
    """Only the text before it is shown, although its tokens are counted."""
    machine = Machine(runner=Script({"a": words("well, STOP it")}))
    machine.submit(demand("a", 4, budget=20, sampling=Sampling(stop=("STOP",))))
    machine.run()
    assert machine.records["a"].text == "well, "
    assert machine.records["a"].finish is EndReason.STOP_SEQUENCE
    assert len(machine.records["a"].ids) == len("well, STOP")


@pytest.mark.parametrize("text", ["well, STOP it", "a€b", "no end in sight here", "ST€ST"])
@pytest.mark.parametrize("end", [False, True])
def test_a_continuation_cut_anywhere_is_the_undisturbed_reply(text: str, end: bool):
    """Cut after any token, the rest has the same ids, texts per token and reason as if nothing had happened."""
    tokens = [*words(text), *([END] if end else []), *words("0123456789abcdef")]
    sampling = Sampling(stop=("STOP", "€S"))
    whole = Machine(runner=Script({"a": tokens}))
    whole.submit(demand("a", 7, budget=16, sampling=sampling))
    whole.run()
    expected = whole.records["a"]
    for cut in range(len(expected.ids) + 1):
        machine = Machine(runner=Script({"a": tokens}))
        machine.submit(demand("a", 7, budget=16, sampling=sampling, written=expected.ids[:cut]))
        machine.run()
        rest = machine.records["a"]
        assert (rest.ids, rest.texts) == (expected.ids[cut:], expected.texts[cut:])
        assert rest.finish is expected.finish


def test_a_continuation_draws_from_where_the_lost_replica_stood():
    """The sampler's position counts the tokens in the log."""
    machine = Machine()
    machine.submit(demand("a", 20, budget=6, written=scripted("a", 3)))
    machine.run()
    assert machine.records["a"].ids == scripted("a", 6)[3:]


def test_cached_tokens_count_the_prompt_only():
    """A continuation that finds the written tokens in the cache as well does not bill them as prompt."""
    machine = Machine()
    machine.submit(demand("a", PROMPT, budget=40))
    machine.run()
    machine.submit(demand("a", PROMPT, budget=60, written=machine.records["a"].ids))
    machine.run()
    assert machine.records["a"].cached_tokens == len(PROMPT)
