"""What is looked at of rows before they are encoded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.matrices.energy import largest_magnitude, row_energies

shapes = st.tuples(st.integers(1, 9), st.integers(1, 100))


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 3), st.integers(0, 2**32))
def test_rows_at_any_distance(shape: tuple[int, int], step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((shape[0] * step, shape[1])).astype(np.float32)[::step]
    weights = rng.standard_normal(shape[1]).astype(np.float32)
    x.flags.writeable = False
    assert largest_magnitude(x) == np.abs(x).max()
    expected = ((x.astype(np.float64) * weights) ** 2).sum(1)
    np.testing.assert_allclose(row_energies(x, weights), expected, rtol=1e-5)
    np.testing.assert_allclose(row_energies(x.T, np.ones(len(x), np.float32)), (x.T**2).sum(1), rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_one_number_that_is_none_shows(shape: tuple[int, int], value: float, data: st.DataObject) -> None:
    x = np.ones(shape, np.float32)
    x[data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))] = value
    assert np.isnan(largest_magnitude(x))


def test_weights_of_another_length_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"weights are \(3,\): expected \(4,\)"):
        row_energies(np.ones((2, 4), np.float32), np.ones(3, np.float32))
