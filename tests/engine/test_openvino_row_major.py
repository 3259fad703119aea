"""Blocks turned row-major: every code and scale where a plugin looks for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_world import INTEGER, RANGES, stored

from cascadia_p2p.engine.openvino import row_major
from cascadia_p2p.engine.openvino.row_major import (
    Element,
    RowMajor,
    attenuated,
    cut_inputs,
    cut_outputs,
    joined_inputs,
    row_major_stack,
    with_scales_of,
)
from cascadia_p2p.matrices.encoding import GROUP, Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import dense, pack

F32 = npt.NDArray[np.float32]


def numbers(matrix: RowMajor) -> F32:
    """What a plugin reads: nibbles in two's complement, low first; a scale for one row or for 32 inputs."""
    codes = matrix.codes
    if matrix.element is Element.I4:
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(matrix.shape).astype(np.int8)
        codes = np.where(nibbles > 7, nibbles - 16, nibbles)
    if matrix.scales is None:
        return np.asarray(codes, np.float32)
    assert codes.shape == matrix.shape
    scales = matrix.scales.astype(np.float32)
    if matrix.grouped:
        scales = np.repeat(scales, GROUP, axis=-1)
    values = codes.astype(np.float32) * scales
    if matrix.offsets is not None:
        values += np.repeat(matrix.offsets, GROUP, axis=-1)
    return np.asarray(values)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(list(Encoding)),
    st.integers(1, 70),
    st.integers(1, 200),
    st.integers(0, 40),
    st.integers(0, 3),
)
def test_a_matrix_is_turned_and_filled_up(
    encoding: Encoding, outputs: int, inputs: int, more: int, groups: int
) -> None:
    matrix = stored(encoding, outputs + inputs, outputs, inputs)
    wide = (-(-inputs // GROUP) + groups) * GROUP
    found = row_major.row_major(matrix, outputs + more, wide)
    assert found.shape == (outputs + more, wide)
    values = numbers(found)
    if encoding is Encoding.INT4_AFFINE:
        # The offset is rounded once more; inputs that fill up a group are zeros, whatever their weights.
        assert np.allclose(values[:outputs, :inputs], dense(matrix), rtol=0, atol=1e-6)
        inputs = -(-inputs // GROUP) * GROUP
    else:
        assert np.array_equal(values[:outputs, :inputs], dense(matrix))
    assert not values[outputs:].any()
    assert not values[:, inputs:].any()


@pytest.mark.parametrize("encoding", INTEGER)
def test_matrices_larger_than_what_is_turned_at_once(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_major, "_CHUNK", 5000)
    matrix = stored(encoding, 1, 250, 160)
    assert np.array_equal(numbers(row_major.row_major(matrix, 250, 160)), dense(matrix))


@pytest.mark.parametrize("encoding", INTEGER)
def test_every_code_survives(encoding: Encoding) -> None:
    low, high = RANGES[encoding]
    codes = np.resize(np.arange(low, high + 1, dtype=np.int16), (32, 256)).astype(np.int8)
    scales = np.ones((32, 1 if encoding is Encoding.INT8 else 8), np.float32)
    matrix = pack(encoding, (32, 256), codes, scales[:, 0] if encoding is Encoding.INT8 else scales)
    assert np.array_equal(numbers(row_major.row_major(matrix, 32, 256)), codes.astype(np.float32))


@pytest.mark.parametrize("encoding", list(Encoding))
def test_stacks_stand_behind_one_another(encoding: Encoding) -> None:
    first, second = stored(encoding, 1, 3, 20, 64), stored(encoding, 2, 2, 20, 64)
    found = row_major_stack([first, second], 24, 96, least=7)
    assert found.shape == (7, 24, 96)
    values = numbers(found)
    assert np.array_equal(values[:3, :20, :64], dense(first))
    assert np.array_equal(values[3:5, :20, :64], dense(second))
    assert not values[5:].any()


@pytest.mark.parametrize("encoding", [*INTEGER, Encoding.F32])
def test_slices_add_up_to_the_whole(encoding: Encoding) -> None:
    matrix = stored(encoding, 1, 48, 192)
    whole = row_major.row_major(matrix, 48, 192)
    assert np.array_equal(numbers(cut_outputs(whole, 3)).reshape(48, 192), dense(matrix))
    parts = cut_inputs(whole, 3)
    assert parts.shape == (3, 48, 64)
    assert np.array_equal(np.concatenate(list(numbers(parts)), axis=1), dense(matrix))
    if encoding is not Encoding.INT8:
        assert np.array_equal(numbers(joined_inputs(parts)), dense(matrix))


def test_float32_that_needs_no_filling_is_not_copied() -> None:
    values = np.ones((2, 5, 7), np.float32)
    assert row_major_stack([StoredMatrix.of(values)], 5, 7).codes is values


@pytest.mark.parametrize("encoding", [*INTEGER, Encoding.F32])
@pytest.mark.parametrize("exponent", [0, 1, 4, 14, 24])
def test_attenuation_is_exact(encoding: Encoding, exponent: int) -> None:
    """FP16 scales near its end would lose bits: they become float32 then."""
    matrix = row_major.row_major(stored(encoding, 1, 32, 64), 32, 64)
    smaller = attenuated(matrix, exponent)
    assert np.array_equal(np.ldexp(numbers(smaller), exponent), numbers(matrix))
    if encoding is Encoding.INT4:
        assert smaller.scales is not None
        assert smaller.scales.dtype == (np.float16 if exponent <= 4 else np.float32)


def test_scales_become_fp16_only_where_they_keep_their_precision() -> None:
    codes = np.ones((2, 64), np.int8)

    def kind(*scales: float) -> np.dtype[np.generic]:
        matrix = RowMajor(Element.I8, (2, 64), codes, np.array(scales, np.float32)[:, None])
        found = with_scales_of(matrix, half=True).scales
        assert found is not None
        return found.dtype

    assert kind(0.01, 1.2345) == np.float16
    assert kind(0.01, 0.0) == np.float16
    assert kind(0.01, 3e-7) == np.float32
    assert kind(0.01, 7e4) == np.float32
    assert with_scales_of(RowMajor(Element.F32, (2, 64), codes.astype(np.float32)), True).scales is None
