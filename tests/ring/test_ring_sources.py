"""Nodes that exported their own shards: models of one shape are told apart by the files that both read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from ring_world import profile

from cascadia_p2p.ring import greeting
from cascadia_p2p.ring.core import Core
from cascadia_p2p.ring.profile import Times
from cascadia_p2p.shards.manifest import MOST_SOURCES
from cascadia_p2p.wire.control import MAX_CONTROL_BYTES, MAX_SOURCES
from cascadia_p2p.wire.messages import Introduction, RefusalCode, encode

A, B, C = "a" * 16, "b" * 16, "c" * 16


def introduction(index: int, sources: tuple[str, ...]) -> Introduction:
    return Core(profile(index, sources=sources), Times(), 0.0).introduction()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((A, B, ""), (A, B, C)),
        ((A, "", ""), ("", B, "")),
        ((), (A, B, C)),
        ((), ()),
    ],
)
def test_shards_of_one_checkpoint_join(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        assert greeting.check(introduction(1, one), introduction(2, other), serving=False) is None


def test_rpc_04_shards_of_two_checkpoints_with_one_fingerprint_are_told_in_full() -> None:
    ours, theirs = introduction(1, (A, B, "")), introduction(2, ("", C, C))
    assert ours.fingerprint == theirs.fingerprint
    refused = greeting.check(ours, theirs, serving=True)
    assert refused is not None
    assert refused.code is RefusalCode.MODEL
    assert f"file 2 of 3 of the checkpoint was {B} on pc1/00000000 and {C} on pc2/00000000" in refused.message
    assert "export both from the same checkpoint" in refused.message


def test_whatever_can_be_exported_can_be_told() -> None:
    assert MOST_SOURCES <= MAX_SOURCES
    greeting = introduction(1, (A,) * MOST_SOURCES)
    assert len(encode(greeting)) < MAX_CONTROL_BYTES / 2


@pytest.mark.parametrize("sample", ["a" * 15, "A" * 16, "g" * 16])
def test_samples_are_bounded(sample: str) -> None:
    with pytest.raises(ValidationError, match="sources"):
        introduction(1, (sample,))
