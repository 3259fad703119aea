"""Splitting layers into shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascadia_p2p.errors import UsageError
from cascadia_p2p.shards.split import check_split, even_split, parse_split, spell_split


@given(st.integers(1, 300), st.integers(1, 300))
def test_an_even_split_adds_up_and_differs_by_one_at_most(shards: int, layers: int) -> None:
    if shards > layers:
        with pytest.raises(UsageError, match=f"at most {layers} shards are possible"):
            even_split(shards, layers)
        return
    split = even_split(shards, layers)
    assert len(split) == shards
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)
    check_split(split, layers)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_a_spelled_split_reads_back(sizes: list[int]) -> None:
    assert parse_split(spell_split(tuple(sizes))) == tuple(sizes)


@given(st.text(alphabet="0123456789,-+. x\u0663\u00b2", max_size=12))
def test_any_text_is_positive_sizes_or_a_sentence(text: str) -> None:
    try:
        split = parse_split(text)
    except UsageError as error:
        sentence = str(error)
    else:
        sentence = ""
    if sentence:
        assert sentence.startswith("--split has '")
    else:
        assert split
        assert min(split) >= 1
        assert spell_split(split) == ",".join(str(int(part)) for part in text.split(","))


def test_eleven_nodes_of_six_layers() -> None:
    assert even_split(11, 66) == (6,) * 11
    assert even_split(5, 12) == (3, 3, 2, 2, 2)


@pytest.mark.parametrize(
    ("text", "place"), [("6,,6", 2), ("6,0,6", 2), ("-1", 1), ("6;6", 1), ("", 1), ("6,6,", 3)]
)
def test_the_place_of_a_bad_size_is_named(text: str, place: int) -> None:
    with pytest.raises(UsageError, match=f"at place {place}: expected the number of layers of each shard"):
        parse_split(text)


def test_dll_05_a_split_that_does_not_add_up_is_refused_with_both_sums() -> None:
    with pytest.raises(UsageError, match="--split 6,6,1 adds up to 13 layers, but the model has 12"):
        check_split((6, 6, 1), 12)


def test_cas_21_no_shard_may_be_empty() -> None:
    with pytest.raises(UsageError, match=r"--shards is 13, but the model has 12 layers"):
        even_split(13, 12)
    with pytest.raises(UsageError, match=r"--shards is 0: expected 1 or more"):
        even_split(0, 12)
    with pytest.raises(UsageError, match="has a shard without layers"):
        check_split((12, 0), 12)
