"""Drawn tokens: the generator, the cuts, the draw and the scores, each against a plain reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from engine_world import Promise, Ring, Window, operations
from fixtures.reference import load_case
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.engine.footprint import Backend
from cascadia_p2p.engine.kernels.sampling import Scratch, draw_numbers, rank_tokens, sample_tokens
from cascadia_p2p.engine.kernels.vocabulary import pick_tokens
from cascadia_p2p.engine.memory import head_buffer_bytes
from cascadia_p2p.engine.sampling import SlotSampling
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.models.sizes import Matrices, Part
from cascadia_p2p.types import GREEDY, Sampling
from cascadia_p2p.wire.frames import MAX_ALTERNATIVES, OperationKind, SegmentError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
some = settings(max_examples=150, deadline=None)
seeds = st.integers(0, 2**64 - 1)


def numbers(seed: int, positions: npt.NDArray[np.uint64]) -> F64:
    out = np.empty(len(positions), np.float64)
    draw_numbers(np.full(len(positions), seed, np.uint64), positions.astype(np.uint64), out)
    return out


@dataclass(frozen=True)
class Drawn:
    tokens: list[int]
    logprobs: F32
    weights: F32
    """Of the last row, zero where a cut has taken a token away."""


def draw(logits: F32, draws: F64, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Drawn:
    rows, vocabulary = logits.shape
    tokens, logprobs = np.empty(rows, np.int32), np.empty(rows, np.float32)
    pick_tokens(logits, tokens, logprobs, np.empty(rows, np.bool_))
    scratch = Scratch(vocabulary)
    sample_tokens(
        logits,
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int64),
        np.full(rows, top_p, np.float32),
        draws,
        scratch,
        tokens,
        logprobs,
    )
    return Drawn(tokens.tolist(), logprobs, scratch.weights)


def kept_by_reference(x: F32, weights: F32, top_k: int, top_p: float) -> npt.NDArray[np.bool_]:
    """Sort everything, then cut: by rank, then by the running sum before each token."""
    order = np.lexsort((np.arange(len(x)), -x))
    if top_k:
        order = order[:top_k]
    mass = weights[order].astype(np.float64)
    if top_p < 1.0:
        before = np.cumsum(mass) - mass
        order = order[before < float(np.float32(top_p)) * mass.sum()]
    kept = np.zeros(len(x), np.bool_)
    kept[order] = True
    return kept


def token_by_reference(weights: F64, number: float) -> int:
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


def random_logits(rng: np.random.Generator, vocabulary: int, levels: int) -> F32:
    """A row of many ties where levels are few."""
    if levels:
        return (rng.integers(0, levels, (1, vocabulary)) * 0.7).astype(np.float32)
    return rng.normal(0, 3, (1, vocabulary)).astype(np.float32)


# --- the generator ----------------------------------------------------------------------------------------


@some
@given(seeds, st.integers(0, 2**32 - 1))
def test_a_number_is_that_of_numpys_philox_for_this_key_and_counter(seed: int, position: int) -> None:
    expected = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    assert numbers(seed, np.array([position])).tolist() == [expected]


def test_numbers_are_even_and_neighbours_do_not_depend_on_each_other() -> None:
    count = 100_000
    one = numbers(7, np.arange(count))
    assert one.min() >= 0.0
    assert one.max() < 1.0
    for series in (one, numbers(8, np.arange(count)), (one[1:] - one[:-1]) % 1.0):
        found = np.histogram(series, 64, (0.0, 1.0))[0]
        statistic = ((found - len(series) / 64) ** 2).sum() / (len(series) / 64)
        assert statistic < 63 + 4 * np.sqrt(2 * 63)


# --- the draw ---------------------------------------------------------------------------------------------


@some
@given(st.integers(1, 900), st.sampled_from([0, 1, 2, 5]), st.floats(0.05, 20.0), seeds)
def test_weights_are_those_of_a_softmax(vocabulary: int, levels: int, temperature: float, seed: int) -> None:
    x = random_logits(np.random.default_rng(seed), vocabulary, levels)
    drawn = draw(x, np.zeros(1), temperature)
    expected = np.exp((x[0].astype(np.float64) - x.max()) / np.float32(temperature))
    # An argument of -87 at most is rounded to float32 before its exponential is taken.
    assert drawn.weights == pytest.approx(expected, rel=2e-5, abs=1e-37)


@some
@given(
    st.integers(1, 900),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.integers(0, 1000),
    st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    seeds,
)
def test_the_same_number_draws_the_token_of_the_reference(
    vocabulary: int, levels: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = random_logits(rng, vocabulary, levels)
    weights = draw(x, np.zeros(1), temperature).weights
    kept = kept_by_reference(x[0], weights, top_k, top_p)
    left = np.where(kept, weights, 0.0)
    for number in (*rng.random(4), 0.0):
        drawn = draw(x, np.array([number]), temperature, top_k, top_p)
        assert drawn.weights.tolist() == left.tolist()
        assert drawn.tokens == [token_by_reference(left.astype(np.float64), number)]
    # Where rounding decides, some token that is left is drawn.
    assert left[draw(x, np.array([1.0 - 2.0**-53]), temperature, top_k, top_p).tokens[0]] > 0


@pytest.mark.parametrize("top_k", [1, 7, 50, 3000, 3200, 150_000])
def test_cuts_of_a_large_vocabulary(top_k: int) -> None:
    x = random_logits(np.random.default_rng(3), 200_058, 0)
    weights = draw(x, np.zeros(1), 1.0).weights
    for top_p in (1.0, 0.9, 0.2):
        kept = kept_by_reference(x[0], weights, top_k, top_p)
        assert np.array_equal(draw(x, np.array([0.4]), 1.0, top_k, top_p).weights > 0, kept & (weights > 0))


def test_cuts_of_logits_over_the_whole_range_of_float32() -> None:
    """Each bin holds most of what is left, again and again."""
    x = np.geomspace(3e38, 1e-38, 300).astype(np.float32)
    x = np.concatenate([x, -x, [0.0, -0.0]])[None].astype(np.float32)
    for top_k in (1, 2, 100, 300, 301, 302, 303, 601):
        kept = np.flatnonzero(draw(x, np.zeros(1), 1.0, top_k).weights).tolist()
        assert kept == [0]
        ranked = np.zeros(1, np.int32), np.empty((1, 20), np.int32)
        rank_tokens(
            x, ranked[0], np.zeros(1, np.float32), np.array([20]), ranked[1], np.empty((1, 20), np.float32)
        )
        assert ranked[1].tolist() == [list(range(20))]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (2.0, 20, 1.0), (0.8, 0, 0.9)])
def test_tokens_come_as_often_as_their_probability_says(temperature: float, top_k: int, top_p: float) -> None:
    x = random_logits(np.random.default_rng(4), 60, 0) / 2
    count = 40_000
    tokens = draw(np.repeat(x, count, 0), numbers(99, np.arange(count)), temperature, top_k, top_p).tokens
    weights = np.exp(x[0].astype(np.float64) / temperature)
    weights[~kept_by_reference(x[0], weights.astype(np.float32), top_k, top_p)] = 0.0
    expected = weights / weights.sum() * count
    found = np.bincount(tokens, minlength=60)
    assert (found[expected == 0] == 0).all()
    often = expected >= 5
    freedom = int(often.sum()) - 1
    statistic = ((found - expected)[often] ** 2 / expected[often]).sum()
    assert freedom > 5
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@some
@given(st.integers(2, 400), st.integers(1, 400), st.floats(0.01, 0.99), seeds)
def test_cuts_are_those_of_transformers(vocabulary: int, top_k: int, top_p: float, seed: int) -> None:
    """Its TopKLogitsWarper, then its TopPLogitsWarper, on logits without ties, where they say the same."""
    x = np.random.default_rng(seed).permutation(vocabulary).astype(np.float32) / 16
    scores = x.astype(np.float64)
    scores[scores < np.sort(scores)[-min(top_k, vocabulary)]] = -np.inf
    ascending = np.argsort(scores)
    probabilities = np.exp(scores[ascending] - scores.max())
    probabilities /= probabilities.sum()
    removed = np.cumsum(probabilities) <= 1 - top_p
    removed[-1] = False
    scores[ascending[removed]] = -np.inf
    margin = np.abs(np.cumsum(probabilities) - (1 - top_p)).min()
    kept = draw(x[None].copy(), np.zeros(1), 1.0, top_k, top_p).weights > 0
    # What lies on the border within float32 may go either way.
    assert margin < 1e-6 or np.array_equal(kept, np.isfinite(scores))


@some
@given(st.integers(1, 500), st.sampled_from([0, 2, 5]), st.floats(0.0, 1.0, exclude_max=True), seeds)
def test_one_candidate_or_no_heat_is_the_greedy_choice(
    vocabulary: int, levels: int, number: float, seed: int
) -> None:
    x = random_logits(np.random.default_rng(seed), vocabulary, levels)
    greedy = [int(x[0].argmax())]
    at = np.array([number])
    assert draw(x, at, 5.0, top_k=1).tokens == greedy
    assert draw(x, at, 5.0, top_p=1e-6).tokens == greedy
    assert draw(x, at, 5.0, top_p=0.0).tokens == greedy
    assert draw(x, at, 0.0).tokens == greedy
    # Ties stay ties at every temperature.
    best = np.flatnonzero(x[0] == x.max()).tolist()
    for temperature in (1e-4, 1e-30, 1e-45):
        assert draw(x, at, temperature).tokens[0] in best or temperature == 1e-4
        assert draw(x, at, temperature, top_k=1).tokens == greedy


# --- scores -----------------------------------------------------------------------------------------------


@some
@given(st.integers(1, 700), st.sampled_from([0, 1, 3]), st.integers(0, MAX_ALTERNATIVES), seeds)
def test_scores_are_those_of_the_whole_vocabulary_at_temperature_1(
    vocabulary: int, levels: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = np.repeat(random_logits(rng, vocabulary, levels), 2, 0)
    expected = x[0] - x.max() - np.log(np.exp(x[0].astype(np.float64) - x.max()).sum())
    drawn = draw(x, rng.random(2), 3.0, top_k=40, top_p=0.9)
    assert np.abs(drawn.logprobs - expected[drawn.tokens]).max() < 1e-5
    found, scores = np.full((2, MAX_ALTERNATIVES), -7, np.int32), np.empty((2, MAX_ALTERNATIVES), np.float32)
    tokens = np.array(drawn.tokens, np.int32)
    rank_tokens(x, tokens, drawn.logprobs, np.array([count, 0]), found, scores)
    named = min(count, vocabulary)
    order = np.lexsort((np.arange(vocabulary), -x[0]))[:named]
    assert found[0, :named].tolist() == order.tolist()
    assert np.abs(scores[0, :named] - expected[order]).max(initial=0.0) < 1e-5
    assert (found[0, named:] == -7).all()
    assert (found[1] == -7).all()


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    x, one, two = np.zeros((2, 9), np.float32), np.zeros(1, np.float32), np.zeros(2, np.float32)
    ids = np.zeros(2, np.int32)
    with pytest.raises(CascadiaError, match=r"temperatures has shape \[1\]"):
        sample_tokens(x, one, np.zeros(2, np.int64), two, np.zeros(2), Scratch(9), ids, two)
    with pytest.raises(CascadiaError, match=r"scratch has shape \[8\] where the kernel needs \[9\]"):
        sample_tokens(x, two, np.zeros(2, np.int64), two, np.zeros(2), Scratch(8), ids, two)
    with pytest.raises(CascadiaError, match=r"found has shape \[2, 3\] where the kernel needs \[2, 4\]"):
        rank_tokens(x, ids, two, np.array([0, 4]), np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    with pytest.raises(CascadiaError, match="positions has shape"):
        draw_numbers(np.zeros(2, np.uint64), np.zeros(3, np.uint64), np.zeros(2))


def test_drawing_takes_the_memory_that_is_planned_for_it() -> None:
    taken = sum(array.nbytes for array in vars(Scratch(200_058)).values())
    planned = head_buffer_bytes(Matrices(Part.HEAD, 200_058, 8), Promise(1, 64, 0), Backend.KERNELS)
    assert 0.9 * planned < taken <= planned


# --- streams ----------------------------------------------------------------------------------------------

RECIPE = load_case("tiny12").recipe
PROMPT = tuple(np.random.default_rng(6).integers(0, RECIPE.vocab_valid, 20).tolist())
WARM = Sampling(temperature=1.3, top_k=60, top_p=0.95, seed=2**64 - 3)


@cache
def ring(*split: int) -> Ring:
    return Ring(RECIPE, split, Promise(slots=3, context=160, rows=64))


@cache
def drawn_alone() -> tuple[int, ...]:
    return ring(12).generate(1, PROMPT, 30, 64, sampling=WARM)


def test_drawn_tokens_do_not_depend_on_stages_windows_and_slots() -> None:
    assert len(set(drawn_alone())) > 10
    assert drawn_alone() != ring(12).generate(2, PROMPT, 30, 64)
    for split, window, slot in (((12,), 7, 2), ((4, 4, 4), 64, 0), ((4, 4, 4), 5, 1), ((2, 9, 1), 40, 2)):
        assert ring(*split).generate(3, PROMPT, 30, window, slot, WARM) == drawn_alone()


def test_a_stream_put_back_draws_what_it_would_have_drawn() -> None:
    """As after a lost node: what it generated is part of its prompt then."""
    for made in (1, 11, 29):
        again = ring(4, 4, 4).generate(9, PROMPT + drawn_alone()[:made], 30 - made, 64, 1, WARM)
        assert again == drawn_alone()[made:]


def test_other_seeds_draw_other_tokens_and_every_part_of_the_options_counts() -> None:
    others = [
        Sampling(1.3, 60, 0.95, seed=2**64 - 4),
        Sampling(1.3, 60, 0.95, seed=2**32 - 3),
        Sampling(2.6, 60, 0.95, WARM.seed),
        Sampling(1.3, 2, 0.95, WARM.seed),
        Sampling(1.3, 60, 0.1, WARM.seed),
    ]
    made = [ring(12).generate(1, PROMPT, 12, 64, sampling=each) for each in (WARM, *others)]
    assert len(set(made)) == len(made)


def test_company_with_other_options_changes_nothing() -> None:
    world = ring(4, 4, 4)
    world.start(1, 0, Sampling(temperature=5.0, seed=1), alternatives=3)
    world.start(2, 1, WARM, alternatives=20)
    world.start(3, 2)
    ids = {1: list(PROMPT), 2: list(PROMPT), 3: list(PROMPT)}
    at = dict.fromkeys(ids, 0)
    for _ in range(30):
        windows = [Window(stream, at[stream], ids[stream][at[stream] :], stream - 1, True) for stream in ids]
        marked, rows = world.send(windows)
        records, alternatives = world.stages[-1].tokens(marked, rows)
        assert records["alternatives"].tolist() == [3, 20, 0]
        assert len(alternatives) == 23
        logits = world.stages[-1].logits(rows)[np.cumsum(marked["rows"]) - 1]
        expected = logits - logits.max(1, keepdims=True)
        expected = expected - np.log(np.exp(expected.astype(np.float64)).sum(1, keepdims=True))
        for record, scores, part in zip(records, expected, np.split(alternatives, [3, 23]), strict=True):
            assert record["logprob"] == pytest.approx(scores[record["token"]], abs=1e-5)
            assert part["token"].tolist() == np.argsort(-scores, stable=True)[: len(part)].tolist()
            assert part["logprob"] == pytest.approx(scores[part["token"]], abs=1e-5)
            stream = int(record["stream"])
            at[stream] = len(ids[stream])
            ids[stream].append(int(record["token"]))
    assert tuple(ids[2][len(PROMPT) :]) == drawn_alone()
    assert tuple(ids[3][len(PROMPT) :]) == ring(12).generate(5, PROMPT, 30, 64)


def test_options_are_those_of_the_slots_newest_stream() -> None:
    world = ring(12)
    world.start(1, 0, WARM, alternatives=4)
    swap = operations((OperationKind.RELEASE, 1, 0), (OperationKind.START, 2, 0))
    marked, rows = world.send([Window(2, 0, PROMPT, 0, True)], swap)
    records, alternatives = world.stages[-1].tokens(marked, rows)
    assert records["token"].tolist() == [int(world.stages[-1].logits(rows)[-1].argmax())]
    assert len(alternatives) == 0


def test_starts_of_slots_that_do_not_exist_are_passed_over() -> None:
    SlotSampling(2).operate(operations((OperationKind.START, 1, 2), (OperationKind.START, 1, 2**32 - 1)))


def test_rows_that_are_not_finite_draw_nothing_and_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ring(12)
    model = world.stages[-1].model
    real = model.logits

    def spoilt(x: F32) -> F32:
        logits = real(x)
        logits[0, 3] = np.nan
        return logits

    monkeypatch.setattr(model, "logits", spoilt, raising=True)
    for stream, slot, sampling in ((1, 0, WARM), (2, 1, GREEDY)):
        world.start(stream, slot, sampling, alternatives=2)
    marked, rows = world.send([Window(1, 0, PROMPT, 0, True), Window(2, 0, PROMPT, 1, True)])
    records, alternatives = world.stages[-1].tokens(marked, rows)
    assert records["status"].tolist() == [SegmentError.NON_FINITE, SegmentError.NONE]
    assert records["alternatives"].tolist() == [0, 2]
    assert records["token"][0] == -1
    assert alternatives["token"][0] == records["token"][1]
