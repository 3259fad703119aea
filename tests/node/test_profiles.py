"""Profiles that a machine keeps: found again for the same subject only, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.node.profiles import find_profile, layer_seconds, pace, profile_path, write_profile
from cascadia_p2p.planning.measured import FrameTime, Link, MeasuredNode, Subject

SUBJECT = Subject(fingerprint="0" * 64, shard=1, device="GPU.1", precision="fine", cache="f32", threads=8)


def frame(rows: int, seconds: float, kind: str = "decode") -> FrameTime:
    return FrameTime.model_validate(
        {
            "kind": kind,
            "rows": rows,
            "positions": 128,
            "frames": 5,
            "seconds": seconds,
            "parts": {"experts": seconds},
            "read_bytes": 10**6,
            "bus_before": 5e10,
            "bus_after": 5e10,
        }
    )


def measured(*frames: FrameTime) -> MeasuredNode:
    link = Link(rate=1e8, latency_s=1e-3)
    return MeasuredNode(name="pc", bandwidth=5e10, link=link, subject=SUBJECT, frames=frames)


def test_what_was_kept_is_found_for_the_same_subject_only(tmp_path: Path) -> None:
    node = measured(frame(1, 0.01), frame(8, 0.02))
    assert find_profile(tmp_path, SUBJECT) is None
    write_profile(profile_path(tmp_path, SUBJECT), node)
    assert find_profile(tmp_path, SUBJECT) == node
    for change in (
        {"fingerprint": "1" * 64},
        {"shard": 2},
        {"device": "CPU"},
        {"precision": "exact"},
        {"cache": "bf16"},
        {"threads": 4},
    ):
        assert find_profile(tmp_path, SUBJECT.model_copy(update=change)) is None


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"[]", b"\xff\xfe", b"{}", b" " * (2 << 20)])
def test_a_damaged_file_is_as_none(tmp_path: Path, raw: bytes) -> None:
    path = profile_path(tmp_path, SUBJECT)
    path.parent.mkdir()
    path.write_bytes(raw)
    assert find_profile(tmp_path, SUBJECT) is None


def test_another_subjects_content_is_as_none(tmp_path: Path) -> None:
    other = SUBJECT.model_copy(update={"shard": 3})
    write_profile(profile_path(tmp_path, SUBJECT), measured().model_copy(update={"subject": other}))
    assert find_profile(tmp_path, SUBJECT) is None


def test_a_place_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("in the way")
    with pytest.raises(CascadiaError, match="the profile can not be written to "):
        write_profile(profile_path(tmp_path, SUBJECT), measured())


def test_times_for_the_scheduler_come_from_decoding_frames_and_behind_them_from_windows() -> None:
    windows = (frame(4, 0.4, "prefill"), frame(64, 0.5, "prefill"))
    node = measured(frame(8, 0.018), frame(1, 0.011), *windows)
    assert pace(node) == ((1, 0.011), (8, 0.018), (64, 0.5))
    assert layer_seconds(node, 5) == pytest.approx(0.1)
    assert pace(measured(frame(8, 0.02))) == ()
    assert layer_seconds(measured(), 5) == 0.0
    assert layer_seconds(measured(frame(8, 1e5)), 5) == 60.0
