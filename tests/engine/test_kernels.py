"""Kernels against plain formulas in float64, at shapes that hypothesis picks."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from engine_world import own_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.engine.kernels.attention import Attention, AttentionSizes, AttentionWeights
from cascadia_p2p.engine.kernels.convolution import ResidualConvolution
from cascadia_p2p.engine.kernels.norms import embed, look_up, normalise
from cascadia_p2p.engine.kernels.router import Router
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.kernels.vocabulary import pick_tokens
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.types import Promise

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
EPS = 1e-6

few = settings(max_examples=40, deadline=None)
widths = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)


def draw(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


def table(*windows: tuple[int, int, int]) -> RowTable:
    """Slot, start and count of each window."""
    slots, starts, counts = np.array(windows, np.int32).T
    return RowTable.from_windows(*(np.ascontiguousarray(part) for part in (slots, starts, counts)))


def close(got: F32, expected: F64, tolerance: float = 3e-6) -> None:
    scale = np.abs(expected).max() if expected.size else 1.0
    assert np.abs(got - expected).max(initial=0.0) <= tolerance * scale


def rms(x: npt.NDArray[np.floating], weight: F32) -> F64:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


@few
@given(st.integers(0, 5), widths, st.sampled_from([1.0, 24.0]), seeds)
def test_norm(rows: int, width: int, divisor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = draw(rng, rows, width), draw(rng, width)
    out = np.full_like(x, np.nan)
    normalise(x, weight, EPS, out, divisor)
    close(out, rms(x, weight) / divisor)
    normalise(x, weight, EPS, x, divisor)
    assert np.array_equal(x, out)


@few
@given(st.integers(0, 5), widths, seeds)
def test_embedding(rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words, weight = draw(rng, 9, width), draw(rng, width)
    ids = rng.integers(0, 9, rows).astype(np.int32)
    out = np.full((rows, width), np.nan, np.float32)
    embed(ids, words, weight, EPS, out)
    stored = words.astype(ml_dtypes.bfloat16)
    rounded, whole = np.empty_like(out), np.empty_like(out)
    embed(ids, stored.view(np.uint16), weight, EPS, rounded)
    embed(ids, stored.astype(np.float32), weight, EPS, whole)
    assert np.array_equal(rounded, whole)
    look_up(ids, stored.view(np.uint16), rounded)
    assert np.array_equal(rounded, stored[ids].astype(np.float32))
    look_up(ids, words, rounded)
    assert np.array_equal(rounded, words[ids])
    close(out, rms(words[ids], weight))


def convolve(inputs: npt.NDArray[np.floating], weight: F32) -> F64:
    """`conv(x) + x` over a whole sequence."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, inputs.shape[1])), inputs.astype(np.float64)])
    return inputs + sum(padded[t : t + len(inputs)] * weight[:, t] for t in range(taps))


@few
@given(widths, st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=6), seeds)
def test_convolution_with_residual_and_norm(width: int, taps: int, counts: list[int], seed: int) -> None:
    """One sequence in windows of any sizes, another one beside it in the same calls."""
    rng = np.random.default_rng(seed)
    total = sum(counts)
    weight, norm = draw(rng, width, taps), draw(rng, width)
    inputs, start = draw(rng, 2, total, width), draw(rng, 2, total, width)
    layer = ResidualConvolution(weight, 3, 2, norm, EPS, 5)
    expected = start + np.stack([convolve(sequence, weight) for sequence in inputs])
    at = 0
    for count in counts:
        here = slice(at, at + count)
        x = np.concatenate([start[0, here], start[1, here]])
        update = np.concatenate([inputs[0, here], inputs[1, here]])
        normed = np.empty_like(x)
        failed = np.full(2 * count, -1, np.int32)
        layer(table((2, at, count), (0, at, count)), x, update, normed, failed)
        wanted = np.concatenate([expected[0, here], expected[1, here]])
        close(x, wanted)
        # Of the sum as rounded: where it nearly cancels, the norm would show its rounding many times over.
        close(normed, rms(x, norm), 1e-5)
        assert (failed == -1).all()
        at += count


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 17, 20])
def test_a_sum_that_is_not_finite_marks_its_row_with_the_first_layer(value: float, column: int) -> None:
    layer = ResidualConvolution(np.zeros((21, 4), np.float32), 2, 2, None, EPS, 7)
    x, update = np.ones((3, 21), np.float32), np.zeros((3, 21), np.float32)
    update[1:, column] = value
    failed = np.array([-1, -1, 4], np.int32)
    layer(table((0, 0, 3)), x, update, np.empty_like(x), failed)
    assert failed.tolist() == [-1, 7, 4]


class Reference:
    """Attention over whole sequences, in float64."""

    def __init__(
        self, sizes: AttentionSizes, weights: AttentionWeights, scaling: tuple[float, float] | None
    ) -> None:
        self.sizes, self.weights, self.scaling = sizes, weights, scaling

    def __call__(self, q: F32, k: F32, v: F32, r: F32) -> F64:
        s, w = self.sizes, self.weights
        n, group = len(q), s.heads // s.kv_heads
        queries = rms(q.reshape(n, s.heads, s.dim), w.q_norm)
        keys = rms(convolve(k, w.k_conv).reshape(n, s.kv_heads, s.dim), w.k_norm).repeat(group, 1)
        values = convolve(v, w.v_conv).reshape(n, s.kv_heads, s.dim).repeat(group, 1)
        scores = np.einsum("phd,jhd->hpj", queries, keys) / s.dim
        profiles = r.reshape(n, s.heads, s.ranks).astype(np.float64) @ w.profiles
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        in_reach = (distance >= 0) & (distance < s.extent)
        index = np.clip(distance, 0, s.extent - 1)
        scores += np.where(in_reach, profiles.transpose(1, 0, 2)[:, np.arange(n)[:, None], index], 0.0)
        if self.scaling is not None:
            floor, alpha = self.scaling
            scores *= (1 + alpha * np.log(np.maximum((np.arange(n) + 1) / floor, 1)))[:, None]
        hidden = (distance < 0) | (distance >= (s.window or n + 1))
        scores[:, hidden] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return np.einsum("hpj,jhd->phd", shares, values).reshape(n, -1)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[AttentionSizes, tuple[float, float] | None, int]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    window = draw(st.none() | st.sampled_from([1, 5, 40, 64, 100]))
    sizes = AttentionSizes(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 8, 16, 20, 64, 72, 128])),
        ranks=draw(st.integers(1, 6)),
        extent=draw(st.sampled_from([1, 7, 64, 90, 400])),
        window=window,
        taps=draw(st.integers(1, 4)),
    )
    scaling = draw(st.none() | st.tuples(st.sampled_from([3.0, 50.0]), st.sampled_from([0.1, 0.5])))
    return sizes, scaling, draw(st.integers(1, 33))


@settings(max_examples=60, deadline=None)
@given(attentions(), st.integers(1, 210), seeds)
def test_attention(
    drawn: tuple[AttentionSizes, tuple[float, float] | None, int], length: int, seed: int
) -> None:
    """Two sequences side by side, appended in windows, against whole sequences."""
    sizes, scaling, step = drawn
    rng = np.random.default_rng(seed)
    width = sizes.kv_heads * sizes.dim
    weights = AttentionWeights(
        draw(rng, sizes.dim) + 2,
        draw(rng, sizes.dim) + 2,
        draw(rng, width, sizes.taps),
        draw(rng, width, sizes.taps),
        draw(rng, sizes.ranks, sizes.extent),
    )
    promise = Promise(slots=3, context=210, rows=2 * step)
    blocks = own_blocks(promise, sizes.window, 4)
    attention = Attention(sizes, weights, blocks, 4, EPS, scaling)
    q, k, v, r = (
        draw(rng, 2, length, n) for n in (sizes.heads * sizes.dim, width, width, sizes.heads * sizes.ranks)
    )
    got = np.empty_like(q)
    for at in range(0, length, step):
        here = slice(at, min(at + step, length))
        count = here.stop - at
        inputs = [np.concatenate([part[0, here], part[1, here]]) for part in (q, k, v, r)]
        out = np.full((2 * count, q.shape[2]), np.nan, np.float32)
        attention(table((2, at, count), (1, at, count)), *inputs, out)
        got[0, here], got[1, here] = out[:count], out[count:]
    reference = Reference(sizes, weights, scaling)
    for sequence in range(2):
        close(got[sequence], reference(q[sequence], k[sequence], v[sequence], r[sequence]), 2e-5)


def test_pet_07_keys_and_values_take_their_memory_when_they_are_made() -> None:
    """A cache that grew on demand would pass here at first and fail days later."""
    sizes = AttentionSizes(8, 8, 128, 4, 64, None, 4)
    weights = AttentionWeights(
        *(np.ones(n, np.float32) for n in (128, 128)),
        *(np.ones((1024, 4), np.float32) for _ in range(2)),
        np.ones((4, 64), np.float32),
    )
    promised = 2 * 4096 // 64 * sizes.block_bytes()

    def resident() -> int:
        """Bytes that are in memory and of no file, of which the system may drop what it likes."""
        info = psutil.Process().memory_info()
        return int(info.rss - getattr(info, "shared", 0))

    # What other tests left is not to be freed in between.
    gc.collect()
    before = resident()
    attention = Attention(sizes, weights, own_blocks(Promise(2, 4096, 64), None, 16), 16, EPS, None)
    after = resident()
    assert after - before > 0.95 * promised
    rows = np.ones((64, 1024), np.float32)
    out = np.empty_like(rows)
    for at in range(0, 4096, 64):
        attention(table((0, at, 32), (1, at, 32)), rows, rows, rows, rows[:, :32].copy(), out)
    assert resident() - after < 0.1 * promised


@few
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 30), widths, st.integers(0, 4), seeds)
def test_router(chosen: int, shared: int, more: int, width: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = chosen + more - 1
    weight, bias = draw(rng, experts + shared, width), 0.2 * draw(rng, experts)
    x = draw(rng, rows, width)
    ids = np.full((rows, chosen), -1, np.int32)
    weights, always = np.empty((rows, chosen), np.float32), np.empty((rows, shared), np.float32)
    Router(weight, bias, 2.5, 8)(x, ids, weights, always)
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ weight.T)))
    for row in range(rows):
        choice = scores[row, :experts] + bias
        taken = ids[row].tolist()
        assert taken == sorted(set(taken))
        left_out = np.delete(choice, taken)
        assert left_out.max(initial=-np.inf) <= choice[taken].min() + 1e-6
        parts = np.concatenate([scores[row, taken], scores[row, experts:]])
        close(np.concatenate([weights[row], always[row]]), parts / parts.sum() * 2.5)


def route(logits: list[float], bias: list[float], chosen: int) -> tuple[list[int], F32, F32]:
    """Routing of one row with these logits, the last of which is a shared expert's."""
    weight = np.array(logits, np.float32)[:, None]
    ids = np.empty((1, chosen), np.int32)
    weights, shared = np.empty((1, chosen), np.float32), np.empty((1, 1), np.float32)
    router = Router(weight, np.array(bias, np.float32), 1.0, 1)
    router(np.ones((1, 1), np.float32), ids, weights, shared)
    return ids[0].tolist(), weights[0], shared[0]


def test_router_ties_go_to_the_lower_id() -> None:
    assert route([1.0] * 20, [0.0] * 19, 3)[0] == [0, 1, 2]
    # Both sigmoids are exactly one in float32, however different the logits.
    assert route([-9.0, 40.0, -9.0, 60.0, 0.0], [0.0] * 4, 1)[0] == [1]


def test_router_bias_decides_the_choice_but_not_the_weights() -> None:
    ids, weights, shared = route([0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0], 2)
    assert ids == [0, 2]
    assert np.concatenate([weights, shared]) == pytest.approx([1 / 3] * 3)


def test_router_weights_stay_exact_where_every_sigmoid_vanishes() -> None:
    _, weights, shared = route([-200.0, -201.0, -200.0], [0.0, 0.0], 2)
    whole = 2 + np.exp(-1)
    assert np.concatenate([weights, shared]) == pytest.approx(
        [1 / whole, np.exp(-1) / whole, 1 / whole], rel=1e-6
    )


def test_router_gives_usable_ids_for_rows_that_are_not_finite() -> None:
    ids, weights, _ = route([np.nan] * 6, [0.0] * 5, 3)
    assert ids == [0, 1, 2]
    assert np.isnan(weights).all()


@few
@given(st.integers(1, 700), st.integers(1, 3), seeds)
def test_token_choice(vocabulary: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Few distinct values, so that ties are common.
    logits = (rng.integers(-3, 4, (rows, vocabulary)) * 10).astype(np.float32)
    tokens, logprobs = np.empty(rows, np.int32), np.empty(rows, np.float32)
    finite = np.empty(rows, np.bool_)
    pick_tokens(logits, tokens, logprobs, finite)
    assert tokens.tolist() == logits.argmax(1).tolist()
    expected = -np.log(np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True)).sum(1))
    assert np.abs(logprobs - expected).max() < 2e-6
    assert finite.all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_token_choice_tells_logits_that_are_not_finite(value: float) -> None:
    logits = np.zeros((3, 37), np.float32)
    logits[1, 36] = value
    finite = np.empty(3, np.bool_)
    pick_tokens(logits, np.empty(3, np.int32), np.empty(3, np.float32), finite)
    assert finite.tolist() == [True, False, True]


def test_wrong_shapes_and_types_are_refused_before_memory_is_touched() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(CascadiaError, match=r"weight has shape \[7\] where the kernel needs \[8\]"):
        normalise(x, np.zeros(7, np.float32), EPS, x)
    with pytest.raises(TypeError):
        normalise(x.astype(np.float64), np.zeros(8, np.float32), EPS, x)
    layer = ResidualConvolution(np.zeros((8, 4), np.float32), 1, 0, None, EPS, 0)
    with pytest.raises(CascadiaError, match="update has shape"):
        layer(table((0, 0, 2)), x, x[:1], x, np.zeros(2, np.int32))
