"""Which prefixes the stages keep: the head's book of entries, blocks and room.

The stages keep prefixes under entry numbers and do only what operations say, so the head knows exactly what
lies there. A kept prefix ends at a block end. It is found by its ids, which are compared block by block, in a
tree whose edges are the ids of one block.

What is kept of a stream:

1. its prompt up to the last block end that leaves a row to compute: the same prompt again, or one that goes
   on from it;
2. its prompt up to where it parts from prompts seen lately, when nothing is kept there: what they share;
3. while it generates, all up to the last block end that it passed: the next turn of a conversation.

Room. The stages have slots x ceil(context / 64) blocks. A running stream is promised what it may need; a
block that only entries hold is taken from what is left. Two streams that attached the same block are both
promised it, so this is on the safe side. With no entry at all every stream has room.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from zlib import crc32

from cascadia_p2p.types import Promise, StreamId

BLOCK: Final = 64
"""Positions in a block."""

MAX_SEEN: Final = 16_384
"""Blocks of prompts that are remembered as seen."""

Chunk: TypeAlias = bytes
"""The ids of one block, as they lie in memory: four bytes each."""


@dataclass(slots=True)
class PrefixCounts:
    """What prefix reuse has done since the head started.

    Args:
        entries: that may be kept in the present ring; 0 for no reuse.
        kept: entries that hold something now.
        hits, misses: streams that started from a kept prefix, and that did not.
        tokens_reused: positions that were not computed again.
        keeps: prefixes that were kept.
        evictions: entries let go for another one, for room, or because a stage lacked them.
    """

    entries: int = 0
    kept: int = 0
    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    keeps: int = 0
    evictions: int = 0


@dataclass(slots=True, eq=False)
class _Block:
    """A block at the stages, by who holds it."""

    streams: int = 0
    entries: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    """A block end in the tree of kept prefixes."""

    parent: _Node | None = None
    ids: Chunk = b""
    children: dict[Chunk, _Node] = field(default_factory=dict)
    entry: Entry | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A kept prefix.

    Args:
        number: under which the stages keep it.
        position: positions that it holds.
        source: the stream that it was kept from.
    """

    number: int
    position: int
    source: StreamId
    node: _Node
    blocks: list[_Block]
    roller: Holding | None = None
    """The running stream whose latest block end it is."""


@dataclass(slots=True, eq=False)
class Holding:
    """A running stream's share of the book.

    Args:
        stream: whose.
        need: blocks that it is promised.
        cuts: positions at which its prompt is kept, growing.
        attached: positions that it started with.
        done: the position up to which it is settled what is kept.
    """

    stream: StreamId
    need: int
    cuts: tuple[int, ...] = ()
    attached: int = 0
    done: int = 0
    blocks: list[_Block] = field(default_factory=list)
    rolling: Entry | None = None

    def rows_to_cut(self, sent: int) -> int:
        """Rows from `sent` to the next position at which the prompt is kept; 0 when none comes."""
        return next((cut - sent for cut in self.cuts if cut > sent), 0)


class Prefixes:
    """The book of one epoch of a ring that keeps prefixes.

    Args:
        promise: what all stages hold; `kept` is 1 or more.
        counts: is kept up to date.
        block: positions in a block.
    """

    def __init__(self, promise: Promise, counts: PrefixCounts, block: int = BLOCK) -> None:
        self.counts = counts
        self._block = block
        self._context = promise.context
        self._room = promise.slots * self._blocks(promise.context)
        self._promised = 0
        self._orphans = 0
        """Blocks that only entries hold."""
        self._free = list(range(promise.kept - 1, -1, -1))
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        """The one used least lately first."""
        self._root = _Node()
        self._seen: OrderedDict[int, None] = OrderedDict()
        counts.entries, counts.kept = promise.kept, 0

    @property
    def size(self) -> int:
        """Block ends in the tree."""
        todo, count = [self._root], -1
        while todo:
            node = todo.pop()
            count += 1
            todo += node.children.values()
        return count

    @property
    def left(self) -> int:
        """Blocks that are neither promised to a running stream nor held by entries alone."""
        return self._room - self._promised - self._orphans

    # --- a stream's life ----------------------------------------------------------------------------------

    def begin(
        self, stream: StreamId, ids: Sequence[int], tokens: int, *, attach: bool
    ) -> tuple[Holding, Entry | None, list[int]]:
        """A stream starts.

        Args:
            stream: its number.
            ids: what it has to send.
            tokens: that it may still generate.
            attach: whether it may start from a kept prefix.

        Returns:
            Its holding; the entry that it starts from, if one is kept; numbers of entries to evict first.
        """
        block = self._block
        chunks = _chunks(ids, (len(ids) - 1) // block * block, block)
        entry = self._longest(chunks) if attach else None
        shared = 0 if entry is None else entry.position
        need = self._blocks(min(len(ids) + tokens, self._context))
        holding = Holding(stream, need, attached=shared, done=shared)
        wanted = {self._seen_before(chunks) * block, len(chunks) * block}
        holding.cuts = tuple(sorted(cut for cut in wanted if cut > shared))
        self._promised += holding.need
        if entry is None:
            self.counts.misses += 1
        else:
            self._entries.move_to_end(entry.number)
            holding.blocks = list(entry.blocks)
            for each in holding.blocks:
                self._orphans -= not each.streams
                each.streams += 1
            self.counts.hits += 1
            self.counts.tokens_reused += shared
        return holding, entry, self._make_room(entry)

    def keep(self, holding: Holding, ids: Sequence[int], position: int, *, generating: bool) -> int | None:
        """A stream holds exactly `position` positions, a block end: the entry to keep them as, if any.

        Args:
            holding: the stream's.
            ids: its ids, at least `position`.
            position: more than 0.
            generating: it is behind its prompt.
        """
        if position <= holding.done:
            return None
        holding.done = position
        if position not in holding.cuts and not generating:
            return None
        found = self._find(ids, position)
        if found is not None and found.entry is not None:
            self._entries.move_to_end(found.entry.number)
            return None
        number = self._take_number(holding, rolling=generating)
        if number is None:
            return None
        node = self._node(ids, position)
        entry = node.entry = self._entries[number] = Entry(number, position, holding.stream, node, [])
        if generating:
            entry.roller, holding.rolling = holding, entry
        while len(holding.blocks) * self._block < position:
            holding.blocks.append(_Block(streams=1))
        entry.blocks = holding.blocks[: position // self._block]
        for block in entry.blocks:
            block.entries += 1
        self.counts.keeps += 1
        self.counts.kept = len(self._entries)
        return number

    def end(self, holding: Holding) -> None:
        """A stream runs no more; what was kept of it stays."""
        self._promised -= holding.need
        for block in holding.blocks:
            block.streams -= 1
            self._orphans += not block.streams and block.entries > 0
        holding.blocks = []
        if holding.rolling is not None:
            holding.rolling.roller = None
            holding.rolling = None

    def evict_kept_from(self, stream: StreamId) -> list[int]:
        """Let go what was kept of a stream that failed, for a stage may lack it; the entries' numbers."""
        found = [entry for entry in self._entries.values() if entry.source == stream]
        for entry in found:
            self._evict(entry)
        return [entry.number for entry in found]

    def evict_prefix_of(self, ids: Sequence[int], position: int) -> list[int]:
        """Let go the entry that holds these first positions, which a stage lacks; its number, if any."""
        node = self._find(ids, position)
        if node is None or node.entry is None:
            return []
        number = node.entry.number
        self._evict(node.entry)
        return [number]

    # --- inside -------------------------------------------------------------------------------------------

    def _longest(self, chunks: Sequence[Chunk]) -> Entry | None:
        found, node = None, self._root
        for chunk in chunks:
            below = node.children.get(chunk)
            if below is None:
                break
            node = below
            found = node.entry or found
        return found

    def _seen_before(self, chunks: Sequence[Chunk]) -> int:
        """How many first blocks were seen in an earlier prompt; remembers these."""
        chain, known, seen = 0, 0, self._seen
        for number, chunk in enumerate(chunks, 1):
            # A hint only: what is attached is compared id by id.
            chain = crc32(chunk, chain)
            if chain in seen:
                known = number
                seen.move_to_end(chain)
            else:
                seen[chain] = None
        while len(seen) > MAX_SEEN:
            seen.popitem(last=False)
        return known

    def _find(self, ids: Sequence[int], position: int) -> _Node | None:
        """The block end behind these first positions, if anything is kept there or behind it."""
        node: _Node | None = self._root
        for chunk in _chunks(ids, position, self._block):
            if node is not None:
                node = node.children.get(chunk)
        return node

    def _node(self, ids: Sequence[int], position: int) -> _Node:
        """The same, put into the tree if it is not there."""
        node = self._root
        for chunk in _chunks(ids, position, self._block):
            below = node.children.get(chunk)
            if below is None:
                below = node.children[chunk] = _Node(node, chunk)
            node = below
        return node

    def _take_number(self, holding: Holding, *, rolling: bool) -> int | None:
        """A number for a new entry: the stream's own rolling one, a free one, or the one used least lately.

        What a running stream keeps for its next turn is not taken for another's next turn.
        """
        if rolling and holding.rolling is not None:
            return self._drop(holding.rolling)
        if self._free:
            return self._free.pop()
        victim = next((e for e in self._entries.values() if not (rolling and e.roller)), None)
        if victim is None:
            return None
        self.counts.evictions += 1
        return self._drop(victim)

    def _make_room(self, attached: Entry | None) -> list[int]:
        """Evict entries, those used least lately first, until all running streams have what they may need."""
        evicted: list[int] = []
        while self.left < 0:
            victim = next((e for e in self._entries.values() if e is not attached), None)
            if victim is None:
                break
            self._evict(victim)
            evicted.append(victim.number)
        return evicted

    def _evict(self, entry: Entry) -> None:
        self.counts.evictions += 1
        self._free.append(self._drop(entry))
        self.counts.kept = len(self._entries)

    def _drop(self, entry: Entry) -> int:
        """Forget an entry; its number, which is not free yet."""
        del self._entries[entry.number]
        for block in entry.blocks:
            block.entries -= 1
            self._orphans -= not block.entries and not block.streams
        if entry.roller is not None:
            entry.roller.rolling = None
            entry.roller = None
        entry.node.entry = None
        self._prune(entry.node)
        return entry.number

    def _prune(self, node: _Node) -> None:
        """Forget the block ends to which nothing kept leads any more."""
        while node.parent is not None and node.entry is None and not node.children:
            del node.parent.children[node.ids]
            node = node.parent

    def _blocks(self, positions: int) -> int:
        return -(-positions // self._block)


def _chunks(ids: Sequence[int], position: int, block: int) -> list[Chunk]:
    """The first `position` ids, block by block."""
    packed = array("i", ids[:position]).tobytes()
    step = 4 * block
    return [packed[at : at + step] for at in range(0, 4 * position, step)]
