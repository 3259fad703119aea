"""Who suits whom, and that every refusal names both values."""

from __future__ import annotations

import pytest
from ring_world import TIMES, profile

from cascadia_p2p.errors import UsageError
from cascadia_p2p.ring.core import Core
from cascadia_p2p.ring.greeting import check, is_self, mixed_numbers, mixed_software, other_version
from cascadia_p2p.wire.frames import PROTOCOL
from cascadia_p2p.wire.messages import Introduction, OtherVersion, RefusalCode


def introduction(index: int, run: int = 0, **changes: object) -> Introduction:
    own = {key: value for key, value in changes.items() if key != "protocol"}
    intro = Core(profile(index, run, **own), TIMES, 0.0).introduction()
    return intro.model_copy(update={key: value for key, value in changes.items() if key == "protocol"})


OWN = introduction(1)


def test_nodes_of_one_export_suit() -> None:
    assert check(OWN, introduction(2), serving=False) is None


def test_rpc_04_equal_releases_and_other_protocol_are_told_in_full() -> None:
    refusal = check(OWN, introduction(2, protocol=7), serving=True)
    assert refusal is not None
    assert refusal.code is RefusalCode.VERSION
    assert refusal.serving
    for words in (f"0.1.0 (protocol {PROTOCOL})", "0.1.0 (protocol 7)", "same protocol number", "pc1", "pc2"):
        assert words in refusal.message


def test_rpc_04_other_release_with_the_same_protocol_joins_with_a_warning() -> None:
    other = introduction(2, software="0.1.1")
    assert check(OWN, other, serving=False) is None
    assert mixed_software(OWN, introduction(2)) is None
    warning = mixed_software(OWN, other)
    assert warning is not None
    assert "0.1.0" in warning
    assert "0.1.1" in warning


def test_nodes_that_compute_in_different_ways_join_with_a_warning_that_names_both() -> None:
    own, other = (
        introduction(1, precision="fine", cache="f32"),
        introduction(2, precision="fast", cache="f32"),
    )
    assert check(own, other, serving=False) is None
    assert mixed_numbers(own, own) is None
    assert mixed_numbers(own, introduction(3)) is None, "who does not say it is not suspected"
    warning = mixed_numbers(own, other)
    assert warning is not None
    for words in ("--precision fine on pc1", "fast on pc2"):
        assert words in warning
    assert "cache" not in warning
    assert "--cache bf16" in str(mixed_numbers(introduction(4, cache="bf16"), own))


def test_exo_06_another_fleet_is_named() -> None:
    refusal = check(OWN, introduction(2, fleet="attic"), serving=False)
    assert refusal is not None
    assert refusal.code is RefusalCode.FLEET
    assert "'test'" in refusal.message
    assert "'attic'" in refusal.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": 4, "holds": (1,)}, ("3 shards", "into 4", "'toy'")),
        ({"fingerprint": "b" * 64}, ("a" * 16, "b" * 16, "tokenizer")),
        ({"fingerprint": "b" * 64, "model": "other"}, ("'toy'", "'other'")),
    ],
)
def test_dll_08_another_model_split_or_tokenizer_is_refused(
    changes: dict[str, object], words: tuple[str, ...]
) -> None:
    refusal = check(OWN, introduction(2, **changes), serving=False)
    assert refusal is not None
    assert refusal.code is RefusalCode.MODEL
    for word in words:
        assert word in refusal.message


def test_a_node_knows_itself_and_a_copy_of_its_state_directory() -> None:
    assert is_self(OWN, introduction(1))
    copy = introduction(1, run=5)
    assert not is_self(OWN, copy)
    refusal = check(OWN, copy, serving=False)
    assert refusal is not None
    assert refusal.code is RefusalCode.IDENTITY
    assert OWN.instance in refusal.message
    assert copy.instance in refusal.message
    assert "--state-dir" in refusal.message


def test_exo_19_a_greeting_of_another_protocol_gives_a_sentence() -> None:
    sentence = other_version(OWN, OtherVersion("hello", 9, "4.2.0", ""), "10.0.0.9:7600")
    for word in (f"0.1.0 (protocol {PROTOCOL})", "4.2.0 (protocol 9)", "10.0.0.9:7600"):
        assert word in sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"holds": ()}, "no shard"),
        ({"holds": (0, 3)}, "shards 0 to 2"),
        ({"holds": (0, 1), "shard": 2}, "--shard 2"),
    ],
)
def test_dll_05_impossible_shards_are_refused_before_anything_starts(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        profile(1, **changes)
