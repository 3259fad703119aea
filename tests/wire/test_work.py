"""What a node's status says of its work: bounded, and harmless where it is not as expected."""

from __future__ import annotations

import pytest

from cascadia_p2p.wire.work import MAX_PARTS, WorkReport, read_work

GOOD = {
    "seconds": {"experts": 3.0, "glue": 1},
    "frames": 4,
    "rows": 8,
    "wait_s": 6.0,
    "send_s": 0,
    "other_s": 1.0,
}


def test_means_and_shares() -> None:
    work = read_work({**GOOD, "frame_ms": {}, "new": 1})
    assert work is not None
    assert work.busy_s == 5.0
    assert work.frame_ms() == {"experts": 750.0, "glue": 250.0, "other": 250.0}
    assert work.row_ms() == {"experts": 375.0, "glue": 125.0, "other": 125.0}
    assert list(work.shares().items()) == [("experts", 0.6), ("glue", 0.2), ("other", 0.2)]
    assert WorkReport(seconds={}).frame_ms() == {}
    assert WorkReport(seconds={"head": 0.0}).shares() == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "work",
        {},
        {"seconds": [1]},
        {**GOOD, "seconds": {"experts": -1.0}},
        {**GOOD, "seconds": {"experts": "long"}},
        {**GOOD, "seconds": {"two\nlines": 1.0}},
        {**GOOD, "seconds": {str(n): 1.0 for n in range(MAX_PARTS + 1)}},
        {**GOOD, "frames": -1},
        {**GOOD, "rows": 1e300},
    ],
)
def test_anything_else_is_no_report(value: object) -> None:
    assert read_work(value) is None  # type: ignore[arg-type]
