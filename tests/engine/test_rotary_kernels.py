"""The Llama family's kernels against plain formulas in float64, at shapes that hypothesis picks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from engine_world import own_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.engine.kernels.residual import ResidualSum
from cascadia_p2p.engine.kernels.rotary import angles
from cascadia_p2p.engine.kernels.rotary_attention import RotaryAttention, RotarySizes, RotaryWeights
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.models.llama.rotary import Rotary
from cascadia_p2p.types import Promise

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
EPS = 1e-5
PROMISE = Promise(slots=2, context=200, rows=64)
TABLE = own_blocks(Promise(1, 64, 64), None, 16)
NONE = np.empty(0, np.float32)

few = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def draw(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


def close(got: F32, expected: F64, tolerance: float = 5e-6) -> None:
    scale = np.abs(expected).max() if expected.size else 1.0
    assert np.abs(got - expected).max(initial=0.0) <= tolerance * scale


def rows(slot: int, start: int, count: int) -> RowTable:
    return RowTable.from_windows(*(np.array([value], np.int32) for value in (slot, start, count)))


def turned(x: F64, frequencies: F32) -> F64:
    """Every row of [rows, heads, dim] turned by its place, with pairs as complex numbers."""
    half = len(frequencies)
    place = np.arange(len(x), dtype=np.float64)[:, None, None]
    pairs = x[..., :half] + 1j * x[..., half : 2 * half]
    pairs = pairs * np.exp(1j * place * frequencies.astype(np.float64))
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


def normed(x: F64, weight: F32) -> F64:
    return x if not weight.size else x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def attention(q: F32, k: F32, v: F32, sizes: RotarySizes, weights: RotaryWeights, frequencies: F32) -> F64:
    """Attention over one whole sequence, in float64."""
    count, group = len(q), sizes.heads // sizes.kv_heads
    parts = []
    for x, bias, norm in ((q, weights.q_bias, weights.q_norm), (k, weights.k_bias, weights.k_norm)):
        heads = (x.astype(np.float64) + (bias if bias.size else 0.0)).reshape(count, -1, sizes.dim)
        parts.append(turned(normed(heads, norm), frequencies))
    values = (v.astype(np.float64) + (weights.v_bias if weights.v_bias.size else 0.0)).reshape(
        count, -1, sizes.dim
    )
    queries, keys = parts[0], np.repeat(parts[1], group, axis=1)
    scores = np.einsum("ihd,jhd->hij", queries, keys) / math.sqrt(sizes.dim)
    i, j = np.arange(count)[:, None], np.arange(count)[None]
    hidden = (j > i) | (j <= i - (sizes.window or count))
    scores[:, hidden] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", shares, np.repeat(values, group, axis=1)).reshape(count, -1)


@few
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 20).map(lambda half: 2 * half),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([None, 1, 30, 64]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
    seeds,
)
def test_rotary_attention(
    kv_heads: int,
    group: int,
    dim: int,
    share: float,
    window: int | None,
    biased: bool,
    with_norms: bool,
    counts: list[int],
    seed: int,
) -> None:
    """A sequence cut into any windows, with and without biases and norms, whole or part of a head turned."""
    counts = counts[: next((n for n in range(1, 5) if sum(counts[:n]) >= PROMISE.context), 4)]
    total = min(sum(counts), PROMISE.context)
    rng = np.random.default_rng(seed)
    pairs = max(1, int(dim * share) // 2)
    sizes = RotarySizes(kv_heads * group, kv_heads, dim, pairs, window)
    q, k, v = draw(rng, total, sizes.heads * dim), *(draw(rng, total, kv_heads * dim) for _ in "kv")
    widths = (sizes.heads * dim, kv_heads * dim, kv_heads * dim)
    weights = RotaryWeights(
        *(draw(rng, width) if biased else NONE for width in widths),
        *(draw(rng, dim) if with_norms else NONE for _ in "qk"),
    )
    frequencies = Rotary(2 * pairs, 100.0).frequencies()
    table = own_blocks(PROMISE, window, 16)
    layer = RotaryAttention(sizes, weights, table, EPS)
    out, at = np.full_like(q, np.nan), 0
    for count in counts:
        here = slice(at, min(at + count, total))
        window_rows = rows(1, at, here.stop - at)
        cosines, sines = (np.empty((len(window_rows), pairs), np.float32) for _ in range(2))
        angles(window_rows.positions, frequencies, cosines, sines)
        layer(window_rows, q[here], k[here], v[here], cosines, sines, out[here])
        at = here.stop
        if at == total:
            break
    close(out, attention(q, k, v, sizes, weights, frequencies), 2e-5)


@few
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.floats(2.0, 1e7), st.integers(1, 64))
def test_angles_are_those_of_float32_products(positions: list[int], theta: float, pairs: int) -> None:
    """As in transformers: position x frequency rounded to float32, then exact functions of that."""
    frequencies = Rotary(2 * pairs, theta).frequencies()
    cosines, sines = (np.empty((len(positions), pairs), np.float32) for _ in range(2))
    angles(np.array(positions, np.int32), frequencies, cosines, sines)
    products = np.array(positions, np.float32)[:, None] * frequencies[None]
    assert products.dtype == np.float32
    exact = products.astype(np.float64)
    assert np.abs(cosines - np.cos(exact)).max() < 1e-7
    assert np.abs(sines - np.sin(exact)).max() < 1e-7


@few
@given(st.integers(0, 5), st.integers(1, 70), st.booleans(), st.booleans(), seeds)
def test_residual_sum(count: int, width: int, biased: bool, followed: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, update = draw(rng, count, width), draw(rng, count, width)
    bias, norm = (draw(rng, width) if there else None for there in (biased, followed))
    wanted = x.astype(np.float64) + (update.astype(np.float64) + (0.0 if bias is None else bias))
    out = np.full_like(x, 7.0)
    failed = np.full(count, -1, np.int32)
    ResidualSum(width, bias, norm, EPS, 3)(x, update, out, failed)
    close(x, wanted)
    if norm is None:
        assert (out == 7.0).all()
    else:
        close(out, normed(x.astype(np.float64), norm))
    assert (failed == -1).all()


def test_a_sum_that_is_not_finite_is_marked_with_its_first_layer() -> None:
    x, update = np.ones((4, 20), np.float32), np.ones((4, 20), np.float32)
    update[1, 19], update[3, 0] = np.inf, np.nan
    failed = np.array([-1, -1, -1, 2], np.int32)
    ResidualSum(20, None, None, EPS, 6)(x, update, np.empty_like(x), failed)
    assert failed.tolist() == [-1, 6, -1, 2]


def test_shapes_that_do_not_fit_are_refused() -> None:
    sizes = RotarySizes(4, 2, 8, 4, None)
    good = RotaryWeights(NONE, NONE, NONE, NONE, NONE)
    with pytest.raises(CascadiaError, match=r"k_bias has shape \[8\] where the kernel needs \[16\]"):
        RotaryAttention(sizes, RotaryWeights(NONE, np.zeros(8, np.float32), NONE, NONE, NONE), TABLE, EPS)
    layer = RotaryAttention(sizes, good, TABLE, EPS)
    q, kv, turn = (np.zeros((1, width), np.float32) for width in (32, 16, 3))
    with pytest.raises(CascadiaError, match=r"cosines has shape \[1, 3\] where the kernel needs \[1, 4\]"):
        layer(rows(0, 0, 1), q, kv, kv, turn, turn, q)
    with pytest.raises(CascadiaError, match=r"norm has shape \[5\]"):
        ResidualSum(6, None, np.zeros(5, np.float32), EPS, 0)
