"""The sampler: what each parameter does, and that nobody's draw depends on anybody else."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from services.replica.core.plan import SampleParams
from services.replica.core.randomness import draw, unit
from services.replica.model import sampler
from services.replica.model.sampler import _order, sample, tell_odds
from shared.messages import Sampling

VOCAB = 60


def logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def params(seed: int = 1, position: int = 0, *, prompt=(), output=(), **fields) -> SampleParams:
    return SampleParams(Sampling(**fields), seed, position, tuple(prompt), tuple(output))


def drawn(row: torch.Tensor, count: int = 3_000, **fields) -> Counter[int]:
    """How often each token comes in `count` positions of one reply."""
    return Counter(sample(row.repeat(count, 1), [params(position=at, **fields) for at in range(count)]))


def test_temperature_0_takes_the_best():
    """Greedy needs no randomness: any seed, any position, the same token."""
    row = logits(1)
    assert sample(row.clone(), [params(9, 9, temperature=0.0)]) == [int(row.argmax())]


def test_tokens_come_as_often_as_their_probability():
    """With nothing cut, the draws over positions follow the softmax at that temperature."""
    row = logits(2, vocab=8)
    expected = torch.softmax(row[0] / 0.7, -1)
    counts = drawn(row, 6_000, temperature=0.7)
    for token, probability in enumerate(expected.tolist()):
        assert counts[token] / 6_000 == pytest.approx(probability, abs=0.025)


@pytest.mark.parametrize(("fields", "kept"), [({"top_k": 3}, 3), ({"top_k": 1}, 1), ({"top_k": 10_000}, VOCAB)])
def test_top_k_keeps_the_best_k(fields: dict, kept: int):
    """Only the k best are ever drawn, all of them sometimes; more than the vocabulary is the whole of it."""
    row = logits(3) * 0.1
    assert set(drawn(row, **fields)) == set(row[0].topk(kept).indices.tolist())


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_many_are_found_in_their_order(seed: int):
    """As sorting finds them, whatever the size and the count, equals by their ids, impossible ones last."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 3_000))
    numbers = rng.normal(size=size).astype(np.float32)
    if seed % 2:
        numbers = numbers.round(1)  # many equals
    numbers[rng.random(size) < 0.01] = -np.inf
    order = sorted(range(size), key=lambda at: (-numbers[at], at))
    for count in {1, 2, 40, int(rng.integers(1, size + 1)), size // 16 + 1, size}:
        assert sampler._best(numbers, count).tolist() == order[:count]


@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.9])
def test_top_p_keeps_the_smallest_set_of_that_mass(top_p: float):
    """The best tokens up to and including the one that reaches the mass; always at least the best one."""
    row = logits(4)
    probabilities, order = torch.softmax(row[0].double(), -1).sort(descending=True)
    kept = int((probabilities.cumsum(0) - probabilities < top_p).sum())
    assert set(drawn(row, top_p=top_p)) <= set(order[:kept].tolist())
    assert int(order[0]) in drawn(row, top_p=top_p)


def test_top_p_counts_what_top_k_left():
    """Mass is measured among the k best, not in the whole vocabulary."""
    row = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert set(drawn(row, top_k=2, top_p=0.57)) == {0}  # 0.4 of 0.7 is 0.571
    assert set(drawn(row, top_k=2, top_p=0.58)) == {0, 1}


def test_min_p_cuts_relative_to_the_best():
    """Tokens less than min_p times as likely as the best are never drawn, with and without top-k."""
    row = torch.log(torch.tensor([[0.5, 0.26, 0.14, 0.1]]))
    assert set(drawn(row, min_p=0.25)) == {0, 1, 2}
    assert set(drawn(row, min_p=0.25, top_k=4)) == {0, 1, 2}


def test_penalties_follow_their_definitions():
    """Repetition divides or multiplies what prompt and output hold; frequency and presence subtract for the output."""
    row = torch.tensor([[4.0, -2.0, 3.9, 0.0]])
    greedy = {"temperature": 0.0}
    assert sample(row.clone(), [params(prompt=[0], repetition_penalty=1.1, **greedy)]) == [2]
    assert sample(row.clone(), [params(prompt=[0], frequency_penalty=2.0, presence_penalty=2.0, **greedy)]) == [0]
    assert sample(row.clone(), [params(output=[0], presence_penalty=0.2, **greedy)]) == [2]
    assert sample(row.clone(), [params(output=[0, 0, 2], frequency_penalty=0.2, **greedy)]) == [2]
    changed = row.clone()
    sample(changed, [params(prompt=[1], output=[1, 1], repetition_penalty=2.0, frequency_penalty=0.5, **greedy)])
    assert changed[0].tolist() == pytest.approx([4.0, -5.0, 3.9, 0.0])


def test_logit_bias_can_force_and_forbid():
    """A bias of 100 wins, one of -100 never comes."""
    row = logits(5)
    best = int(row.argmax())
    assert sample(row.clone(), [params(temperature=0.0, logit_bias={17: 100.0})]) == [17]
    assert best not in drawn(row, logit_bias={best: -100.0})


MIXED = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "logit_bias": {3: 2.0}},
    {"temperature": 0.9, "output": (1, 2, 2), "frequency_penalty": 0.5},
)


def test_a_draw_is_the_same_whatever_the_batch():
    """A row alone, and the row among others of every kind and in any order, gives the same token."""
    rng = random.Random(0)
    rows = logits(6, rows=64)
    wanted = [params(seed, position=seed % 7, **MIXED[seed % len(MIXED)]) for seed in range(64)]
    alone = [sample(rows[[row]].clone(), [wanted[row]])[0] for row in range(64)]
    for size in (1, 2, 7, 64):
        picked = rng.sample(range(64), size)
        assert sample(rows[picked].clone(), [wanted[row] for row in picked]) == [alone[row] for row in picked]


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.95}, {"top_k": 20}, {"top_k": 50, "top_p": 0.9}, {"top_k": 20, "min_p": 0.1}]
)
def test_looking_at_fewer_candidates_first_changes_nothing(fields: dict, monkeypatch: pytest.MonkeyPatch):
    """Whether the tail was in the first look or needed the whole vocabulary, the token is the same."""
    rows = logits(7, rows=200)
    wanted = [params(seed, **fields) for seed in range(200)]
    monkeypatch.setattr(sampler, "CANDIDATES", VOCAB)
    whole = sample(rows.clone(), wanted)
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    assert sample(rows.clone(), wanted) == whole


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 0.01])
def test_hardly_any_temperature_is_greedy(temperature: float):
    """The smaller the temperature the nearer to the best token; none is so small that the numbers overflow."""
    row = logits(8)
    assert drawn(row, 50, temperature=temperature) == {int(row.argmax()): 50}


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_still_give_a_token(worst: float):
    """A row that a model spoiled, in one place or everywhere, ends nobody else's step."""
    spoiled = logits(9)
    spoiled[0, 7] = worst
    for row in (spoiled, torch.full((1, VOCAB), worst)):
        for fields in MIXED:
            assert 0 <= sample(row.clone(), [params(**fields)])[0] < VOCAB


def test_odds_are_those_of_the_model():
    """Log-softmax of the row as it came, the likeliest first; who did not ask gets none, and nobody asking costs nothing."""
    rows = logits(10, rows=3)
    expected = torch.log_softmax(rows.double(), -1)
    told = tell_odds(rows, [5, 6, 7], [params(logprobs=0), params(), params(logprobs=4, logit_bias={1: 9.0})])
    assert told[1] is None
    assert told[0] is not None
    assert told[2] is not None
    assert (told[0].logprob, told[0].top) == (pytest.approx(float(expected[0, 5])), ())
    best = expected[2].topk(4)
    assert [token for token, _ in told[2].top] == best.indices.tolist()
    assert [value for _, value in told[2].top] == pytest.approx(best.values.tolist())
    assert tell_odds(rows, [5, 6, 7], [params()] * 3) == []


def test_odds_are_the_same_whatever_the_batch():
    """Bit for bit, alone and among others."""
    rows = logits(11, rows=20)
    wanted = [params(logprobs=at % 6) for at in range(20)]
    together = tell_odds(rows, range(20), wanted)
    assert together == [tell_odds(rows[[at]], [at], [wanted[at]])[0] for at in range(20)]


def test_randomness_is_a_function_of_seed_and_position():
    """Neighbouring seeds and positions share nothing; the same pair is always the same number, here and in any release."""
    draws = {draw(seed, position) for seed in range(100) for position in range(100)}
    assert len(draws) == 10_000
    units = [unit(5, position) for position in range(4_000)]
    assert all(0 <= number < 1 for number in units)
    assert sum(units) / len(units) == pytest.approx(0.5, abs=0.02)
    assert (draw(0, 0), draw(1, 2)) == (EXPECTED_00, EXPECTED_12)


# Continuations of replies begun by an earlier release rely on these.
EXPECTED_00 = 0xE220A8397B1DCDAF
EXPECTED_12 = 0x70335FC3DAF3D8A7


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_by_number_then_by_place(seed: int):
    """Equals, both zeros, infinities and the smallest numbers there are: as a stable sort would have it."""
    rng = np.random.default_rng(seed)
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0]
    numbers = rng.choice(np.array([*special, *rng.standard_normal(20)], np.float32), 500)
    assert _order(numbers).tolist() == np.argsort(-numbers, kind="stable").tolist()


def test_what_min_p_cuts_is_not_looked_for():
    """A nucleus of nearly all, of which min-p leaves little: the draw is the same as from all of it."""
    rng = np.random.default_rng(5)
    row = (2 * rng.standard_normal(20_000)).astype(np.float32)
    for seed in range(50):
        both = SampleParams(Sampling(temperature=2.0, top_p=0.999, min_p=0.3), seed, 0)
        cut = np.where(row >= row.max() + 2.0 * np.log(0.3), row, -np.inf).astype(np.float32)
        whole = np.exp((row.astype(np.float64) - row.max()) / 2.0).sum()
        assert np.exp((cut.astype(np.float64) - row.max()) / 2.0).sum() < 0.999 * whole
        alone = SampleParams(Sampling(temperature=2.0, top_k=int(np.isfinite(cut).sum())), seed, 0)
        assert sample(row[None].copy(), [both]) == sample(cut[None].copy(), [alone])
