"""Quantising: never worse than the plain rules, exact where it can be, and in blocks of any matrix."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.compiled import compiling
from cascadia_p2p.matrices.encoding import GROUP, Encoding
from cascadia_p2p.matrices.packing import dense, pack, unpack
from cascadia_p2p.matrices.quantise import LARGEST, encode

F32 = npt.NDArray[np.float32]
CODED = (Encoding.INT4, Encoding.INT8, Encoding.INT8_GROUPED)

shapes = st.tuples(st.integers(1, 37), st.integers(1, 150))
seeds = st.integers(0, 2**32)
sizes = st.sampled_from([1e-9, 3e-6, 2e-4, 0.02, 1.0, 900.0])
few = settings(max_examples=60, deadline=None)


def weights(kind: str, shape: tuple[int, int], size: float, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    values = {"normal": rng.standard_normal, "laplace": lambda s: rng.laplace(size=s)}.get(kind)
    drawn = rng.standard_normal(shape) if values is None else values(shape)
    if kind == "outliers":
        drawn[rng.random(shape) < 0.02] *= 50
    if kind == "positive":
        drawn = np.abs(drawn)
    if kind == "sparse":
        drawn[rng.random(shape) < 0.9] = 0
    return (drawn * size).astype(np.float32)


kinds = st.sampled_from(["normal", "laplace", "outliers", "positive", "sparse"])


def grouped(values: F32) -> npt.NDArray[np.float64]:
    """Groups of 32 inputs, filled up with zeros."""
    missing = -values.shape[1] % GROUP
    return np.pad(values.astype(np.float64), ((0, 0), (0, missing))).reshape(len(values), -1, GROUP)


def half(scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return scales.astype(np.float32).astype(np.float16).astype(np.float64)


def error(groups: npt.NDArray[np.float64], scales: npt.NDArray[np.float64], low: int, high: int) -> F32:
    """Squared errors of groups at these scales."""
    safe = np.where(scales == 0, 1, scales)[..., None]
    codes = np.where(scales[..., None] == 0, 0, np.clip(np.rint(groups / safe), low, high))
    return ((groups - codes * scales[..., None]) ** 2).sum(-1)


@few
@given(st.sampled_from([Encoding.INT4, Encoding.INT8_GROUPED]), kinds, shapes, sizes, seeds)
def test_groups_are_never_worse_than_by_the_plain_rules(
    encoding: Encoding, kind: str, shape: tuple[int, int], size: float, seed: int
) -> None:
    low, high = (-8, 7) if encoding is Encoding.INT4 else (-128, 127)
    values = weights(kind, shape, size, seed)
    groups = grouped(values)
    place = np.abs(groups).argmax(-1)[..., None]
    extreme = np.take_along_axis(groups, place, -1)[..., 0]
    ours = ((groups - grouped(dense(encode(encoding, values)))) ** 2).sum(-1)
    symmetric, whole = half(np.abs(extreme) / high), half(extreme / low)
    # Squares are summed in float32, and a number at a tie may go either way.
    slack = 1e-4 * np.abs(extreme) ** 2 * (1e-3 if encoding is Encoding.INT8_GROUPED else 1)
    assert (ours <= error(groups, symmetric, low, high) + slack).all()
    assert (ours <= error(groups, whole, low, high) + slack).all()
    # Half a step, and what FP16 takes off the scale at the largest code.
    step = np.maximum(symmetric, 2.0**-24)
    assert (np.sqrt(ours / GROUP) <= step * (0.5 + high * 2.0**-11) + high * 2.0**-25).all()


@few
@given(kinds, shapes, sizes, seeds)
def test_rows_are_never_worse_than_with_the_largest_at_127(
    kind: str, shape: tuple[int, int], size: float, seed: int
) -> None:
    values = weights(kind, shape, size, seed)
    rows = values.astype(np.float64)[:, None]
    plain = (np.abs(values).max(1) / np.float32(127)).astype(np.float64)[:, None]
    ours = ((values - dense(encode(Encoding.INT8, values)).astype(np.float64)) ** 2).sum(1)
    step = plain[:, 0] ** 2 * shape[1]
    assert (ours <= error(rows, plain, -127, 127)[:, 0] + 2e-5 * step).all()
    assert (ours <= 0.2501 * step).all()


@pytest.mark.parametrize(
    ("kind", "symmetric", "whole"), [("normal", 0.71, 0.9), ("laplace", 0.73, 0.93), ("outliers", 0.9, 0.98)]
)
def test_four_bits_lose_less(kind: str, symmetric: float, whole: float) -> None:
    """Squared error against the plain rules at the same bytes."""
    values = weights(kind, (256, 1024), 0.02, 5)
    groups = grouped(values)
    place = np.abs(groups).argmax(-1)[..., None]
    extreme = np.take_along_axis(groups, place, -1)[..., 0]
    ours = ((groups - grouped(dense(encode(Encoding.INT4, values)))) ** 2).sum()
    assert ours < symmetric * error(groups, half(np.abs(extreme) / 7), -8, 7).sum()
    assert ours < whole * error(groups, half(extreme / -8), -8, 7).sum()


@few
@given(st.sampled_from(CODED), shapes, st.sampled_from([2.0**-22, 1e-3, 1.0, 500.0]), seeds)
def test_what_was_quantised_before_comes_back_exactly(
    encoding: Encoding, shape: tuple[int, int], size: float, seed: int
) -> None:
    # Scales of 8-bit groups are FP16's subnormal numbers below that, and miss the largest code.
    size = 500.0 if encoding is Encoding.INT8_GROUPED else size
    once = dense(encode(encoding, weights("normal", shape, size, seed)))
    again = dense(encode(encoding, once))
    if encoding is Encoding.INT8:
        np.testing.assert_allclose(again, once, rtol=3e-7)
    else:
        assert np.array_equal(again, once)


@few
@given(shapes, st.integers(1, 8), st.sampled_from([-15, -8, 0, 3]), seeds)
def test_groups_of_any_few_codes_come_back_exactly(
    shape: tuple[int, int], most: int, power: int, seed: int
) -> None:
    """Also where no code is the largest possible, and where FP16 has no half of the scale."""
    rng = np.random.default_rng(seed)
    rows, inputs = shape
    groups = -(-inputs // GROUP)
    codes = rng.integers(-most, min(most, 7) + 1, shape).astype(np.int8)
    scales = (rng.choice([-1, 1], (rows, groups)) * rng.uniform(1, 2, (rows, groups)) * 2.0**power).astype(
        np.float16
    )
    values = dense(pack(Encoding.INT4, shape, codes, scales.astype(np.float32)))
    assert np.array_equal(dense(encode(Encoding.INT4, values)), values)


@pytest.mark.parametrize(("kind", "encoding"), [("Q4_0", Encoding.INT4), ("Q8_0", Encoding.INT8_GROUPED)])
def test_blocks_of_gguf_files_come_back_exactly(kind: str, encoding: Encoding) -> None:
    form = gguf.GGMLQuantizationType[kind]
    values = weights("outliers", (64, 512), 0.05, 3)
    decoded = gguf.dequantize(gguf.quantize(values, form), form)
    assert np.array_equal(dense(encode(encoding, decoded)), decoded)


@few
@given(st.sampled_from(CODED), shapes, seeds, st.data())
def test_an_output_does_not_depend_on_its_company(
    encoding: Encoding, shape: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    values = weights("laplace", shape, 1.0, seed)
    order = data.draw(st.permutations(range(shape[0])))
    assert np.array_equal(dense(encode(encoding, values[order])), dense(encode(encoding, values))[order])


@pytest.mark.parametrize("encoding", CODED)
def test_strided_and_read_only_rows_are_taken_as_they_are(encoding: Encoding) -> None:
    values = weights("normal", (40, 96), 1.0, 1)
    values.flags.writeable = False
    alone = dense(encode(encoding, np.array(values[1::2])))
    assert np.array_equal(dense(encode(encoding, values[1::2])), alone)


@pytest.mark.parametrize("encoding", CODED)
def test_two_threads_give_the_bytes_of_one(encoding: Encoding) -> None:
    values = weights("normal", (200, 300), 1.0, 2)
    one = encode(encoding, values)
    compiling.set_threads(2)
    try:
        compiling.warm_up()
        two = encode(encoding, values)
    finally:
        compiling.set_threads(1)
    assert np.array_equal(one.codes, two.codes)
    assert one.scales is None or two.scales is not None
    assert one.scales is None or np.array_equal(one.scales, two.scales)


@pytest.mark.parametrize("encoding", CODED)
def test_the_ends_of_the_range(encoding: Encoding) -> None:
    """Zeros, numbers too small for a scale, and the largest that there is a scale for."""
    values = np.zeros((6, 64), np.float32)
    values[1, 3], values[2, 40], values[3, 5] = 2.0**-26, 1e-40, LARGEST
    values[4], values[5] = -LARGEST, np.linspace(-1, 1, 64) * LARGEST
    found = dense(encode(encoding, values))
    assert np.isfinite(found).all()
    assert not found[0].any()
    assert not found[2].any()
    if encoding is not Encoding.INT8:
        assert not found[1].any()
    np.testing.assert_allclose(found[4], values[4], rtol=1e-3)
    assert abs(found[3, 5] / LARGEST - 1) < 0.13
    codes, scales = unpack(encode(encoding, values))
    assert np.isfinite(scales).all()
    assert not codes[6:].any()


@few
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_bfloat16_is_rounded_to_the_nearest(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    found = dense(encode(Encoding.BF16, values))
    assert np.array_equal(found, values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(dense(encode(Encoding.BF16, found)), found)
