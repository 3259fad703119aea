"""The book of kept prefixes against a plain list of what is kept."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.ring.prefixes import MAX_SEEN, Holding, PrefixCounts, Prefixes
from cascadia_p2p.types import Promise, StreamId

BLOCK = 2
CONTEXT = 16
SLOTS = 3

IDS = st.lists(st.sampled_from([1, 2, 2**31 - 1]), min_size=1, max_size=CONTEXT).map(tuple)


@dataclass
class Running:
    """A stream as its stages see it."""

    ids: list[int]
    holding: Holding
    sent: int


class Plain:
    """What is kept, by entry; blocks by name."""

    def __init__(self, kept: int) -> None:
        self.counts = PrefixCounts()
        self.book = Prefixes(Promise(SLOTS, CONTEXT, 8, kept), self.counts, BLOCK)
        self.kept: dict[int, tuple[int, ...]] = {}
        self.running: dict[int, Running] = {}
        self.number = 0

    def begin(self, ids: tuple[int, ...], tokens: int) -> None:
        if len(self.running) == SLOTS:
            return
        self.number += 1
        tokens = min(tokens, CONTEXT - len(ids))
        right = max(
            (len(each) for each in self.kept.values() if len(each) < len(ids) and ids[: len(each)] == each),
            default=0,
        )
        holding, entry, evicted = self.book.begin(StreamId(self.number), ids, tokens, attach=True)
        for number in evicted:
            del self.kept[number]
        assert (entry.position if entry else 0) == right, "the longest that is kept and leaves one row"
        if entry is not None:
            assert self.kept[entry.number] == ids[:right]
        assert all(right < cut < len(ids) and cut % BLOCK == 0 for cut in holding.cuts)
        last = (len(ids) - 1) // BLOCK * BLOCK
        assert last in (0, right, *holding.cuts)
        self.running[self.number] = Running([*ids, *range(100, 100 + tokens)], holding, right)
        self.check()

    def go_on(self, stream: int, prompt: bool) -> None:
        if stream not in self.running:
            return
        run = self.running[stream]
        run.sent += 1
        if run.sent > len(run.ids):
            self.end(stream)
        elif run.sent % BLOCK == 0:
            kept = self.book.keep(run.holding, run.ids, run.sent, generating=not prompt)
            if kept is not None:
                self.kept[kept] = tuple(run.ids[: run.sent])
        self.check()

    def end(self, stream: int) -> None:
        run = self.running.pop(stream, None)
        if run is not None:
            self.book.end(run.holding)
        self.check()

    def fail(self, stream: int) -> None:
        for number in self.book.evict_kept_from(StreamId(stream)):
            del self.kept[number]
        self.end(stream)

    def check(self) -> None:
        assert self.book.left >= 0, "more is promised than there is"
        assert len(set(self.kept.values())) == len(self.kept), "one prefix is kept twice"
        assert self.counts.kept == len(self.kept) == len(self.book._entries)
        chains = {each[:end] for each in self.kept.values() for end in range(BLOCK, len(each) + 1, BLOCK)}
        assert self.book.size == len(chains), "the tree holds more than leads to what is kept"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), IDS, st.integers(1, 8)),
            st.tuples(st.just("rows"), st.integers(1, 12), st.integers(1, 9)),
            st.tuples(st.just("end"), st.integers(1, 12), st.none()),
            st.tuples(st.just("fail"), st.integers(1, 12), st.none()),
        ),
        max_size=60,
    ),
)
def test_the_book_finds_the_longest_prefix_and_never_promises_too_much(kept: int, steps: list) -> None:
    plain = Plain(kept)
    for kind, what, more in steps:
        if kind == "begin":
            plain.begin(what, more)
        elif kind == "rows":
            for _ in range(more):
                run = plain.running.get(what)
                plain.go_on(what, prompt=run is not None and 100 not in run.ids[: run.sent])
        elif kind == "end":
            plain.end(what)
        else:
            plain.fail(what)
    for stream in list(plain.running):
        plain.end(stream)
    assert plain.book._promised == 0
    distinct = {id(block) for entry in plain.book._entries.values() for block in entry.blocks}
    assert plain.book._orphans == len(distinct)


def test_the_memory_of_seen_prompts_is_bounded() -> None:
    book = Prefixes(Promise(1, 1 << 20, 8, 1), PrefixCounts(), 1)
    for round_ in range(3):
        ids = tuple(range(round_, round_ + MAX_SEEN // 2 + 2))
        holding, _, _ = book.begin(StreamId(round_), ids, 1, attach=False)
        book.end(holding)
    assert len(book._seen) == MAX_SEEN
