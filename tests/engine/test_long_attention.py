"""Attention over long contexts: segments, tiles, threads, bfloat16, rings, rewinds; by value and by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import pytest
from engine_world import AVX2, own_blocks
from numba.core import codegen

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernels.attention import Attention, AttentionSizes, AttentionWeights
from cascadia_p2p.engine.kernels.attention_items import ITEM, most_items, plan_items
from cascadia_p2p.engine.kernels.blocks import BLOCK, Storage, block_bytes, new_blocks, put_value
from cascadia_p2p.engine.kernels.query_tiles import SEGMENT_BLOCKS
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.types import Promise

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
ROOT = Path(__file__).resolve().parents[2]
EPS = 1e-6
SEGMENT = SEGMENT_BLOCKS * BLOCK
SIZES = AttentionSizes(heads=6, kv_heads=2, dim=16, ranks=3, extent=90, window=None, taps=3)


def row_table(*windows: tuple[int, int, int]) -> RowTable:
    """Slot, start and count of each window."""
    slots, starts, counts = np.array(windows, np.int32).T
    return RowTable.from_windows(*(np.ascontiguousarray(column) for column in (slots, starts, counts)))


@dataclass
class World:
    """One attention, and inputs of one stream for as many positions as asked for."""

    sizes: AttentionSizes
    length: int
    storage: Storage = "f32"
    rows: int = 64
    rewind: int = 16
    seed: int = 3
    spread: float = 1.0

    def __post_init__(self) -> None:
        s, rng = self.sizes, np.random.default_rng(self.seed)
        width = s.kv_heads * s.dim

        def draw(*shape: int) -> F32:
            return rng.standard_normal(shape, np.float32)

        self.weights = AttentionWeights(
            # Sharp enough that scores, not only counts, decide.
            self.spread * (draw(s.dim) + 2),
            draw(s.dim) + 2,
            draw(width, s.taps),
            draw(width, s.taps),
            draw(s.ranks, s.extent),
        )
        promise = Promise(slots=3, context=self.length, rows=self.rows)
        table = own_blocks(promise, s.window, self.rewind)
        self.attention = Attention(s, self.weights, table, self.rewind, EPS, (200.0, 0.1), self.storage)
        widths = (s.heads * s.dim, width, width, s.heads * s.ranks)
        self.inputs = tuple(draw(self.length, columns) for columns in widths)

    def run(self, at: int, count: int, slot: int = 1) -> F32:
        """Rows `at` to `at + count - 1` of the stream in one call."""
        return self.frame((slot, at, count))

    def frame(self, *windows: tuple[int, int, int]) -> F32:
        """Windows of slot, start and count, all with this stream's inputs."""
        picked = np.concatenate([np.arange(at, at + count) for _, at, count in windows])
        inputs = [np.ascontiguousarray(part[picked]) for part in self.inputs]
        out = np.full_like(inputs[0], np.nan)
        self.attention(row_table(*windows), *inputs, out)
        return out

    def whole(self, step: int, slot: int = 1, start: int = 0, end: int | None = None) -> F32:
        """All rows, `step` in each call."""
        end = self.length if end is None else end
        return np.concatenate([self.run(at, min(step, end - at), slot) for at in range(start, end, step)])


def rms(x: F64, weight: F32) -> F64:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def nearest_bf16(x: F64) -> F64:
    """Every number rounded to float32, then to bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def convolve(inputs: F32, weight: F32) -> F64:
    taps, wide = weight.shape[1], inputs.astype(np.float64)
    before = np.concatenate([np.zeros((taps - 1, wide.shape[1])), wide])
    return wide + sum(before[tap : tap + len(wide)] * weight[:, tap] for tap in range(taps))


def reference(world: World, rows: npt.NDArray[np.intp], storage: Storage = "f32") -> F64:
    """Some rows of attention over the whole stream, in float64; keys and values rounded as they are kept."""
    s, w, (q, k, v, r) = world.sizes, world.weights, world.inputs
    count, group = len(k), s.heads // s.kv_heads
    keys = rms(convolve(k, w.k_conv).reshape(count, s.kv_heads, s.dim), w.k_norm)
    values = convolve(v, w.v_conv).reshape(count, s.kv_heads, s.dim)
    if storage == "bf16":
        keys, values = nearest_bf16(keys), nearest_bf16(values)
    out = np.empty((len(rows), s.heads, s.dim))
    for i, p in enumerate(rows):
        first = 0 if s.window is None else max(0, p - s.window + 1)
        distance = p - np.arange(first, p + 1)
        scale = 1 + 0.1 * np.log(max((p + 1) / 200.0, 1.0))
        queries = rms(q[p].astype(np.float64).reshape(s.heads, s.dim), w.q_norm) / s.dim
        profiles = r[p].astype(np.float64).reshape(s.heads, s.ranks) @ w.profiles
        near = distance < s.extent
        for head in range(s.heads):
            scores = keys[first : p + 1, head // group] @ queries[head]
            scores[near] += profiles[head, distance[near]]
            shares = np.exp(scale * (scores - scores.max()))
            out[i, head] = shares @ values[first : p + 1, head // group] / shares.sum()
    return out.reshape(len(rows), -1)


def error(got: F32, expected: F64) -> float:
    """Relative, by the root mean square of all."""
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_accuracy(group: int, dim: int, storage: Storage) -> None:
    """Windows longer than a block, over a window that a ring keeps and over everything."""
    for window in (None, 100):
        sizes = AttentionSizes(2 * group, 2, dim, 4, window or 150, window, 4)
        world = World(sizes, 400, storage, rows=150)
        got, rows = world.whole(150), np.arange(400)
        assert error(got, reference(world, rows, storage)) < (2e-6 if storage == "f32" else 2e-4)
        # What the rounding of keys and values itself costs.
        assert error(got, reference(world, rows)) < (2e-6 if storage == "f32" else 1e-2)


@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_accuracy_at_70k_positions(storage: Storage) -> None:
    length = 70_000
    world = World(replace(SIZES, heads=1, kv_heads=1), length, storage, rows=2048, spread=3.0)
    got = world.whole(2048)
    rows = np.array([0, 63, 64, SEGMENT - 1, SEGMENT, 40_000, 65_535, 65_536, length - 1])
    assert error(got[rows], reference(world, rows, storage)) < (2e-6 if storage == "f32" else 2e-4)


@pytest.mark.parametrize("storage", ["f32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 1), (3, 3), (5, 1)])
def test_windows_change_no_bit_across_segments(storage: Storage, heads: int, kv_heads: int) -> None:
    start, length = SEGMENT - 70, SEGMENT + 90
    world = World(replace(SIZES, heads=heads, kv_heads=kv_heads), length, storage, rows=2048)
    whole = world.whole(1021)
    for step in (1, 8, 64, 160):
        world.whole(1000, slot=2, end=start)
        assert np.array_equal(world.whole(step, slot=2, start=start), whole[start:]), step


def test_company_changes_no_bit() -> None:
    """Three slots at different lengths in one frame, in either order, each as by itself."""
    world = World(SIZES, 700, rows=2048)
    whole = world.whole(64)
    for order in ((0, 1, 2), (2, 0, 1)):
        for slot, end in enumerate((5, 190, 600)):
            world.whole(64, slot=slot, end=end)
        windows = {0: (0, 5, 33), 1: (1, 190, 1), 2: (2, 600, 70)}
        out = world.frame(*(windows[slot] for slot in order))
        expected = np.concatenate([whole[at : at + count] for _, at, count in (windows[s] for s in order)])
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_later_rows_of_a_window_that_are_not_finite_change_no_bit(value: float) -> None:
    """A row passes what it does not see without an operation: 0 x infinite would be no number."""
    for window in (None, 40):
        world = World(replace(SIZES, window=window), 200)
        whole = world.whole(64)
        for part in world.inputs[1:3]:
            part[131:] = value
        assert np.array_equal(world.whole(64)[:131], whole[:131])


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_rings_wrap_and_slots_go_back(window: int, storage: Storage) -> None:
    """Wrong rows are appended and taken back at every stage of the ring."""
    world = World(replace(SIZES, window=window), 900, storage, rows=64)
    whole = world.whole(64)
    assert error(whole, reference(world, np.arange(900), storage)) < (2e-6 if storage == "f32" else 2e-4)
    again = World(replace(SIZES, window=window), 900, storage, rows=64)
    right, wrong = again.inputs, tuple(part[::-1].copy() for part in again.inputs)
    for at in range(0, 900, 50):
        for inputs, count in ((wrong, 16), (right, 50)):
            again.inputs = inputs
            got = again.run(at, count)
        assert np.array_equal(got, whole[at : at + 50])


@pytest.fixture
def two_threads() -> Iterator[None]:
    compiling.set_threads(2)
    if compiling.threads() == 1:
        pytest.skip("one core only")
    yield
    compiling.set_threads(1)


def test_threads_and_segments_apart_change_no_bit(two_threads: None) -> None:
    """One thread folds segments as it goes, several leave them apart and fold them at the end."""
    length = 3 * SEGMENT + 100
    world = World(SIZES, length, rows=2048)
    threaded: dict[int, F32] = {}
    for step in (1, 33):
        before = world.whole(2048, end=length - 99)
        threaded[step] = np.concatenate([before, world.whole(step, start=length - 99)])
    compiling.set_threads(1)
    alone = world.whole(2048)
    for step, got in threaded.items():
        assert np.array_equal(got, alone), step


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("partials", [0, 20_000, 2**20])
@pytest.mark.parametrize("window", [0, 500, 3000])
def test_a_plan_covers_every_row_and_block_once(workers: int, partials: int, window: int) -> None:
    rng, group, kv_heads, stored = np.random.default_rng(4), 3, 2, 32
    for _ in range(20):
        counts = rng.integers(1, 40, 3).astype(np.int32)
        starts = rng.integers(0, 9000, 3).astype(np.int32)
        rows = RowTable.from_windows(np.arange(3, dtype=np.int32), starts, counts)
        capacity = int(most_items(len(rows), kv_heads, group, partials, stored))
        items, merges = (np.full((capacity, ITEM), -9, np.int32) for _ in range(2))
        count, merging = plan_items(
            rows.positions, rows.after, kv_heads, group, window, workers, partials, stored, items, merges
        )
        seen: dict[tuple[int, int], list[int]] = {}
        used: list[int] = []
        for head, row, taken, first, end, partial in items[:count, :6].tolist():
            assert len({*rows.slots[row : row + taken]}) == 1
            size = -(-taken * group // 4) * 4
            if partial >= 0:
                assert first // SEGMENT_BLOCKS == (end - 1) // SEGMENT_BLOCKS
                used += range(partial, partial + size)
            for one in range(row, row + taken):
                seen.setdefault((head, one), []).extend(range(first, end))
        assert len(used) == len(set(used))
        assert not used or max(used) < partials // (stored + 32)
        assert (len(used) > 0) == (merging > 0)
        for (_, row), blocks in seen.items():
            position = int(rows.positions[row])
            needed = range(max(0, position - window + 1 if window else 0) // BLOCK, position // BLOCK + 1)
            assert len(blocks) == len(set(blocks))
            assert set(blocks) >= set(needed)
        assert len(seen) == kv_heads * len(rows)


def test_bfloat16_takes_half_the_memory() -> None:
    arrays = {storage: new_blocks(3, 2, 20, storage) for storage in ("f32", "bf16")}
    for storage, parts in arrays.items():
        assert sum(part.nbytes for part in parts) == 3 * block_bytes(2, 20, storage)
        assert all(part.ctypes.data % 64 == 0 for part in parts)
    assert block_bytes(2, 20) == 2 * block_bytes(2, 20, "bf16")


SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import hashlib
from dataclasses import replace
import test_long_attention as t
from cascadia_p2p.engine.kernels import query_tiles
from cascadia_p2p.logs import configure_logs
configure_logs("console", "error")
kinds = [(window, storage) for window in (None, 90) for storage in ("f32", "bf16")]
parts = [t.World(replace(t.SIZES, dim=80, window=w), 300, storage).whole(37) for w, storage in kinds]
print(query_tiles._WIDE, hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest())
"""


def test_avx2_code_gives_the_same_bits() -> None:
    """What is compiled for a processor without AVX-512, with other tiles in its registers."""
    if "avx2" not in str(codegen.get_host_cpu_features()):
        pytest.skip("not an x86 processor with AVX2")
    words = []
    for environment in ({}, {"NUMBA_CPU_NAME": AVX2[0], "NUMBA_CPU_FEATURES": AVX2[1]}):
        command = [sys.executable, "-c", SCRIPT, str(ROOT), str(Path(__file__).parent)]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        words.append(done.stdout.split())
    assert words[1][0] == "False"
    assert words[0][1] == words[1][1]


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even() -> None:
    rng = np.random.default_rng(7)
    # Anything that a float32 can be, ties and their neighbours, and what overflows when rounded.
    bits = rng.integers(0, 2**32, 2000, np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -0.0, 1e-45], np.float32).view(np.uint32)
    numbers = np.concatenate([bits, ties, ties - 1, ties + 1, special]).view(np.float32)
    _, values = new_blocks(1, 1, len(numbers), "bf16")

    @numba.njit
    def keep(numbers: F32, values: npt.NDArray[np.uint16]) -> None:
        put_value(numbers, 0, numbers.shape[0], values, 0, 0, 5)

    keep(numbers, values)
    kept = values[0, 0, 5, : len(numbers)]
    finite = ~np.isnan(numbers)
    whole = numbers.view(np.uint32).astype(np.uint64)
    expected = (whole + 0x7FFF + (whole >> 16 & 1)) >> 16
    assert np.array_equal(kept[finite], expected[finite])
    assert np.isnan((kept[~finite].astype(np.uint32) << 16).view(np.float32)).all()
