"""The command line of `export`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from cascadia_p2p.cli import export as command
from cascadia_p2p.cli import main
from cascadia_p2p.errors import UsageError
from cascadia_p2p.shards.export import bytes_in_words
from cascadia_p2p.shards.manifest import Manifest


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args([*map(str, words)]))


def test_the_manifest_goes_to_stdout_and_all_else_to_stderr(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, tmp_path / "out", "--split", "4,3", "--experts", "f32") == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out' / 'manifest.json'}\n"
    assert "7 layers in 2 shards of 4,3" in err
    assert Manifest.load(tmp_path / "out").split == [4, 3]


def test_one_way_to_split_must_be_given(checkpoint: Path, tmp_path: Path) -> None:
    for words in ([], ["--shards", "2", "--split", "4,3"]):
        with pytest.raises(SystemExit, match="2"):
            run(checkpoint, tmp_path / "out", *words)


def test_flags_are_judged_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--projections 'int5' is not possible"):
        run(tmp_path / "absent", tmp_path / "out", "--shards", "2", "--projections", "int5")
    with pytest.raises(UsageError, match="--attenuate has '8': expected LAYER=N"):
        run(tmp_path / "absent", tmp_path / "out", "--shards", "2", "--attenuate", "8")
    with pytest.raises(UsageError, match="--split has 'six' at place 1"):
        run(tmp_path / "absent", tmp_path / "out", "--split", "six")


def test_a_checkpoint_that_is_not_there_is_an_error_of_usage_with_all_that_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = (
        "cascadia-p2p: {} does not exist: expected the directory of a checkpoint, with its config.json, a "
        ".gguf file, or a name that 'cascadia-p2p pull' knows: smollm2-135m{}\n"
    )
    for flags in ((), ("--list-files",)):
        assert main(["export", "smollm3", "out", "--shards", "3", "--no-key", *flags]) == 2
        assert capsys.readouterr().err == sentence.format("smollm3", "; did you mean smollm2-135m?")
    assert main(["export", "there/is/nothing", "out", "--shards", "3", "--no-key"]) == 2
    assert capsys.readouterr().err == sentence.format("there/is/nothing", "")


def test_an_error_comes_without_an_empty_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--shards", "3", "--no-key"]) == 1
    assert capsys.readouterr().err.startswith("cascadia-p2p: ")


def test_ctrl_c_says_that_the_export_can_go_on(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "export", interrupted)
    assert run(checkpoint, tmp_path / "out", "--shards", "2") == 130
    assert "it goes on where it stopped" in capsys.readouterr().err


def test_without_a_terminal_lines_say_how_long_is_left(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SAY_EVERY_S", 0.0)
    assert run(checkpoint, tmp_path / "out", "--shards", "2") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" left")]
    assert len(lines) > 5
    amount = r"[\d.]+ [kMG]?B"
    # A busy machine may well write slowly at first.
    left = r"(less than a minute|an unknown time|about \d+ (min|h \d+ min))"
    form = rf"shard-0[01]/\S+\.weights: {amount} of {amount}, {amount}/s, {left}"
    assert all(re.fullmatch(form, line.removesuffix(" left")) for line in lines), lines
    assert "less than a minute left" in lines[-1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "an unknown time"),
        (29, "less than a minute"),
        (31, "about 1 min"),
        (3500, "about 58 min"),
        (3600, "about 1 h 0 min"),
        (86400 + 1800, "about 24 h 30 min"),
    ],
)
def test_times_in_words(seconds: float | None, words: str) -> None:
    assert command._time_in_words(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (8_200_000_000, "8.2 GB"), (10**16, "10000.0 TB")],
)
def test_sizes_in_words(count: int, words: str) -> None:
    assert bytes_in_words(count) == words
