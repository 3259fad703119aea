"""What `bench` refuses, and in which words."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from cli.conftest import Run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--levels", "1,none"), "--levels '1,none'"),
        (("--levels", "0"), "--levels '0'"),
        (("--tokens", 1), "1 tokens a request"),
        (("--requests", 0), "0 requests a level"),
        (("--seed", -1), "--seed -1"),
        (("--slots", 4), "--slots is what emulated nodes promise"),
        (("--context", 400), "--context is what emulated nodes promise"),
        (("--time-scale", 2), "--time-scale goes with --emulate"),
        (("--emulate", "nowhere"), "nowhere"),
        (("--emulate", "published", "--endpoint", "tcp://127.0.0.1:1"), "leave out --endpoint"),
        (("--emulate", "published", "--prompt-file", "x"), "leave out --prompt-file"),
        (("--emulate", "published", "--time-scale", 0), "--time-scale 0"),
        (("--emulate", "published", "--context", 100), "--context 100"),
        (("--json", "/no/such/directory/a.json"), "no directory /no/such/directory"),
        (("--plot", "/no/such/directory/a.png"), "no directory /no/such/directory"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_starts(
    run: Run, flags: tuple[object, ...], words: str
) -> None:
    done = run("bench", *flags)
    assert done.code == 2
    assert words in done.err
    assert done.out == ""


def test_nobody_there_is_said_and_ends_with_its_code(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    done = run("bench", "--endpoint", address, "--levels", "1")
    assert done.code == 6
    assert "no head node answers" in done.err


def test_a_file_of_prompts_that_is_missing_is_named(run: Run, tmp_path: Path) -> None:
    done = run("bench", "--prompt-file", tmp_path / "absent.txt", "--levels", "1")
    assert done.code == 2
    assert "absent.txt can not be read" in done.err
