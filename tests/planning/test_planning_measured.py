"""The file of a node's measurements."""

from __future__ import annotations

import orjson
import pytest
from planning_world import GIGABIT, node, timed

from cascadia_p2p.errors import UsageError
from cascadia_p2p.planning.measured import MeasuredNode, Timed, read_measured, told_apart


def test_what_is_written_is_read_back() -> None:
    times = timed([(1, 37.8), (8, 11.3)]) + timed([(1, 11.6)], Timed.HEAD)
    one = node("a", 108e9, times=times, memory_shown=61 * 2**30, gpu_limit=53 * 2**30)
    two = node("b", 50e9, hops=({"to": "a", "rate": 1e8, "latency_s": 1e-3},))
    assert read_measured(one.model_dump_json().encode(), "a.json") == [one]
    both = orjson.dumps([one.model_dump(mode="json"), two.model_dump(mode="json")])
    assert read_measured(both, "all.json") == [one, two]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bandwidth": -1}, "bandwidth"),
        ({"bandwidth": None}, "bandwidth"),
        ({"speed": 3}, "speed"),
        ({"format": 2}, "format"),
        ({"name": ""}, "name"),
        ({"link": {"rate": 1e8}}, "link.latency_s"),
        ({"times": [{"part": "layer", "rows": 1, "seconds": 1}]}, "times.0.part"),
        ({"times": [{"part": "head", "rows": 0, "seconds": 1}]}, "times.0.rows"),
        ({"times": [{"part": "head", "rows": 1, "seconds": 1}] * 2}, "head has two times for 1 rows"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, object], named: str) -> None:
    good = node("a", 1e9, GIGABIT).model_dump(mode="json")
    with pytest.raises(UsageError, match=r"^x\.json is no profile of a node: ") as caught:
        read_measured(orjson.dumps(good | change), "x.json")
    assert named in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"3", b"[3]", b'{"name": "a"', b"\xff"])
def test_other_files_are_refused_in_words(raw: bytes) -> None:
    with pytest.raises(UsageError, match=r"^x\.json is no profile of a node: "):
        read_measured(raw, "x.json")


def test_nodes_of_one_name_are_told_apart() -> None:
    nodes = [node("a", 1e9), node("b", 1e9), node("a", 2e9)]
    assert [each.name for each in told_apart(nodes)] == ["a-1", "b", "a-2"]
    many: list[MeasuredNode] = [node("x" * 64, 1e9)] * 3
    assert len({each.name for each in told_apart(many)}) == 3
