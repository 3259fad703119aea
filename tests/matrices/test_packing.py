"""Blocks: codes and scales come back from them, and lie where the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.matrices.encoding import (
    GROUP,
    INPUTS,
    OUTPUTS,
    Encoding,
    StoredMatrix,
    stored_bytes,
    stored_view,
)
from cascadia_p2p.matrices.packing import Codes, dense, group_offsets, pack, unpack

RANGES = {
    Encoding.INT4: (-8, 7),
    Encoding.INT4_AFFINE: (0, 15),
    Encoding.INT8: (-127, 127),
    Encoding.INT8_GROUPED: (-128, 127),
}

shapes = st.tuples(st.integers(1, 3), st.integers(1, 35), st.integers(1, 5).map(lambda groups: 32 * groups))
encodings = st.sampled_from(sorted(RANGES))


def draw(
    encoding: Encoding, shape: tuple[int, ...], seed: int
) -> tuple[Codes, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(seed)
    low, high = RANGES[encoding]
    codes = rng.integers(low, high + 1, shape).astype(np.int8)
    if encoding is Encoding.INT8:
        return codes, rng.standard_normal(shape[:-1]).astype(np.float32), None
    halves = rng.standard_normal((2, *shape[:-1], shape[-1] // GROUP)).astype(np.float16).astype(np.float32)
    return codes, halves[0], halves[1] if encoding is Encoding.INT4_AFFINE else None


@settings(max_examples=60, deadline=None)
@given(encodings, shapes, st.integers(0, 2**32))
def test_codes_and_scales_come_back(encoding: Encoding, shape: tuple[int, ...], seed: int) -> None:
    codes, scales, offsets = draw(encoding, shape, seed)
    matrix = pack(encoding, shape, codes, scales, offsets)
    found, found_scales = unpack(matrix)
    rows, inputs = shape[-2:]
    assert np.array_equal(found[..., :rows, :inputs], codes)
    assert not found[..., rows:, :].any()
    assert not found[..., inputs:].any()
    if encoding is Encoding.INT8:
        expected = codes * scales[..., None]
        assert np.array_equal(found_scales[..., :rows], scales)
    else:
        expected = codes * np.repeat(scales, GROUP, axis=-1)
        assert np.array_equal(found_scales[..., :rows, : inputs // GROUP], scales)
        assert not found_scales[..., rows:, :].any()
    if offsets is not None:
        assert np.array_equal(group_offsets(matrix)[..., :rows, : inputs // GROUP], offsets)
        expected = expected + np.repeat(offsets, GROUP, axis=-1)
    assert np.array_equal(dense(matrix), expected.astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(Encoding)), shapes, st.integers(0, 2**32))
def test_a_matrix_is_so_many_bytes_and_a_view_of_them(
    encoding: Encoding, shape: tuple[int, ...], seed: int
) -> None:
    if encoding in RANGES:
        codes, scales, offsets = draw(encoding, shape, seed)
        matrix = pack(encoding, shape, codes, scales, offsets)
    else:
        kind = np.float32 if encoding is Encoding.F32 else np.uint16
        matrix = StoredMatrix(encoding, shape, np.arange(np.prod(shape)).reshape(shape).astype(kind))
    assert matrix.nbytes == stored_bytes(encoding, shape)
    parts = [matrix.codes] if matrix.scales is None else [matrix.codes, matrix.scales]
    raw = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
    assert np.array_equal(dense(stored_view(encoding, shape, raw)), dense(matrix))


@pytest.mark.parametrize(
    ("encoding", "start", "half"), [(Encoding.INT4, 64, 8), (Encoding.INT4_AFFINE, 128, 0)]
)
def test_places_of_4_bit_codes(encoding: Encoding, start: int, half: int) -> None:
    """Every input of every output, one at a time, against the layout in words."""
    for place in range(OUTPUTS * INPUTS):
        output, column = divmod(place, INPUTS)
        codes = np.zeros((OUTPUTS, INPUTS), np.int8)
        codes[output, column] = 5
        zeros = np.zeros((OUTPUTS, 2), np.float32)
        block = pack(encoding, codes.shape, codes, zeros, zeros if half == 0 else None).codes[0, 0]
        group, within = divmod(column, GROUP)
        step, rest = divmod(within, 8)
        high, byte = divmod(rest, 4)
        at = start + group * 256 + step * 64 + output * 4 + byte
        expected = np.full(block.size, half | half << 4, np.uint8)
        expected[:start] = 0
        expected[at] = (5 + half) << 4 | half if high else half << 4 | (5 + half)
        assert np.array_equal(block, expected)


@pytest.mark.parametrize(("encoding", "start"), [(Encoding.INT8, 0), (Encoding.INT8_GROUPED, 64)])
def test_places_of_8_bit_codes(encoding: Encoding, start: int) -> None:
    for place in range(OUTPUTS * INPUTS):
        output, column = divmod(place, INPUTS)
        codes = np.zeros((OUTPUTS, INPUTS), np.int8)
        codes[output, column] = -5
        scales = np.zeros((OUTPUTS,) if start == 0 else (OUTPUTS, 2), np.float32)
        block = pack(encoding, codes.shape, codes, scales).codes[0, 0]
        expected = np.full(block.size, 128, np.uint8)
        expected[:start] = 0
        expected[start + column // 4 * 64 + output * 4 + column % 4] = 123
        assert np.array_equal(block, expected)
