"""Measure attention alone at Inkling's true width, beside what this machine's memory and arithmetic can do.

    python scripts/bench_attention.py [--threads N] [--cache f32|bf16] [--seconds S] [--matrix-ms MS]
                                      [--json FILE]

64 heads of 128: a global layer (8 key and value heads, bias over 1,024 distances) at 1k, 8k and 64k
positions, and a sliding layer (16 key and value heads, a window of 512), at 1, 8 and 64 rows of one stream.
GB/s counts the keys and values that the rows see, once; GFLOP/s counts the products with them, without bias
and softmax. Both peaks are taken before and after each group of calls, as they change meanwhile.

From the times of 64 rows follows what attention adds to the first token of a 64k prompt on one stage of five
sliding layers and a global one with sixteen cores; `--matrix-ms` is what the stage's matrices take a row
there. A table goes to stdout, JSON to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt
from numba import prange

from cascadia_p2p.compiled import compiling
from cascadia_p2p.compiled.simd import LANES, add, fma, load, splat, total
from cascadia_p2p.engine.kernels.attention import Attention, AttentionSizes, AttentionWeights
from cascadia_p2p.engine.kernels.blocks import BLOCK, NUMBER_BYTES, Storage
from cascadia_p2p.engine.kernels.rows import RowTable

F32 = npt.NDArray[np.float32]
HEADS: Final = 64
DIM: Final = 128
RANKS: Final = 16
WINDOW: Final = 512
POSITIONS: Final = (1024, 8192, 65536)
ROWS: Final = (1, 8, 64)
PROMPT: Final = 65536
CORES: Final = 16
SLIDING_LAYERS: Final = 5
PUBLISHED_MINUTES: Final = 110
READ_BYTES: Final = 2**28
CHAINS: Final = 12


@dataclass(frozen=True)
class Measured:
    """One kind of call."""

    layer: str
    positions: int
    rows: int
    ms: float
    best_ms: float
    gb_s: float
    gflop_s: float
    bus_before: float
    bus_after: float
    peak_before: float
    peak_after: float
    calls: int


def _fma_loop(rounds: int, workers: int, out: F32) -> None:
    for worker in prange(workers):
        x, a = splat(np.float32(1e-9)), splat(np.float32(worker))
        b, c, d, e, f = a, a, a, a, a
        g, h, i, j, k, m = a, a, a, a, a, a
        for _ in range(rounds):
            a, b, c, d = fma(x, x, a), fma(x, x, b), fma(x, x, c), fma(x, x, d)
            e, f, g, h = fma(x, x, e), fma(x, x, f), fma(x, x, g), fma(x, x, h)
            i, j, k, m = fma(x, x, i), fma(x, x, j), fma(x, x, k), fma(x, x, m)
        first, second = add(add(a, b), add(c, d)), add(add(e, f), add(g, h))
        out[worker] = total(add(add(first, second), add(add(i, j), add(k, m))))


def _read_loop(array: F32, workers: int, out: F32) -> None:
    part = array.shape[0] // workers
    for worker in prange(workers):
        a = b = c = d = splat(np.float32(0.0))
        for at in range(worker * part, (worker + 1) * part, 4 * LANES):
            a, b = add(a, load(array, at)), add(b, load(array, at + LANES))
            c, d = add(c, load(array, at + 2 * LANES)), add(d, load(array, at + 3 * LANES))
        out[worker] = total(add(add(a, b), add(c, d)))


class Machine:
    """This machine's own peaks, by all threads that attention has."""

    def __init__(self, threads: int) -> None:
        compile_ = numba.njit(nogil=True, parallel=threads > 1)
        self._fma: Callable[..., None] = compile_(_fma_loop)
        self._read: Callable[..., None] = compile_(_read_loop)
        self._threads = threads
        self._out = np.zeros(threads, np.float32)
        self._array = np.ones(READ_BYTES // 4 // (threads * 64) * threads * 64, np.float32)
        self.bus()
        self.gflop_s()

    def bus(self) -> float:
        """GB/s of reading."""
        best = min(_timed(lambda: self._read(self._array, self._threads, self._out)) for _ in range(2))
        return self._array.nbytes / best / 1e9

    def gflop_s(self) -> float:
        """GFLOP/s of fused multiply-adds in registers."""
        rounds = 2_000_000
        best = min(_timed(lambda: self._fma(rounds, self._threads, self._out)) for _ in range(3))
        return rounds * self._threads * CHAINS * LANES * 2 / best / 1e9


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Layer:
    """One layer's attention with a stream of so many positions, whose keys and values are noise."""

    def __init__(
        self, name: str, kv_heads: int, window: int | None, positions: int, storage: Storage
    ) -> None:
        self.name, self.kv_heads, self.window = name, kv_heads, window
        self.positions, self.storage = positions, storage
        extent = window or 1024
        rng = np.random.default_rng(1)
        width = kv_heads * DIM
        sizes = AttentionSizes(HEADS, kv_heads, DIM, RANKS, extent, window, 4)
        weights = AttentionWeights(
            *(np.ones(DIM, np.float32) for _ in "qk"),
            *(0.3 * rng.standard_normal((width, 4), np.float32) for _ in "kv"),
            0.1 * rng.standard_normal((RANKS, extent), np.float32),
        )
        kept = positions + ROWS[-1] if window is None else window + 16 + ROWS[-1]
        table = np.arange(-(-kept // BLOCK), dtype=np.int32)[None]
        self._attention = Attention(sizes, weights, table, 16, 1e-6, (8192.0, 0.1), storage)
        self._widths = (HEADS * DIM, width, width, HEADS * RANKS)
        # To append so many positions by prefill would take minutes.
        for blocks in (self._attention._keys, self._attention._values):
            noise = rng.standard_normal(blocks[0].shape, np.float32)
            blocks[:] = noise if storage == "f32" else noise.view(np.uint32) >> 16

    def measure(self, rows: int, machine: Machine, seconds: float) -> Measured:
        """Call it again and again on the last `rows` positions."""
        rng = np.random.default_rng(rows)
        inputs = [rng.standard_normal((rows, width), np.float32) for width in self._widths]
        out = np.empty_like(inputs[0])
        window = (np.array([value], np.int32) for value in (0, self.positions - rows, rows))
        table = RowTable.from_windows(*window)
        self._attention(table, *inputs, out)
        before, peak_before = machine.bus(), machine.gflop_s()
        times: list[float] = []
        while len(times) < 2 or sum(times) < seconds:
            times.append(_timed(lambda: self._attention(table, *inputs, out)))
        after, peak_after = machine.bus(), machine.gflop_s()
        middle = statistics.median(times)
        seen = sum(min(p + 1, self.window or p + 1) for p in table.positions.tolist())
        read = min(self.positions, (self.window or self.positions) + rows - 1)
        read_bytes = read * self.kv_heads * DIM * 2 * NUMBER_BYTES[self.storage]
        return Measured(
            self.name,
            self.positions,
            rows,
            1e3 * middle,
            1e3 * min(times),
            read_bytes / middle / 1e9,
            seen * HEADS * DIM * 4 / middle / 1e9,
            before,
            after,
            peak_before,
            peak_after,
            len(times),
        )


def first_token(results: list[Measured], threads: int, matrix_ms: float) -> dict[str, float]:
    """Seconds to the first token of the prompt on one stage with sixteen cores, by parts.

    Arithmetic is taken to scale with cores, because windows of 64 rows are bound by it.
    """
    windows = np.arange(0, PROMPT, ROWS[-1])
    seconds: dict[str, float] = {}
    for layer, layers in (("global", 1), ("sliding", SLIDING_LAYERS)):
        points = [
            (each.positions, each.ms) for each in results if each.layer == layer and each.rows == ROWS[-1]
        ]
        # Before the first point time falls with the positions, down to nothing.
        places, times = zip(*([(0, 0.0), *points] if layer == "global" else points), strict=True)
        whole = float(np.interp(windows, places, times).sum()) / 1e3
        seconds[layer] = layers * whole * threads / CORES
    seconds["matrices"] = PROMPT * matrix_ms / 1e3
    return seconds | {"all": sum(seconds.values())}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each kind of call, two calls at least")
    parser.add_argument(
        "--matrix-ms",
        type=float,
        default=11 * 2 / CORES,
        help="of the stage's matrices a row of prefill on sixteen cores (11 on two are the bar)",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads = compiling.set_threads(options.threads)
    compiling.warm_up()
    machine = Machine(threads)
    print(f"{threads} threads, {options.cache}")
    print(
        "layer    positions rows        ms   GB/s   of bus (before, after)   GFLOP/s  of peak (before, after)"
    )
    results: list[Measured] = []
    kinds: list[tuple[str, int, int | None]] = [("global", 8, None), ("sliding", 16, WINDOW)]
    for name, kv_heads, window in kinds:
        for positions in POSITIONS if window is None else POSITIONS[1:2]:
            layer = Layer(name, kv_heads, window, positions, options.cache)
            for rows in ROWS:
                m = layer.measure(rows, machine, options.seconds)
                results.append(m)
                bus, peak = (m.bus_before + m.bus_after) / 2, (m.peak_before + m.peak_after) / 2
                print(
                    f"{m.layer:8} {m.positions:9} {m.rows:4} {m.ms:9.2f} {m.gb_s:6.1f}   {m.gb_s / bus:5.0%}"
                    f" ({m.bus_before:.1f}, {m.bus_after:.1f}) {m.gflop_s:17.1f} {m.gflop_s / peak:8.0%}"
                    f" ({m.peak_before:.0f}, {m.peak_after:.0f})",
                    flush=True,
                )
            del layer
    parts = first_token(results, threads, options.matrix_ms)
    print(
        f"first token of a {PROMPT // 1024}k prompt, one stage, {CORES} cores, by these times: "
        f"{parts['global']:.0f} s global attention + {parts['sliding']:.0f} s sliding attention + "
        f"{parts['matrices']:.0f} s matrices = {parts['all'] / 60:.1f} minutes "
        f"(published: {PUBLISHED_MINUTES} minutes)"
    )
    if options.json is not None:
        report: dict[str, Any] = {
            "threads": threads,
            "cache": options.cache,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "results": [asdict(each) for each in results],
            "first_token_s": parts,
            "published_s": 60 * PUBLISHED_MINUTES,
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
