"""Products and mixtures of every encoding and precision against float64, at shapes that hypothesis picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_world import F64, aligned, drawn_ids, experts, extremes, gated, mlp, stored

from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.products import MATRIX, describe
from cascadia_p2p.engine.matrix import F32, I32, Experts, GatedWeights
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import GROUP, Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import dense

ENCODINGS = [encoding for encoding in Encoding if encoding is not Encoding.BF16]
CODED = [encoding for encoding in ENCODINGS if encoding is not Encoding.F32]
TOLERANCE = {"exact": 1e-5, "fine": 1e-4, "fast": 2e-2}
"""Relative error by precision."""
STEP = {"exact": 0.0, "fine": 1 / (2 * 127 * 254), "fast": 1 / (2 * 127)}
"""What rounding moves an activation by, at most, in parts of its group's largest."""
NOT_FINITE = [np.inf, -np.inf, np.nan]

few = settings(max_examples=25, deadline=None)
encodings = st.sampled_from(ENCODINGS)
precisions = st.sampled_from(sorted(TOLERANCE))
seeds = st.integers(0, 2**32 - 1)
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
every_precision = pytest.mark.parametrize("precision", TOLERANCE)


def draw(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def project(precision: str, matrices: Sequence[StoredMatrix], x: F32, threads: int = 1) -> tuple[F32, ...]:
    return KernelBackend(precision, 64, threads).projections(matrices, "test")(x)


def wide(matrix: StoredMatrix) -> F64:
    return dense(matrix).astype(np.float64)


def check(got: F32, matrix: StoredMatrix, x: F32, tolerance: float) -> None:
    """The error is small beside what the products that are summed come to, signs aside."""
    w, x64 = wide(matrix), x.astype(np.float64)
    size = np.sqrt(x64**2 @ (w**2).T)
    assert got.dtype == np.float32
    assert got.shape == size.shape
    assert np.linalg.norm(got - x64 @ w.T) <= tolerance * np.linalg.norm(size)


def bound(matrix: StoredMatrix, x: F32, precision: str) -> F64:
    """The most that rounding activations in groups can change a product, and rounding of sums besides."""
    w, x64 = np.abs(wide(matrix)), np.abs(x.astype(np.float64))
    fill = -x.shape[1] % GROUP
    groups = np.pad(x64, ((0, 0), (0, fill))).reshape(len(x), -1, GROUP).max(2)
    weights = np.pad(w, ((0, 0), (0, fill))).reshape(len(w), -1, GROUP).sum(2)
    coded = 0.0 if matrix.encoding is Encoding.F32 else STEP[precision]
    return np.asarray(1.01 * coded * (groups @ weights.T) + 4e-6 * (x64 @ w.T))


@few
@given(
    st.lists(st.tuples(encodings, st.integers(1, 70)), min_size=1, max_size=4),
    st.integers(1, 200),
    st.integers(1, 64),
    precisions,
    st.integers(1, 3),
    seeds,
)
def test_projections(
    kinds: list[tuple[Encoding, int]], inputs: int, rows: int, precision: str, threads: int, seed: int
) -> None:
    matrices = [stored(kind, seed + n, outputs, inputs) for n, (kind, outputs) in enumerate(kinds)]
    x = draw(seed, rows, inputs)
    run = KernelBackend(precision, rows, threads).projections(matrices, "test")
    for _ in range(2):
        for matrix, got in zip(matrices, run(x), strict=True):
            check(got, matrix, x, TOLERANCE[precision])


@every_encoding
@every_precision
def test_a_rows_bits_depend_on_nothing_beside_it(encoding: Encoding, precision: str) -> None:
    matrices = [stored(encoding, 5, 53, 136), stored(Encoding.F32, 6, 7, 136)]
    x = draw(7, 64, 136)
    whole = [result.copy() for result in project(precision, matrices, x)]
    rng = np.random.default_rng(8)
    for count in (1, 2, 3, 5, 8, 9, 17, 40):
        rows = rng.permutation(64)[:count]
        for threads in (1, 3):
            for got, expected in zip(project(precision, matrices, x[rows], threads), whole, strict=True):
                assert np.array_equal(got, expected[rows])


@every_encoding
@every_precision
def test_outliers_cost_their_group_and_no_other(encoding: Encoding, precision: str) -> None:
    matrix, x = stored(encoding, 9, 48, 320), draw(10, 9, 320)
    x[:, 77] *= 1000.0
    (got,) = project(precision, [matrix], x)
    error = np.abs(got - x.astype(np.float64) @ wide(matrix).T)
    assert (error <= bound(matrix, x, precision)).all()
    if precision == "fine":
        check(got, matrix, x, 1e-4)


@every_encoding
@every_precision
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39, 1e-31, 1e-20, 1e30])
def test_the_size_of_activations_does_not_matter(encoding: Encoding, precision: str, size: float) -> None:
    matrix, x = stored(encoding, 11, 20, 96), (draw(12, 3, 96) * np.float32(size)).astype(np.float32)
    (got,) = project(precision, [matrix], x)
    error = np.abs(got - x.astype(np.float64) @ wide(matrix).T)
    # Groups below 1e-30 may count as zeros.
    lost = 1e-30 * np.abs(wide(matrix)).sum(1)
    assert (error <= bound(matrix, x, precision) + lost).all()
    assert np.isfinite(got).all()


@every_encoding
@every_precision
def test_no_sum_of_codes_saturates(encoding: Encoding, precision: str) -> None:
    x = np.ones((6, 192), np.float32)
    x[1] = -1.0
    x[2, ::2] = x[3, 1::2] = x[4, 96:] = -1.0
    x[5, ::5] = -1.0
    matrix = extremes(encoding)
    (got,) = project(precision, [matrix], x)
    # The activations are whole codes, so any precision is exact here.
    size = np.abs(wide(matrix)).sum(1)
    assert (np.abs(got - x.astype(np.float64) @ wide(matrix).T) <= 1e-6 * size).all()


@every_precision
@pytest.mark.parametrize("wrong", NOT_FINITE)
def test_a_row_that_is_not_finite_harms_no_other(precision: str, wrong: float) -> None:
    matrices = [stored(encoding, 13, 40, 136) for encoding in ENCODINGS]
    silent = dense(matrices[0]).copy()
    silent[:, 40:] = 0.0
    matrices.append(StoredMatrix.of(silent))
    x = draw(14, 7, 136)
    expected = [result.copy() for result in project(precision, matrices, x)]
    for column in (0, 63, 135):
        marred = x.copy()
        marred[3, column] = wrong
        for got, right in zip(project(precision, matrices, marred), expected, strict=True):
            others = np.arange(7) != 3
            assert np.array_equal(got[others], right[others])
            assert not np.isfinite(got[3]).any()


def test_what_is_not_float32_in_rows_is_taken_as_such() -> None:
    matrix, x = stored(Encoding.INT4, 15, 20, 70), draw(16, 5, 70)
    (expected,) = project("fine", [matrix], x)
    for same in (x.astype(np.float64), np.asfortranarray(x), np.repeat(x, 2, 0)[::2]):
        assert np.array_equal(project("fine", [matrix], same)[0], expected)
    assert project("fine", [matrix], x[:0])[0].shape == (0, 20)


def near(got: F32, expected: F64, precision: str) -> None:
    assert got.shape == expected.shape
    # Three products in a row, whose roundings add up.
    assert np.linalg.norm(got - expected) <= 3 * TOLERANCE[precision] * np.linalg.norm(expected)


@few
@given(encodings, st.integers(17, 140), st.integers(17, 140), st.integers(1, 20), precisions, seeds)
def test_gated_mlp(encoding: Encoding, width: int, inner: int, rows: int, precision: str, seed: int) -> None:
    weights, x = gated(encoding, seed, width, inner), draw(seed, rows, width)
    run = KernelBackend(precision, rows, 2).gated_mlp(weights, 0.75, "test")
    got = run(x).copy()
    near(got, 0.75 * mlp(weights, x.astype(np.float64)), precision)
    for row in {0, rows - 1}:
        assert np.array_equal(run(x[row : row + 1])[0], got[row])


def mixed(encodings_: Sequence[Encoding], seed: int, width: int, inner: int, *stack: int) -> GatedWeights:
    """Gate, up and down each in an encoding of its own."""
    parts = (gated(each, seed + 9 * n, width, inner, *stack) for n, each in enumerate(encodings_))
    gate, up, down = (getattr(part, name) for part, name in zip(parts, ("gate", "up", "down"), strict=True))
    return GatedWeights(gate, up, down)


def shares(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).uniform(0.2, 1.0, shape).astype(np.float32)


@few
@given(
    st.tuples(*[encodings] * 3),
    st.tuples(*[encodings] * 3),
    st.integers(17, 100),
    st.integers(17, 100),
    st.integers(1, 40),
    st.integers(1, 6).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))),
    st.integers(1, 2),
    precisions,
    seeds,
)
def test_experts(
    routed_kinds: tuple[Encoding, ...],
    shared_kinds: tuple[Encoding, ...],
    width: int,
    inner: int,
    rows: int,
    counts: tuple[int, int],
    shared_count: int,
    precision: str,
    seed: int,
) -> None:
    many, chosen = counts
    routed = mixed(routed_kinds, seed, width, inner, many)
    shared = mixed(shared_kinds, seed + 99, width, inner, shared_count)
    x, ids = draw(seed, rows, width), drawn_ids(seed, rows, many, chosen)
    weights, gammas = shares(seed, rows, chosen), shares(seed + 1, rows, shared_count)
    run = KernelBackend(precision, rows, 2).experts(routed, shared, chosen, "test")
    got = run(x, ids, weights, gammas).copy()
    near(got, experts(routed, shared, x, ids, weights, gammas), precision)
    row = rows // 2
    alone = run(*(part[row : row + 1] for part in (x, ids, weights, gammas)))
    assert np.array_equal(alone[0], got[row])


def layer(
    precision: str = "fine", encoding: Encoding = Encoding.INT4, rows: int = 64
) -> tuple[Experts, GatedWeights, GatedWeights]:
    """Five experts of which a row takes two, and one that all take."""
    routed, shared = gated(encoding, 21, 70, 50, 5), gated(encoding, 31, 70, 50, 1)
    return KernelBackend(precision, rows, 1).experts(routed, shared, 2, "test"), routed, shared


ROUTINGS: dict[str, I32] = {
    "all rows the same": np.tile(np.array([1, 4], np.int32), (64, 1)),
    "one expert twice": np.full((64, 2), 3, np.int32),
    "each another": np.stack([np.arange(64) % 5, (np.arange(64) + 1) % 5], 1).astype(np.int32),
    "a single row": np.array([[0, 4]], np.int32),
}


@every_precision
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_any_routing(precision: str, ids: I32) -> None:
    run, routed, shared = layer(precision)
    rows = len(ids)
    x, weights, gammas = draw(22, rows, 70), shares(23, rows, 2), shares(24, rows, 1)
    near(run(x, ids, weights, gammas), experts(routed, shared, x, ids, weights, gammas), precision)


def test_weights_of_zero_take_a_member_out() -> None:
    run, _, shared = layer("exact")
    x, ids = draw(25, 12, 70), drawn_ids(26, 12, 5, 2)
    zero, one = np.zeros((12, 2), np.float32), np.ones((12, 1), np.float32)
    near(run(x, ids, zero, one), mlp(shared, x.astype(np.float64), (0,)), "exact")
    assert not run(x, ids, zero, 0 * one).any()


@every_precision
@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT4, Encoding.INT8])
@pytest.mark.parametrize("wrong", NOT_FINITE)
def test_a_row_that_is_not_finite_harms_no_other_of_a_mixture(
    precision: str, encoding: Encoding, wrong: float
) -> None:
    run, *_ = layer(precision, encoding, 9)
    x, ids, weights, gammas = draw(27, 9, 70), drawn_ids(28, 9, 5, 2), shares(29, 9, 2), shares(30, 9, 1)
    expected = run(x, ids, weights, gammas).copy()
    x[4, 33] = wrong
    got = run(x, ids, weights, gammas)
    others = np.arange(9) != 4
    assert np.array_equal(got[others], expected[others])
    assert not np.isfinite(got[4]).any()


def misaligned(matrix: StoredMatrix) -> StoredMatrix:
    memory = np.zeros(matrix.codes.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 32
    codes = memory[start : start + matrix.codes.nbytes].reshape(matrix.codes.shape)
    codes[...] = matrix.codes
    return replace(matrix, codes=codes)


_INT4 = stored(Encoding.INT4, 1, 40, 100)
_INT8 = stored(Encoding.INT8, 1, 40, 100)
_F32 = stored(Encoding.F32, 1, 40, 100)
assert _INT8.scales is not None
_TWICE = np.zeros(2 * _INT4.codes.nbytes, np.uint8).reshape(-1, *_INT4.codes.shape[1:])
_ODD = np.zeros(4 * _F32.codes.size + 1, np.uint8)[1:].view(np.float32).reshape(_F32.codes.shape)
REFUSED = {
    "bfloat16": stored(Encoding.BF16, 1, 40, 100),
    "codes between cache lines": misaligned(_INT4),
    "codes with gaps": replace(_INT4, codes=_TWICE[::2]),
    "codes of another type": replace(_INT4, codes=_INT4.codes.astype(np.int16)),
    "codes of another shape": replace(_INT4, codes=aligned(stored(Encoding.INT4, 1, 40, 200)).codes),
    "fewer codes than the shape": replace(_INT4, shape=(49, 100)),
    "a stack of one matrix's codes": replace(_INT4, shape=(2, 40, 100)),
    "codes of another encoding": replace(_INT4, encoding=Encoding.INT4_AFFINE),
    "no scales": replace(_INT8, scales=None),
    "too few scales": replace(_INT8, scales=_INT8.scales[:40]),
    "scales with gaps": replace(_INT8, scales=np.repeat(_INT8.scales, 2)[::2]),
    "scales in float64": replace(_INT8, scales=_INT8.scales.astype(np.float64)),
    "float64": replace(_F32, codes=_F32.codes.astype(np.float64)),
    "float16": replace(_F32, codes=_F32.codes.astype(np.float16)),
    "columns first": replace(_F32, codes=np.asfortranarray(_F32.codes)),
    "between float32 numbers": replace(_F32, codes=_ODD),
    "no outputs": StoredMatrix.of(np.zeros((0, 100), np.float32)),
    "no inputs": StoredMatrix.of(np.zeros((40, 0), np.float32)),
    "a vector": StoredMatrix.of(np.zeros(100, np.float32)),
}


@pytest.mark.parametrize("matrix", REFUSED.values(), ids=REFUSED)
def test_a_matrix_that_does_not_lie_right_is_refused(matrix: StoredMatrix) -> None:
    record = np.zeros(1, MATRIX)
    with pytest.raises(CascadiaError):
        describe(record[0], matrix)
    assert record.tobytes() == np.zeros(1, MATRIX).tobytes()


_BACKEND = KernelBackend("fine", 8, 1)
_GATED, _STACK = gated(Encoding.INT4, 1, 64, 48), gated(Encoding.INT4, 1, 64, 48, 3)
_OTHER = gated(Encoding.INT4, 1, 64, 80, 1)
WRONG_PARTS: dict[str, Callable[[], object]] = {
    "inputs differ": lambda: _BACKEND.projections([_INT4, stored(Encoding.INT4, 1, 40, 99)], "p"),
    "a stack": lambda: _BACKEND.projections([stored(Encoding.INT4, 1, 3, 40, 100)], "p"),
    "up is smaller": lambda: _BACKEND.gated_mlp(replace(_GATED, up=_INT4), 1.0, "m"),
    "down is not back": lambda: _BACKEND.gated_mlp(replace(_GATED, down=_GATED.gate), 1.0, "m"),
    "shared ones of another width": lambda: _BACKEND.experts(_STACK, _OTHER, 2, "e"),
    "more than there are": lambda: _BACKEND.experts(_STACK, _STACK, 4, "e"),
    "none": lambda: _BACKEND.experts(_STACK, _STACK, 0, "e"),
    "no stack": lambda: _BACKEND.experts(_GATED, _STACK, 1, "e"),
    "stacks differ": lambda: _BACKEND.experts(replace(_STACK, up=_GATED.up), _STACK, 1, "e"),
}


@pytest.mark.parametrize("make", WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_weights_that_do_not_belong_together_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(CascadiaError):
        make()


def test_calls_that_would_leave_their_memory_are_refused() -> None:
    run = _BACKEND.projections([_INT4], "p")
    for shape in ((9, 100), (8, 99), (100,), (2, 4, 100)):
        with pytest.raises(CascadiaError):
            run(np.zeros(shape, np.float32))
    dense_run = _BACKEND.gated_mlp(_GATED, 1.0, "m")
    for shape in ((9, 64), (8, 63)):
        with pytest.raises(CascadiaError):
            dense_run(np.zeros(shape, np.float32))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1, 2**32])
def test_ids_beyond_the_stack_are_refused(kind: type, wrong: int) -> None:
    run = _BACKEND.experts(_STACK, _STACK, 2, "e")
    x, ids = np.zeros((4, 64), np.float32), np.ones((4, 2), kind)
    weights, shared = np.ones((4, 2), np.float32), np.ones((4, 3), np.float32)
    run(x, ids, weights, shared)
    if wrong > np.iinfo(kind).max:
        return
    ids[2, 1] = wrong
    with pytest.raises(CascadiaError, match="experts"):
        run(x, ids, weights, shared)
    with pytest.raises(CascadiaError):
        run(x, np.ones((4, 3), kind), weights, shared)
    with pytest.raises(CascadiaError):
        run(x, np.ones((4, 2), kind), weights, shared[:, :2])
