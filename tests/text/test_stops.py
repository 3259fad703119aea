from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cascadia_p2p.text.stops import StopStrings

LETTERS = "abé🙂"
TEXTS = st.text(LETTERS, max_size=24)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=4)


def oracle(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What is shown of a text, and the stop that ends it: the first complete one, of several the longest."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


def needed(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may still become a stop."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((len(start) for start in beginnings if text.endswith(start)), default=0)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=24))
@settings(max_examples=300, deadline=None)
@example("aab", ["ab"], [1, 2])
@example("ababaX", ["abaX", "baY"], [2, 4])
@example("abab", ["ababx", "ba"], [3])
@example("aaaa", ["aaaab", "aa"], [])
def test_stk_24_any_text_any_cuts_any_stops_is_the_oracle(
    text: str, stops: list[str], places: list[int]
) -> None:
    watched = StopStrings(stops)
    expected, met = oracle(text, stops)
    shown, read = "", ""
    for piece in cut(text, places):
        shown += watched.add(piece)
        read += piece
        if watched.met is not None:
            assert expected == shown
            assert read.removesuffix(watched.rest) == expected + watched.met
            break
        # Held back as far as needed, and not one character more.
        assert shown == read[: len(read) - needed(read, stops)]
    assert watched.met == met
    shown += watched.flush()
    assert shown == expected
    assert watched.add("more") == ("more" if not stops or met is None else "")


@given(TEXTS, STOPS)
def test_the_cuts_change_nothing(text: str, stops: list[str]) -> None:
    whole, single = StopStrings(stops), StopStrings(stops)
    at_once = whole.add(text) + whole.flush()
    assert "".join(map(single.add, text)) + single.flush() == at_once
    assert single.met == whole.met


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", ""]),
        (["</s>"], ["a<", "/", "b<", "/s", ">"], ["a", "", "</b", "", ""]),
        (["User:", "\nUser:"], ["hi\nUs", "er:"], ["hi", ""]),
        (["🙂🙂"], ["🙂", "🙃", "🙂", "🙂"], ["", "🙂🙃", "", ""]),
    ],
)
def test_stk_24_stops_over_several_pieces(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    watched = StopStrings(stops)
    assert [watched.add(piece) for piece in pieces] == shown
    assert watched.flush() == ""


def test_what_was_held_is_shown_at_the_end() -> None:
    watched = StopStrings(["END"])
    assert watched.add("the EN") == "the "
    assert watched.flush() == "EN"
    assert watched.flush() == ""
