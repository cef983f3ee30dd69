"""Every stage against an independent statement, the pipeline's promises, and the distributions that come out."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from nano_vllm import registry
from nano_vllm.sampling import pipeline
from nano_vllm.sampling.params import SamplingParams
from nano_vllm.sampling.philox import uniform
from nano_vllm.sampling.pipeline import collect, needed, needs_history, rows, sample, stages

VOCAB = 301  # odd on purpose
ORDER = ["ban", "repetition", "frequency", "presence", "temperature", "min_p", "top_k", "top_p", "draw"]


def request(tokens=(1, 2, 3), prompt_length=None, seed=0, index=0, promised=0, stop_ids=(), **params):
    length = len(tokens) if prompt_length is None else prompt_length
    return SimpleNamespace(
        params=SamplingParams(**{"max_tokens": None, **params}), tokens=list(tokens), prompt_length=length,
        promised=promised, seed=seed, index=index, stop_ids=frozenset(stop_ids),
    )  # fmt: skip


def draws(n: int, **params) -> list[SimpleNamespace]:
    """n rows that differ in their seed alone."""
    return [request(seed=1000 + s, **params) for s in range(n)]


def logits_of(seed: int, n: int = 1, scale: float = 4.0, ties: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal((n, VOCAB)).astype(np.float32) * np.float32(scale)
    return np.round(logits) if ties else logits


def stage(name: str):
    return registry.load("sampling.stages", name)


def through(name: str, logits: np.ndarray, made: SimpleNamespace) -> np.ndarray:
    batch = collect([made])
    assert stage(name).active(batch).tolist() == [True]
    before = logits.copy()
    after = stage(name).apply(logits, batch, 0)
    np.testing.assert_array_equal(logits, before)
    assert after.dtype == np.float32
    return after


def kept(logits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


# ---- the folder


def test_stages_are_as_documented():
    assert [s.NAME for s in stages()] == ORDER
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    dtypes: dict = {}
    for name, module in registry.modules("sampling.stages").items():
        assert module.NAME == name and isinstance(module.HISTORY, bool)
        for parameter, dtype in module.PARAMETERS.items():
            assert parameter in fields
            assert dtypes.setdefault(parameter, dtype) == dtype
    assert set(collect([request()]).values) == set(dtypes)
    assert {s.NAME for s in stages() if s.HISTORY} == {"repetition", "frequency", "presence"}


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"temperature": 0}, set()),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, set()),
        ({"temperature": 1e-9}, set()),
        ({}, {"draw"}),
        ({"temperature": 0.5}, {"temperature", "draw"}),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"top_k", "top_p", "min_p", "draw"}),
        ({"temperature": 0, "repetition_penalty": 1.1}, {"repetition"}),
        ({"temperature": 0, "frequency_penalty": -1, "presence_penalty": 1}, {"frequency", "presence"}),
        ({"temperature": 0, "min_tokens": 1}, {"ban"}),
        ({"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "seed": 3}, {"draw"}),
    ],
)
def test_needed(params, names):
    assert needed(SamplingParams(**params)) == frozenset(names)


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_needs_history(name):
    assert needs_history(SamplingParams(**{name: 0.5})) and not needs_history(SamplingParams(top_k=3, min_tokens=1))


# ---- stages against transformers


@pytest.fixture(scope="module")
def warpers():
    import torch
    from transformers.generation import logits_process as process

    def run(name: str, logits: np.ndarray, *args, ids=(0,)) -> np.ndarray:
        made = getattr(process, name)(*args)
        return made(torch.tensor([list(ids)]), torch.from_numpy(logits.copy())[None])[0].numpy()

    return run


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 1.5, 100.0])
def test_temperature_as_transformers(warpers, seed, temperature):
    logits = logits_of(seed)[0]
    mine = through("temperature", logits, request(temperature=temperature))
    np.testing.assert_allclose(mine, warpers("TemperatureLogitsWarper", logits, temperature), rtol=2e-7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 17, 300, 301, 5000])
def test_top_k_as_transformers(warpers, seed, k):
    logits = logits_of(seed)[0]
    np.testing.assert_array_equal(through("top_k", logits, request(top_k=k)), warpers("TopKLogitsWarper", logits, k))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 17, 150, 300])
def test_top_k_ties_keep_exactly_k_lower_ids_first(warpers, seed, k):
    logits = logits_of(seed, ties=True)[0]
    mine = through("top_k", logits, request(top_k=k))
    assert kept(mine) == sorted(sorted(range(VOCAB), key=lambda i: (-logits[i], i))[:k])
    theirs = warpers("TopKLogitsWarper", logits, k)  # keeps every token that equals the k-th
    assert set(kept(mine)) <= set(kept(theirs)) and mine.max() == theirs.max()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_top_p_as_transformers(warpers, seed, top_p, scale):
    logits = logits_of(seed, scale=scale)[0]
    np.testing.assert_array_equal(through("top_p", logits, request(top_p=top_p)), warpers("TopPLogitsWarper", logits, top_p))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.9, 0.999, 1 - 1e-6, 1 - 1e-10, 1 - 1e-13])
@pytest.mark.parametrize("ties", [False, True])
def test_top_p_is_the_smallest_set(seed, top_p, ties):
    """Stated with exact fractions of the odds: one token fewer would not reach top_p, and ties go to the lower id."""
    logits = logits_of(seed, ties=ties)[0]
    odds = [Fraction(float(np.exp(np.float64(x - logits.max())))) for x in logits]
    order, total, have, expected = sorted(range(VOCAB), key=lambda i: (-logits[i], i)), sum(odds), Fraction(0), []
    for i in order:
        expected.append(i)
        have += odds[i]
        if have >= Fraction(top_p) * total:
            break
    assert kept(through("top_p", logits, request(top_p=top_p))) == sorted(expected)


@pytest.mark.parametrize(("top_p", "count"), [(0.1, 1), (0.2, 2), (0.8, 8), (0.85, 9), (0.9, 9), (0.9000001, 10)])
def test_top_p_of_equals(top_p, count):
    logits = np.full(10, 2.5, np.float32)
    assert kept(through("top_p", logits, request(top_p=top_p))) == list(range(count))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("min_p", [1e-6, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_min_p_as_transformers(warpers, seed, min_p, ties):
    logits = logits_of(seed, ties=ties)[0]
    np.testing.assert_array_equal(through("min_p", logits, request(min_p=min_p)), warpers("MinPLogitsWarper", logits, min_p))


def test_min_p_looks_at_probabilities_after_the_temperature():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    # at temperature 2 the ratios to the first are 1, 0.77, 0.55, 0.32; before it 1, 0.6, 0.3, 0.1
    ids = sample(np.tile(logits, (400, 1)), collect(draws(400, temperature=2, min_p=0.5)))
    assert set(ids.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.5, 1.1, 3.0])
def test_repetition_as_transformers(warpers, seed, penalty):
    logits, ids = logits_of(seed)[0], np.random.default_rng(seed).integers(0, VOCAB, 60).tolist()
    mine = through("repetition", logits, request(tokens=ids, prompt_length=40, repetition_penalty=penalty))
    np.testing.assert_allclose(mine, warpers("RepetitionPenaltyLogitsProcessor", logits, penalty, ids=ids), rtol=2e-7)
    untouched = np.setdiff1d(np.arange(VOCAB), ids)
    np.testing.assert_array_equal(mine[untouched], logits[untouched])


# ---- stages against their formulas


@pytest.mark.parametrize("value", [-2.0, -0.25, 0.5, 2.0])
def test_frequency_and_presence_count_the_answer_alone(value):
    logits, tokens = logits_of(3)[0], [5, 5, 5, 9, 9, 7, 9, 300]
    made = {"tokens": tokens, "prompt_length": 3}  # the answer: 9 9 7 9 300
    frequency, presence = logits.copy(), logits.copy()
    for i, count in {9: 3, 7: 1, 300: 1}.items():
        frequency[i] -= np.float32(value) * np.float32(count)
        presence[i] -= np.float32(value)
    np.testing.assert_array_equal(through("frequency", logits, request(**made, frequency_penalty=value)), frequency)
    np.testing.assert_array_equal(through("presence", logits, request(**made, presence_penalty=value)), presence)


def test_penalties_of_an_empty_answer_change_nothing():
    logits = logits_of(1)[0]
    np.testing.assert_array_equal(through("frequency", logits, request(frequency_penalty=2)), logits)
    np.testing.assert_array_equal(through("presence", logits, request(presence_penalty=2)), logits)


def test_each_row_sees_exactly_its_own_history():
    """C10: neighbours' ids do not leak, in whatever order rows with and without a history stand."""
    logits = np.zeros((4, VOCAB), np.float32)
    made = [
        request(tokens=[1, 2, 3], prompt_length=1, presence_penalty=1, temperature=0),
        request(tokens=[4, 5], temperature=0),
        request(tokens=[6, 7, 7, 8], prompt_length=2, repetition_penalty=2.0, presence_penalty=1, temperature=0),
        request(tokens=[9], prompt_length=0, frequency_penalty=1, temperature=0),
    ]
    batch = collect(made)
    assert batch.history.tolist() == [1, 2, 3, 6, 7, 7, 8, 9] and batch.history_starts.tolist() == [0, 3, 3, 7, 8]
    presence = [np.flatnonzero(stage("presence").apply(logits[i], batch, i)).tolist() for i in (0, 2)]
    assert presence == [[2, 3], [7, 8]]
    assert np.flatnonzero(stage("frequency").apply(logits[3], batch, 3)).tolist() == [9]
    assert np.flatnonzero(stage("repetition").apply(logits[2] + 1, batch, 2) != 1).tolist() == [6, 7, 8]


def test_ban_until_min_tokens():
    logits = logits_of(2)[0]
    best = int(logits.argmax())
    made = {"prompt_length": 3, "stop_ids": {best, 0}, "min_tokens": 2, "temperature": 0}
    for answer, promised, banned in [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, True), (1, 1, False), (0, 2, False)]:
        batch = collect([request(tokens=[1] * (3 + answer), promised=promised, **made)])
        assert batch.position.tolist() == [3 + answer + promised]
        assert sorted(batch.banned.tolist()) == (sorted({best, 0}) if banned else [])
        assert (sample(logits[None], batch)[0] == best) is not banned
    assert collect([request(stop_ids={best}, temperature=0)]).banned.size == 0
    after = through("ban", logits, request(**made))
    assert np.isneginf(after[[best, 0]]).all() and np.isfinite(after).sum() == VOCAB - 2


def test_order_of_stages_matters_and_is_kept():
    """top_k before top_p: of {0.4, 0.3, 0.2, 0.1} the first two, of which top_p 0.55 keeps the first alone (4/7 > 0.55)."""
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2])).astype(np.float32)
    ids = sample(np.tile(logits, (200, 1)), collect(draws(200, top_k=2, top_p=0.55)))
    assert set(ids.tolist()) == {1}
    ids = sample(np.tile(logits, (200, 1)), collect(draws(200, top_p=0.55)))
    assert set(ids.tolist()) == {1, 2}


# ---- greedy


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-20])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_greedy_is_the_exact_argmax(temperature, scale):
    """C12: nothing is divided, so nothing can overflow."""
    logits = logits_of(5, n=8, scale=scale)
    with np.errstate(all="raise", under="ignore"):
        ids = sample(logits, collect(draws(8, temperature=temperature, top_k=7, top_p=0.1, min_p=0.9)))
    assert ids.dtype == np.int32 and ids.tolist() == logits.argmax(1).tolist()


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [300, 40, 41]] = 1
    assert sample(logits, collect(draws(2, temperature=0))).tolist() == [0, 40]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e30, 1.7e308])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
@pytest.mark.parametrize(
    "more", [{}, {"top_k": 9, "top_p": 0.5, "min_p": 0.01}, {"repetition_penalty": 1e-4}, {"repetition_penalty": 1e4}]
)
def test_extremes_neither_warn_nor_fail(temperature, scale, more):
    logits = logits_of(6, n=4, scale=scale)
    logits[:, 7] = -np.inf
    with np.errstate(all="raise", under="ignore"):
        ids = sample(logits, collect(draws(4, tokens=range(VOCAB), temperature=temperature, **more)))
    assert ((ids >= 0) & (ids != 7)).all()


@pytest.mark.parametrize("params", [{"temperature": 1e-5}, {"temperature": 0, "repetition_penalty": 1e4}])
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_excludes_no_token(params, sign):
    logits = np.full((1, VOCAB), sign * 1e37, np.float32)
    assert sample(logits, collect([request(tokens=range(VOCAB), **params)]))[0] >= 0


def test_huge_temperature_is_uniform_over_what_is_kept():
    logits = np.array([[9, -9, 0, -np.inf, 3]], np.float32).repeat(4000, 0)
    counts = np.bincount(sample(logits, collect(draws(4000, temperature=1e30))), minlength=5)
    assert counts[3] == 0 and (np.abs(counts[[0, 1, 2, 4]] - 1000) < 4 * np.sqrt(750)).all()


# ---- rows that cannot be drawn


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"repetition_penalty": 2.0}]
)
@pytest.mark.parametrize("fault", ["nan", "all nan", "inf", "all -inf"])
def test_a_broken_row_is_minus_one_and_alone(params, fault):
    logits = logits_of(7, n=3)
    good = sample(logits, collect(draws(3, **params)))
    logits[1, slice(None) if "all" in fault else 17] = float(fault.split()[-1])
    with np.errstate(all="raise", under="ignore"):
        ids = sample(logits, collect(draws(3, **params)))
    assert ids.tolist() == [good[0], -1, good[2]]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_whose_every_token_is_banned_is_minus_one(temperature):
    logits = logits_of(8, n=2)
    made = [
        request(temperature=temperature, min_tokens=1, stop_ids=range(VOCAB), top_k=3, min_p=0.1, top_p=0.5),
        request(temperature=0),
    ]
    assert sample(logits, collect(made)).tolist() == [-1, logits[1].argmax()]


# ---- the draw


def chi_square(ids: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * len(ids)
    counts = np.bincount(ids, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    return float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())


BASE = np.array([0.30, 0.05, 0.20, 0.02, 0.15, 0.10, 0.08, 0.04, 0.03, 0.03])


def renormalised(p: np.ndarray, keep: list[int]) -> np.ndarray:
    result = np.zeros_like(p)
    result[keep] = p[keep]
    return result / result.sum()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, BASE),
        ({"temperature": 0.5}, BASE**2 / (BASE**2).sum()),
        ({"temperature": 2}, BASE**0.5 / (BASE**0.5).sum()),
        ({"top_k": 3}, renormalised(BASE, [0, 2, 4])),
        ({"top_p": 0.7}, renormalised(BASE, [0, 2, 4, 5])),
        ({"min_p": 0.25}, renormalised(BASE, [0, 2, 4, 5, 6])),
        (
            {"tokens": [0, 2], "prompt_length": 0, "presence_penalty": 1.0},
            renormalised(BASE * np.exp([-1, 0, -1, *[0] * 7]), list(range(10))),
        ),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position", "index"])
def test_drawn_as_often_as_the_formula_says(params, expected, vary):
    """Chi-square below the 99.9 % quantile of nine degrees of freedom, whatever tells the draws apart."""
    n = 4000
    batch = collect([request(**params)] * n)
    batch = dataclasses.replace(batch, **{vary: np.arange(n).astype(getattr(batch, vary).dtype)})
    ids = sample(np.tile(np.log(BASE).astype(np.float32), (n, 1)), batch)
    assert chi_square(ids, expected) < 27.88


@pytest.mark.parametrize(("u", "drawn"), [(2.0**-54, 1), (0.2499, 1), (0.2501, 3), (0.7499, 3), (0.7501, 4), (1 - 2.0**-53, 4)])
def test_draw_inverts_the_cumulative_sum(u, drawn):
    logits = np.log(np.array([1, 1, 1, 2, 1, 1])).astype(np.float32)
    logits[[0, 2, 5]] = -np.inf
    batch = collect([request()])
    batch.__dict__["uniform"] = np.array([u])
    assert kept(stage("draw").apply(logits, batch, 0)) == [drawn]


@pytest.mark.parametrize(("u", "drawn"), [(0.0625, 0), (0.25, 1), (0.5, 2), (0.75, 3)])
def test_draw_takes_the_first_sum_that_exceeds(u, drawn):
    batch = collect([request()])
    batch.__dict__["uniform"] = np.array([u])
    assert kept(stage("draw").apply(np.zeros(4, np.float32), batch, 0)) == [drawn]


@pytest.mark.parametrize("seed", range(20))
def test_draw_with_the_largest_number_is_the_last_token(seed):
    batch = collect([request()])
    batch.__dict__["uniform"] = np.array([1 - 2.0**-53])
    assert kept(stage("draw").apply(logits_of(seed, scale=0.1 * seed)[0], batch, 0)) == [VOCAB - 1]


@pytest.mark.parametrize("u", [2.0**-54, 1 - 2.0**-53])
def test_draw_never_picks_what_has_no_odds(u):
    """Far below the maximum the odds are zero in float64, at both ends of the vocabulary."""
    logits = np.full(VOCAB, -1e5, np.float32)
    logits[100:104] = 0
    batch = collect([request()])
    batch.__dict__["uniform"] = np.array([u])
    assert kept(stage("draw").apply(logits, batch, 0)) == [100 if u < 0.5 else 103]


# ---- same request, same answer


def mixed(n: int) -> list[SimpleNamespace]:
    rng = np.random.default_rng(11)
    made = []
    for i in range(n):
        params = {
            "temperature": float(rng.choice([0, 0.5, 1, 1.3])),
            "top_k": int(rng.choice([0, 5])), "top_p": float(rng.choice([1, 0.8])),
            "min_p": float(rng.choice([0, 0.05])), "repetition_penalty": float(rng.choice([1, 1.2])),
            "frequency_penalty": float(rng.choice([0, 0.5])), "min_tokens": int(rng.choice([0, 50])),
        }  # fmt: skip
        tokens = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        made.append(
            request(tokens=tokens, prompt_length=len(tokens) // 2, seed=int(rng.integers(0, 2**63)), stop_ids={1, i}, **params)
        )
    return made


def test_alone_batched_and_in_any_order_alike():
    """C1, C3: a row's draw depends on nothing but the row."""
    made, logits = mixed(48), logits_of(12, n=48, scale=1.0)
    together = sample(logits, collect(made))
    assert [int(sample(logits[i : i + 1], collect([r]))[0]) for i, r in enumerate(made)] == together.tolist()
    order = np.random.default_rng(1).permutation(48)
    assert sample(logits[order], collect([made[i] for i in order])).tolist() == together[order].tolist()
    assert sample(logits[order], rows(collect(made), order)).tolist() == together[order].tolist()


def test_equal_seeds_in_one_batch_draw_alike_and_unequal_ones_do_not():
    logits = logits_of(13, scale=0.1).repeat(64, 0)
    assert len(set(sample(logits, collect([request(seed=5)] * 64)).tolist())) == 1
    assert len(set(sample(logits, collect(draws(64))).tolist())) > 30
    assert len(set(sample(logits, collect([request(seed=5, index=i) for i in range(64)])).tolist())) > 30


def test_position_counts_promised_tokens():
    """A step that runs ahead of its last id draws with the same number as one that waited for it."""
    ahead, waited = request(tokens=[1, 2], promised=1, seed=9), request(tokens=[1, 2, 3], seed=9)
    assert collect([ahead]).uniform == collect([waited]).uniform == uniform(9, 0, 3)


def test_seeds_are_taken_modulo_two_to_the_64():
    batch = collect([request(seed=s) for s in (-2, 2**64 - 2, 2**63, 0)])
    assert batch.seed.dtype == np.uint64 and batch.seed.tolist() == [2**64 - 2, 2**64 - 2, 2**63, 0]


def test_sample_leaves_its_input_and_reads_strided_rows():
    made, logits = mixed(16), logits_of(14, n=32)
    before = logits.copy()
    ids = sample(logits[::2], collect(made))
    np.testing.assert_array_equal(logits, before)
    assert ids.tolist() == sample(np.ascontiguousarray(logits[::2]), collect(made)).tolist()
    logits.flags.writeable = False
    assert ids.tolist() == sample(logits[::2], collect(made)).tolist()


# ---- the batch


def test_collect_has_the_agreed_arrays():
    made = mixed(5)
    batch = collect(made)
    for name, dtype in pipeline.parameters().items():
        assert batch.values[name].dtype == dtype and batch.values[name].shape == (5,)
        assert batch.values[name].tolist() == [dtype.type(getattr(r.params, name)) for r in made]
    for name in ("index", "position", "history", "history_starts", "prompt_lengths", "banned", "banned_starts"):
        assert getattr(batch, name).dtype == np.int32, name
    assert len(batch.history_starts) == len(batch.banned_starts) == 6
    assert batch.history_starts[-1] == len(batch.history) and batch.banned_starts[-1] == len(batch.banned)
    assert batch.prompt_lengths.tolist() == [r.prompt_length for r in made]


def test_no_rows():
    batch = collect([])
    assert sample(np.empty((0, VOCAB), np.float32), batch).shape == (0,)
    assert rows(collect(mixed(3)), np.zeros(3, bool)).history_starts.tolist() == batch.history_starts.tolist() == [0]


def test_rows_takes_masks_and_indices():
    made = mixed(9)
    mask = np.array([True, False, True, True, False, False, True, False, True])
    for which in (mask, np.flatnonzero(mask)):
        part, whole = rows(collect(made), which), collect([r for r, m in zip(made, mask, strict=True) if m])
        for field in dataclasses.fields(part):
            mine, theirs = getattr(part, field.name), getattr(whole, field.name)
            for a, b in zip(mine.values(), theirs.values(), strict=True) if field.name == "values" else [(mine, theirs)]:
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype
