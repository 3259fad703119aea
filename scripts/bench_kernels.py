"""Measure products of stored matrices: how far from float64 they are, and how long they take.

    python scripts/bench_kernels.py [--threads N] [--width N] [--seconds S]

A square matrix of each encoding, times 1, 8 and 64 rows, in each precision. The error is the relative L2 norm
of the difference to float64 products of the same stored weights: with activations drawn from a normal
distribution, with one channel a thousand times larger, and of a layer of experts. MB are of the stored
matrix, GB/s what a call reads of it a second; memory is read beside each encoding, since its speed changes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernel_backend import PLANES, KernelBackend
from cascadia_p2p.engine.kernels.bus import read_memory
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.matrix import GatedWeights
from cascadia_p2p.matrices.encoding import GROUP, Encoding, StoredMatrix, stored_bytes, stored_view
from cascadia_p2p.matrices.packing import dense, pack

F32 = npt.NDArray[np.float32]
ROWS: Final = (1, 8, 64)
RANGES: Final = {
    Encoding.INT4: (-8, 7),
    Encoding.INT4_AFFINE: (0, 15),
    Encoding.INT8: (-127, 127),
    Encoding.INT8_GROUPED: (-128, 127),
}
ERROR_WIDTH: Final = 1024
READ_BYTES: Final = 2**28


def stored(encoding: Encoding, rng: np.random.Generator, *shape: int) -> StoredMatrix:
    """Random codes of a matrix, or of a stack, that keeps the size of its input, where a file has them."""
    if encoding is Encoding.F32:
        return StoredMatrix.of((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))
    low, high = RANGES[encoding]
    codes = rng.integers(low, high, shape, np.int8, endpoint=True)
    groups = () if encoding is Encoding.INT8 else (-(-shape[-1] // GROUP),)
    scales = (1.7 / high / np.sqrt(shape[-1]) * rng.uniform(0.5, 1.5, (*shape[:-1], *groups))).astype(
        np.float32
    )
    offsets = -7.5 * scales if encoding is Encoding.INT4_AFFINE else None
    packed = pack(encoding, shape, codes, scales, offsets)
    size = stored_bytes(encoding, shape)
    raw = np.empty(size + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][:size]
    view = stored_view(encoding, shape, raw)
    view.codes[...] = packed.codes
    if view.scales is not None and packed.scales is not None:
        view.scales[...] = packed.scales
    return view


def relative(got: F32, expected: npt.NDArray[np.float64]) -> float:
    """The difference in parts of what was expected."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def errors(encoding: Encoding, precision: str, rng: np.random.Generator) -> list[float]:
    """Of products of normal activations, of such with an outlier, and of a layer of experts."""
    backend = KernelBackend(precision, 64, compiling.threads())
    matrix = stored(encoding, rng, ERROR_WIDTH, ERROR_WIDTH)
    project, wide = backend.projections([matrix], "bench"), dense(matrix).astype(np.float64).T
    x = rng.standard_normal((64, ERROR_WIDTH)).astype(np.float32)
    outlier = x.copy()
    outlier[:, 77] *= 1000
    found = [relative(project(each)[0], each.astype(np.float64) @ wide) for each in (x, outlier)]
    parts = [stored(encoding, rng, 1, 256, 1024), stored(encoding, rng, 1, 256, 1024)]
    weights = GatedWeights(*parts, stored(encoding, rng, 1, 1024, 256))
    ids, ones = np.zeros((64, 1), np.int32), np.ones((64, 1), np.float32)
    layer = backend.experts(weights, weights, 1, "bench")
    gate, up, down = (dense(each)[0].astype(np.float64).T for each in (*parts, weights.down))
    z = x.astype(np.float64) @ gate
    expected = 2 * (z / (1 + np.exp(-z)) * (x.astype(np.float64) @ up)) @ down
    return [*found, relative(layer(x, ids, ones, ones), expected)]


def median(call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Measure, and print a line for each encoding and precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--width", type=int, default=6144)
    parser.add_argument("--seconds", type=float, default=1.0, help="a measurement")
    given = parser.parse_args()
    threads = compiling.set_threads(given.threads)
    compiling.warm_up()
    print(f"{instructions()}, {threads} threads, {given.width} x {given.width}")
    head = f"{'encoding':9}{'precision':>10}{'error':>9}{'outlier':>9}{'experts':>9}{'MB':>7}"
    print(head + "".join(f"{f'{rows} rows, ms':>12}{'GB/s':>6}" for rows in ROWS))
    memory = np.ones(READ_BYTES // 4, np.float32)
    for encoding in (Encoding.F32, *RANGES):
        rng = np.random.default_rng(1)
        matrix = stored(encoding, rng, given.width, given.width)
        x = rng.standard_normal((max(ROWS), given.width)).astype(np.float32)
        for precision in PLANES if encoding is not Encoding.F32 else ("exact",):
            line = "".join(f"{error:9.1e}" for error in errors(encoding, precision, rng))
            project = KernelBackend(precision, max(ROWS), threads).projections([matrix], "bench")
            line += f"{matrix.nbytes / 1e6:7.1f}"
            for rows in ROWS:
                spent = median(partial(project, x[:rows]), given.seconds)
                line += f"{1e3 * spent:12.2f}{matrix.nbytes / spent / 1e9:6.1f}"
            print(f"{encoding:9}{precision:>10}{line}", flush=True)
        print(f"memory {READ_BYTES / median(lambda: read_memory(memory), 0.3) / 1e9:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
