"""The native kernels: near the reference, and the same to the bit whatever is computed beside, in which pieces, where."""

import operator
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from services.replica.core.plan import SampleParams, SeqChunk, StepPlan
from services.replica.core.randomness import unit
from services.replica.engine_messages import EngineConfig
from services.replica.model import load
from services.replica.model.load import load_runner, open_checkpoint
from services.replica.model.loader import load_weights
from services.replica.model.native import kernels
from services.replica.model.native.kernels import BEST, Draw, KernelShape, Rows, Variant
from services.replica.model.native_runner import NativeRunner, misfit
from services.replica.model.sampler import sample
from services.replica.model.torch_runner import TorchRunner
from services.replica.model.transformer import Transformer
from shared.errors import ConfigError
from shared.gguf import TensorType
from shared.messages import Sampling
from tests.unit.replica.native_models import (
    KINDS,
    VARIANTS,
    VOCAB,
    config_of,
    each_variant,
    ids,
    kernel_model,
    logits,
    needs_kernels,
    tiny_file,
)
from tests.unit.shared.gguf_files import FLOAT16, Q4_1, Q8_0

pytestmark = needs_kernels
GREEDY = Sampling(temperature=0.0)
TABLE = tuple(range(20))
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("native")
    return {name: tiny_file(folder / f"{name}.gguf", kind) for name, kind in KINDS.items()}


def reference(path: Path, prompt: tuple[int, ...]) -> np.ndarray:
    """[vocab]: float32 torch over the file's dequantised weights."""
    config = config_of(path)
    with open_checkpoint(path) as checkpoint:
        weights = load_weights(checkpoint, lambda _: None)
    plan = StepPlan(1, (SeqChunk("a", 1, 0, prompt, TABLE, SampleParams(GREEDY, 0, 0)),))
    return Transformer(config, weights, blocks=len(TABLE), context=config.context).logits(plan)[0].numpy()


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the difference, relative to the logits' own spread."""
    return float(np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std())


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precise", "within"), [(False, 0.05), (True, 0.003)])
def test_logits_are_those_of_the_reference(files, variant: Variant, kind: str, precise: bool, within: float):
    """Fast is near float32 on the file's own weights, and precise is as near as half-precision keys and values let it be."""
    for length in (1, 17, 100):
        prompt = ids(length, length)
        with kernel_model(files[kind], variant, precise=precise) as model:
            found = logits(model, Rows(prompt, 0, TABLE, BEST))[0]
        assert distance(found, reference(files[kind], prompt)) < within


@each_variant
@pytest.mark.parametrize("gates", [20.0, 40.0, 100.0])
def test_gates_may_be_far_below_zero(tmp_path: Path, variant: Variant, gates: float):
    """SiLU of -100 and less is 0: the exponential behind it must not leave its range."""
    path = tiny_file(tmp_path / "m.gguf", Q8_0, gates=gates)
    prompt = ids(1, 40)
    with kernel_model(path, variant, precise=True) as model:
        found = logits(model, Rows(prompt, 0, TABLE, BEST))[0]
    assert distance(found, reference(path, prompt)) < 0.003


@each_variant
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (5, 1)])
def test_any_grouping_of_heads(tmp_path: Path, variant: Variant, heads: int, kv_heads: int):
    """One to five query heads to a key-value head, and a head that is not the embedding."""
    path = tiny_file(tmp_path / "model.gguf", Q4_1, heads=heads, kv_heads=kv_heads, tied=False)
    prompt = ids(1, 70)
    with kernel_model(path, variant, precise=True) as model:
        found = logits(model, Rows(prompt, 0, TABLE, BEST))[0]
    assert distance(found, reference(path, prompt)) < 0.003


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precise", [False, True])
def test_every_instruction_set_gives_the_same_bits(files, kind: str, precise: bool):
    """So a reply may go on on a machine of another kind, and the model's version need not name the instruction set."""
    rows = [Rows(ids(1, 40), 0, TABLE[:3], BEST), Rows(ids(2, 7), 0, TABLE[3:4], BEST)]
    found = []
    for variant in VARIANTS:
        with kernel_model(files[kind], variant, precise=precise) as model:
            found.append(logits(model, *rows))
            found.append(logits(model, Rows((5,), 40, TABLE[:3], BEST)))
    for other in range(2, len(found)):
        assert np.array_equal(found[other], found[other % 2])


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precise", "threads"), [(False, 1), (False, 3), (True, 2)])
def test_a_row_is_the_same_whatever_is_beside_it(files, variant: Variant, kind: str, precise: bool, threads: int):
    """Alone, in batches of any size, in chunks of any length, after cached blocks: not one bit differs."""
    rng = np.random.default_rng(3)
    prompt = ids(9, 90)
    with kernel_model(files[kind], variant, precise=precise, threads=threads, blocks=256) as model:
        alone = logits(model, Rows(prompt, 0, tuple(range(6)), BEST))[0]
        for trial in range(12):
            table = tuple(int(block) for block in rng.permutation(np.arange(6, 40))[:6])
            at = int(rng.integers(0, 6)) * 16 if trial % 3 == 0 else 0
            if at:  # the head of the prompt stands in the cache already
                table = (*range(at // 16), *table[at // 16 :])
            while at < len(prompt):
                count = min(int(rng.choice([1, 2, 3, 5, 8, 16, 33, 90])), len(prompt) - at)
                others = [
                    Rows(
                        ids(100 + n, int(rng.choice([1, 1, 1, 4, 20]))),
                        0,
                        (40 + 2 * n, 41 + 2 * n),
                        BEST if n % 2 == 0 else None,
                    )
                    for n in range(int(rng.choice([0, 1, 3, 9, 40])))
                ]
                place = int(rng.integers(0, len(others) + 1))
                others.insert(place, Rows(prompt[at : at + count], at, table, BEST))
                found = logits(model, *others)[sum(rows.draw is not None for rows in others[:place])]
                at += count
            assert np.array_equal(found, alone)


@each_variant
def test_the_best_token_needs_no_logits(files, variant: Variant):
    """What is chosen without writing logits is their first maximum."""
    rows = [Rows(ids(n, 1 + n), 0, (2 * n, 2 * n + 1), BEST) for n in range(17)]
    with kernel_model(files["Q8_0"], variant, threads=2) as model:
        best, none = model.forward(rows, logits=False)
        assert none is None
        assert best.tolist() == logits(model, *rows).argmax(-1).tolist()


@each_variant
def test_what_stands_in_foreign_blocks_does_not_matter(files, variant: Variant):
    """Blocks full of another sequence's keys and values, larger than a half can hold, change nothing."""
    prompt = ids(4, 21)
    with kernel_model(files["Q4_1"], variant, blocks=8) as model:
        alone = logits(model, Rows(prompt, 0, (0, 1), BEST))
        for block in range(8):
            model.forward([Rows(ids(block, 16), 0, (block,), None)], logits=False)
        assert np.array_equal(logits(model, Rows(prompt, 0, (5, 3), BEST)), alone)


BAD = {
    "a token outside the vocabulary": Rows((VOCAB,), 0, (0,), BEST),
    "a token below 0": Rows((-1,), 0, (0,), BEST),
    "a block that does not exist": Rows((1,), 0, (64,), BEST),
    "blocks that do not cover": Rows((1,) * 17, 0, (0,), BEST),
    "a start below 0": Rows((1,), -1, (0,), BEST),
    "past the context": Rows((1,), 512, tuple(range(33)), BEST),
    "no rows": Rows((), 0, (0,), BEST),
}


@pytest.mark.parametrize("bad", BAD)
def test_arguments_that_would_reach_foreign_memory_are_refused(files, bad: str):
    """The library checks nothing, so the door does."""
    with kernel_model(files["Q4_1"], VARIANTS[0]) as model, pytest.raises(ValueError, match=r"."):
        model.forward([BAD[bad]], logits=True)


def test_a_closed_model_runs_nothing(files):
    """Closing twice is fine, and running afterwards raises instead of crashing."""
    with kernel_model(files["Q4_1"], VARIANTS[0]) as model:
        model.close()
        model.close()
        with pytest.raises(RuntimeError, match="closed"):
            model.forward([Rows((1,), 0, (0,), BEST)], logits=True)


def test_closing_gives_the_memory_back(files):
    """Twenty models of 60 MB of KV each, one after another, do not pile up."""

    def resident_mb() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

    before = resident_mb()
    for _ in range(20):
        with kernel_model(files["Q4_1"], VARIANTS[0], blocks=4096, threads=3) as model:
            for block in range(0, 4096, 64):  # touched, so that it counts
                model.forward([Rows((1,), 0, (block,), None)], logits=False)
    assert resident_mb() - before < 100


# --- which runner -----------------------------------------------------------------------------------------


def loaded(path: Path, said: list[str] | None = None):
    config = EngineConfig(model_file=str(path), blocks=16, threads=2)
    return load_runner(config, VOCAB, lambda _phase, _share, detail: said.append(detail) if said is not None else None)


def test_kernels_are_chosen_and_said(files, monkeypatch: pytest.MonkeyPatch):
    """A quantised file runs on the best kernels this processor has; the version names weights, precision and KV type."""
    monkeypatch.setenv(kernels.CHOICE, VARIANTS[0].name)
    said: list[str] = []
    runner = loaded(files["Q4_1"], said)
    assert isinstance(runner, NativeRunner)
    assert f"native kernels {VARIANTS[0].name}, fast" in said
    monkeypatch.setenv(load.PRECISION, "precise")
    precise = loaded(files["Q4_1"])
    revision = f"r{kernels.REVISION}"
    digest = runner.info.model_version.removesuffix(f"-fast-kv-int8-{revision}")
    assert precise.info.model_version == f"{digest}-precise-kv-float16-{revision}"
    assert loaded(files["Q8_0"]).info.model_version != precise.info.model_version


def test_the_fallback_is_torch_and_says_why(files, monkeypatch: pytest.MonkeyPatch):
    """Kernels that were turned off, or a file that they cannot run, give the plain-torch runner and a sentence."""
    monkeypatch.setenv(kernels.CHOICE, "none")
    said: list[str] = []
    runner = loaded(files["Q4_1"], said)
    assert isinstance(runner, TorchRunner)
    assert f"plain torch, because {kernels.CHOICE}=none" in said
    assert runner.info.model_version.endswith("-f32")


def test_files_that_the_kernels_cannot_run_are_known(files, tmp_path: Path):
    """Half-precision matrices, and products whose parts are of different types; the former once they are quantised."""
    mixed = tiny_file(tmp_path / "mixed.gguf", Q4_1, odd={"1.attn_v": Q8_0})
    half = tiny_file(tmp_path / "half.gguf", Q8_0, odd={"1.attn_v": FLOAT16})
    for path, said, quantised in (
        (files["Q4_1"], "None", "None"),
        (mixed, "query, key, value matrices of layer 1 are of different types", "of different types"),
        (half, "type F16", "None"),
    ):
        with open_checkpoint(path) as checkpoint:
            assert said in str(misfit(checkpoint))
            assert quantised in str(misfit(checkpoint, TensorType.Q8_0))


@pytest.mark.parametrize(("name", "value"), [(kernels.CHOICE, "sse9"), (load.PRECISION, "sloppy")])
def test_a_wrong_choice_is_an_error_and_no_silent_fallback(files, monkeypatch: pytest.MonkeyPatch, name, value):
    """Who asks for kernels or a precision that do not exist is told so."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=value):
        loaded(files["Q4_1"])


def test_a_shape_that_does_not_fit_the_blocks_is_refused():
    """Sizes must be whole blocks of 32; the sentence names the one that is not."""
    shape = KernelShape(
        vocab=10, hidden=48, layers=1, heads=1, kv_heads=1, head_dim=32, ffn=64, context=16, eps=1e-5, theta=1e4,
        blocks=1, threads=1,
    )  # fmt: skip
    assert "hidden of 48" in shape.misfit()


def test_a_native_engine_never_imports_torch(files):
    """Start-up time and memory: with the kernels a replica runs without torch, also when it draws at random."""
    program = (
        "import sys\n"
        "from services.replica.model.load import load_runner\n"
        "from services.replica.engine_messages import EngineConfig\n"
        "from services.replica.core.plan import *\n"
        "from shared.messages import Sampling\n"
        f"runner = load_runner(EngineConfig(model_file={str(files['Q4_1'])!r}, blocks=4), {VOCAB}, lambda *_: None)\n"
        "sample = SampleParams(Sampling(temperature=1.0, top_k=5), 1, 0)\n"
        "print(runner.run(StepPlan(1, (SeqChunk('a', 1, 0, (1, 2), (0,), sample),))).sampled)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.__version__


# --- drawing ----------------------------------------------------------------------------------------------


def drawing_plan(prompts: list[tuple[int, ...]], samplings: list[Sampling], seed: int = 7) -> StepPlan:
    chunks = tuple(
        SeqChunk(str(at), 1, 0, prompt, (2 * at, 2 * at + 1), SampleParams(sampling, seed, at))
        for at, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    )
    return StepPlan(1, chunks)


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.3, "min_p": 0.05}])
def test_kernels_draw_as_the_sampler_does(files, fields: dict):
    """The same place of the same distribution: token for token, but for sums that differ in their last bits."""
    prompts = [ids(n, 1 + n % 20) for n in range(256)]
    units = [(n + 0.5) / 256 for n in range(256)]
    same = 0
    with kernel_model(files["Q4_1"], VARIANTS[0], blocks=512) as model:
        for first in range(0, 256, 64):
            rows = [
                Rows(prompts[n], 0, (2 * n, 2 * n + 1), Draw(unit=units[n], **fields)) for n in range(first, first + 64)
            ]
            drawn, logits = model.forward(rows, logits=True)
            for row, token, place in zip(logits, drawn, units[first:], strict=False):
                weights = np.exp((row.astype(np.float64) - row.max()) / fields["temperature"])
                weights[weights < fields.get("min_p", 0.0)] = 0
                cumulated = weights.cumsum()
                wanted = int(np.searchsorted(cumulated, place * cumulated[-1], side="right"))
                same += wanted == token
                assert weights[token] > 0
    assert same >= 254


CUTS = (
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 3.0, "top_k": 18},  # one less, as many and one more than the vocabulary has sixteens
    {"temperature": 3.0, "top_k": 19},
    {"temperature": 3.0, "top_k": 20},
    {"temperature": 1.0, "top_k": 299},
    {"temperature": 1.0, "top_k": 10_000, "top_p": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1 - 1e-12},
    {"temperature": 1.5, "top_p": 0.95, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.95, "min_p": 1.0},
)


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_kernels_draw_from_the_best_as_the_sampler_does(files, fields: dict):
    """Cut by rank, by mass, by odds: the sampler's token, but where a sum's last bits decide; on every instruction set."""
    rows = [(n, ids(n, 1 + n % 20), SampleParams(Sampling(**fields), 11, n)) for n in range(192)]
    drawn: dict[str, list[int]] = {}
    for variant in VARIANTS:
        with kernel_model(files["Q8_0"], variant, threads=2, blocks=2 * 192) as model:
            tokens, logits = model.forward(
                [Rows(prompt, 0, (2 * n, 2 * n + 1), Draw(unit=unit(11, n), **fields)) for n, prompt, _ in rows],
                logits=True,
            )
        drawn[variant.name] = tokens.tolist()
        wanted = sample(logits, [param for *_, param in rows])
        assert sum(map(operator.eq, tokens, wanted)) >= 190
    assert len(set(map(tuple, drawn.values()))) == 1


@each_variant
def test_of_equals_the_lower_ids_are_kept(files, variant: Variant):
    """All tokens are equally likely: the first five, the first half, whatever the place; and a cut by odds keeps all."""
    places = [(n + 0.5) / 60 for n in range(60)]
    with kernel_model(files["Q8_0"], variant, blocks=60) as model:
        model.put_vector("final_norm", 0, np.zeros(model.shape.hidden, np.float32))

        def drawn(**cut: float) -> list[int]:
            rows = [Rows((n,), 0, (n,), Draw(1.0, unit=place, **cut)) for n, place in enumerate(places)]
            return model.forward(rows, logits=False)[0].tolist()

        assert drawn(top_k=5) == [int(5 * place) for place in places]
        assert drawn(top_p=0.5) == [int(VOCAB / 2 * place) for place in places]
        assert drawn(top_k=200, top_p=0.25) == [int(50 * place) for place in places]
        assert drawn(top_p=0.999, min_p=1.0) == drawn()


@each_variant
@pytest.mark.parametrize("place", [0.0, 0.25, 0.999999, 1 - 2**-53])
def test_a_draw_at_the_edges_is_a_token_of_weight(files, variant: Variant, place: float):
    """The first and the last place of the distribution are tokens that min-p let live, on every instruction set alike."""
    rows = [Rows(ids(n, 5), 0, (n,), Draw(1.0, 0.3, place)) for n in range(20)]
    with kernel_model(files["Q8_0"], variant, threads=2) as model:
        drawn, logits = model.forward(rows, logits=True)
    for row, token in zip(logits, drawn, strict=True):
        alive = np.flatnonzero(np.exp(row.astype(np.float64) - row.max()) >= 0.3)
        assert token in alive
        if place in (0.0, 1 - 2**-53):
            assert token == alive[0 if place == 0.0 else -1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-39, 1e-44, 1e-300])
def test_no_temperature_is_too_small_to_draw_at(files, monkeypatch: pytest.MonkeyPatch, temperature: float):
    """Float32 has no inverse of some, and rounds others to 0: the best token comes, as at 0."""
    monkeypatch.setenv(kernels.CHOICE, VARIANTS[0].name)
    runner = load_runner(EngineConfig(model_file=str(files["Q4_1"]), blocks=128), VOCAB, lambda *_: None)
    prompts = [ids(n, 9) for n in range(12)]
    small = Sampling(temperature=temperature)
    best = runner.run(drawing_plan(prompts, [GREEDY] * 12)).sampled
    assert runner.run(drawing_plan(prompts, [small] * 12)).sampled == best
    assert len(set(best)) > 3


def test_a_mixed_batch_draws_each_row_as_alone(files, monkeypatch: pytest.MonkeyPatch):
    """Rows drawn by the kernels and rows drawn by the sampler, side by side: each gets its own token."""
    monkeypatch.setenv(kernels.CHOICE, VARIANTS[0].name)
    runner = load_runner(EngineConfig(model_file=str(files["Q4_1"]), blocks=128), VOCAB, lambda *_: None)
    kinds = [
        GREEDY,
        Sampling(temperature=1.0),
        Sampling(temperature=0.9, top_k=7),
        Sampling(temperature=0.8, min_p=0.1),
        Sampling(temperature=0.0, logit_bias={5: 100.0}),
        Sampling(temperature=1.0, top_p=0.5),
    ]
    samplings = [kinds[n % len(kinds)] for n in range(48)]
    whole = drawing_plan([ids(n, 9) for n in range(48)], samplings)
    together = runner.run(whole).sampled
    assert together == [runner.run(StepPlan(1, (chunk,))).sampled[0] for chunk in whole.chunks]
    assert together[4::6] == [5] * 8
    assert len(set(together)) > 12
