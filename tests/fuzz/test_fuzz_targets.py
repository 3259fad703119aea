"""A sample of `scripts/fuzz.py` for every decoder, and the inputs that once showed a fault."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from fuzzing.target import WEIGHED, BrokenPromiseError, Judge, Mutator, Target
from fuzzing.targets import TARGETS

INPUTS = 150
SLOW_INPUTS = 40
"""Of targets that run a template, a ring machine or a thread for each."""

WHO = b'"node":"0000000000000000","instance":"0000000000000000"'


def token_frame(token: str, logprob: str) -> bytes:
    """A tail's answer to the first frame, behind its length."""
    header = "43503250 0200 0200 0500000000000000 efcdab8967452301 0100000000000000"
    counts = "00000000 00000000 00000000 00000000 01000000 0000 0000"
    record = f"0100000000000000 03000000 01000000 {token} {logprob} 0000 0000 0000 0000"
    return bytes.fromhex("5800" + header + counts + record)


FOUND = [
    # A seal with a letter that no seal has ended the node that was sent it.
    ("clients", b'{"clients":[],"mac":"\xc3\xa9"}'),
    # Numbers that JSON can hold and that nothing here can write again.
    ("reply", b'{"queued":99999999999999999999999}'),
    ("control", b'{"type":"status_report",%b,"body":{"a":99999999999999999999999}}' % WHO),
    # A tail whose token is none, so that a tokenizer raises; and one whose probability is no number.
    ("answers", token_frame("feffffff", "000000bf")),
    ("answers", token_frame("41000000", "0000c07f")),
    # A model that calls a tool with what JSON readers do not take, or with lists without end.
    ("said", b"f\xeeNaN\xe9"),
    ("said", b"f\xee" + b"[" * 2000 + b"]" * 2000 + b"\xe9"),
    ("said", b'f\xee{"args": 99999999999999999999999}\xe9'),
    ("said", b'f\xee"\\ud800"\xe9'),
    # Merges of words that are not there, at which a library panics.
    ("tokenizer", b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}, "merges": [["a", "b"]]}}'),
    (
        "tokenizer",
        b'{"model": {"tye": "BPE", "vocab": {"a": 0, "b": 2}, "merges": [["a", "b"]], "unk_token": null}}',
    ),
]


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_changes_of_them_leave_only_declared_errors(name: str) -> None:
    target = TARGETS[name]
    judge, seeds = Judge(target), target.seeds()
    mutator = Mutator(seeds, seed=len(name))
    for seed in seeds:
        assert judge.give(seed), judge.faults
    slow = target.slowest_s > 1.0 or name in ("machine", "data_thread", "answers", "said", "manifest")
    for _ in range(SLOW_INPUTS if slow else INPUTS):
        judge.give(mutator.next())
    assert not judge.faults


@pytest.mark.parametrize(("name", "data"), FOUND, ids=[f"{name}-{at}" for at, (name, _) in enumerate(FOUND)])
def test_what_once_showed_a_fault_shows_none(name: str, data: bytes) -> None:
    judge = Judge(TARGETS[name])
    assert judge.give(data), judge.faults


def test_a_broken_decoder_is_found_out() -> None:
    """What the judge must notice: another error, memory for a claimed size, and an endless turn."""

    def broken(data: bytes) -> None:
        if data == b"raises":
            raise KeyError(data)
        if data == b"lies":
            raise BrokenPromiseError("not the same")
        if data == b"claims":
            bytearray(64 << 20)
        if data == b"turns":
            ends = time.thread_time() + 0.4
            while time.thread_time() < ends:
                pass

    held_up = iter([0.4, 0.0])

    def busy(_: bytes) -> None:
        ends = time.thread_time() + next(held_up)
        while time.thread_time() < ends:
            pass

    judge = Judge(Target("busy", busy, lambda: [b""], slowest_s=0.2))
    assert judge.give(b"what was slow once is given again"), judge.faults
    judge = Judge(Target("broken", broken, lambda: [b""], (ValueError,), slowest_s=0.2))
    assert judge.give(b"right")
    for data in (b"raises", b"lies", b"turns"):
        assert not judge.give(data)
    # Of so many inputs one is weighed.
    assert [judge.give(b"claims") for _ in range(WEIGHED)].count(False) == 1
    kinds = sorted(kind.split(" ")[0] for kind in judge.faults)
    assert kinds == ["BrokenPromiseError", "KeyError", "memory", "slow"]
