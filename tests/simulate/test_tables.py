from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import UsageError
from cascadia_p2p.simulate.tables import StageTable, published_padding, unmixed


def test_lines_between_points_and_beyond_them() -> None:
    table = StageTable(((1, 10.0), (2, 12.0), (8, 30.0)))
    assert [table.of(rows) for rows in (0, 1, 2, 5, 8, 10)] == [0, 10, 12, 21, 30, 36]
    assert table.most_rows == 8


def test_a_single_point_is_proportional() -> None:
    assert StageTable(((4, 10.0),)).of(8) == 20.0


def test_a_line_that_starts_steeply_costs_no_less_than_a_share() -> None:
    assert StageTable(((4, 8.0), (5, 100.0))).of(1) == 2.0


def test_the_published_padding() -> None:
    found = [published_padding(rows) for rows in (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65)]
    assert found == [2, 2, 8, 8, 16, 16, 24, 32, 64, 64, 96]


def test_a_padded_table_jumps_where_a_larger_call_begins() -> None:
    table = StageTable(((1, 1.0), (2, 2.0), (4, 8.0), (8, 10.0), (9, 20.0), (16, 27.0)), published_padding)
    # Three rows are on the line of the calls of eight, not between two and four rows.
    assert [table.of(rows) for rows in (2, 3, 8, 9, 16)] == [2.0, 7.5, 10.0, 20.0, 27.0]
    # No call of 24 was measured: its rows cost what the last of them would.
    assert table.of(17) == table.of(24) == pytest.approx(35.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.floats(0.01, 10), st.floats(0.01, 10))
def test_a_mean_of_two_sizes_is_taken_apart(streams: int, groups: int, small: float, large: float) -> None:
    over = streams % groups
    if not over:
        with pytest.raises(ValueError, match="evenly"):
            unmixed(streams, groups, small, small)
        return
    mean = (over * large + (groups - over) * small) / groups
    assert unmixed(streams, groups, mean, small) == pytest.approx(large, rel=1e-6)


@pytest.mark.parametrize(
    "points", [(), ((0.5, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 0.0),), ((1, float("nan")),)]
)
def test_a_table_that_is_none_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(UsageError, match="table of stage times"):
        StageTable(points)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.1, 10), st.integers(1, 100))
def test_a_scaled_table_takes_so_much_longer(factor: float, rows: int) -> None:
    table = StageTable(((1, 1.0), (2, 2.0), (3, 5.0), (8, 10.0), (9, 20.0), (16, 27.0)), published_padding)
    assert table.scaled(factor).of(rows) == pytest.approx(factor * table.of(rows))
