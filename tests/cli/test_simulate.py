"""The command, in this process: what it prints and writes, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from cascadia_p2p.cli import main

ROOT = Path(__file__).resolve().parents[2]
PROFILES = str(ROOT / "configs" / "fleet-of-eleven.profile.json")
MODEL = str(ROOT / "configs" / "inkling-975b")
SHORT = ["--tokens", "8", "--prompt", "2"]


def test_the_published_fleet_as_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    flags = ["--streams", "11,22", "--place", "--json", str(out), "--plot", str(picture), *SHORT]
    assert main(["simulate", "published", *flags]) == 0
    printed = capsys.readouterr().out
    assert "role 3" in printed
    assert "33.87" in printed
    assert "best order and split" in printed
    report = orjson.loads(out.read_bytes())
    assert [(each["policy"], each["streams"]) for each in report["levels"]] == [
        ("ours", 11),
        ("ours", 22),
        ("published", 11),
        ("published", 22),
    ]
    assert report["fleet"]["stages"][10]["head_ms"][0] == 11.6
    assert [each["label"] for each in report["placements"]][::2] == [
        "as given",
        "best order",
        "best split",
        "best order and split",
    ]
    assert len(report["published"]) == 15
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_fleet_of_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", MODEL, "--device", "GPU", "--streams", "88", "--hop-ms", "1", *SHORT]
    split = ["--split", "7,6,6,6,6,6,6,6,6,6,5", "--order", "3,1,2,0,4,5,6,7,8,9,10"]
    assert main(["simulate", PROFILES, *flags, *split]) == 0
    printed = capsys.readouterr().out
    assert "layers 7,6,6,6,6,6,6,6,6,6,5" in printed
    assert "published:" not in printed


def test_the_best_split_and_slots_that_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--split", "best", "--most-layers", "6", "--slots", "8", "--streams", "20", "--policy", "ours"]
    assert main(["simulate", "published", *flags, *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "layers 7,6,6,5,6,6,6,6,6,6,6, 8 slots" in printed


def test_without_matplotlib_a_plot_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["simulate", "published", "--plot", str(tmp_path / "curve.png")]) == 1
    said = capsys.readouterr()
    assert "pip install 'cascadia-p2p[plot]'" in said.err
    assert said.out == ""


def test_one_profile_for_many_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one.json"
    one.write_bytes(orjson.dumps(orjson.loads(Path(PROFILES).read_bytes())[1]))
    flags = ["--model", MODEL, "--nodes", "13", "--streams", "13", "--policy", "ours", *SHORT]
    assert main(["simulate", str(one), *flags]) == 0
    assert "13 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["published", "--streams", "x"], "--streams 'x'"),
        (["published", "--tokens", "1"], "at least 2"),
        (["published", "--prompt", "0"], "--prompt is 0"),
        (["published", "--gap-ms", "-1"], "gap"),
        (["published", "--hop-ms", "-1"], "a hop of"),
        (["published", "--slots", "0"], "--slots is 0"),
        (["published", "--rows", "0"], "--rows is 0"),
        (["published", "--order", "1,2"], "each of the machines 0 to 10"),
        (["published", "--order", "a"], "whole numbers"),
        (["published", "--split", "6,6"], "expected 11 numbers of layers"),
        (["published", "--order", "best", "--split", "6,6"], "for both or for one"),
        (["published", "--model", "m"], "--model is for fleets of profiles"),
        (["published", "--plot", "curve.jpg"], "end in .png"),
        (["published", "--plot", "/nowhere/curve.png"], "no directory"),
        (["published", "--json", "/nowhere/curve.json"], "no directory"),
        (["published", "--split", "best", "--most-layers", "5"], "can hold"),
        (["nothing.json", "--model", MODEL], "neither 'published' nor a profile"),
        ([PROFILES], "give --model"),
        ([PROFILES, "--model", MODEL, "--nodes", "3"], "--nodes 3 with 11 profiles"),
        ([PROFILES, "--model", "nothing"], "is no model"),
    ],
)
def test_what_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert said in capsys.readouterr().err
