"""Reading memory as fast as it comes: what products of few rows are bound by."""

from __future__ import annotations

import numpy as np
from numba import prange

from cascadia_p2p.compiled.compiling import threads, twin_kernels
from cascadia_p2p.compiled.simd import F32, LANES, larger, load, splat, store

_STEP = 8 * LANES


@twin_kernels("(float32[::1], int64, float32[:,::1])")
def _read(memory: F32, parts: int, out: F32) -> None:
    steps = memory.shape[0] // _STEP
    for p in prange(parts):
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat(0.0)
        for i in range(steps * p // parts * _STEP, steps * (p + 1) // parts * _STEP, _STEP):
            a0, a1 = larger(load(memory, i), a0), larger(load(memory, i + LANES), a1)
            a2, a3 = larger(load(memory, i + 2 * LANES), a2), larger(load(memory, i + 3 * LANES), a3)
            a4, a5 = larger(load(memory, i + 4 * LANES), a4), larger(load(memory, i + 5 * LANES), a5)
            a6, a7 = larger(load(memory, i + 6 * LANES), a6), larger(load(memory, i + 7 * LANES), a7)
        a0, a1, a2, a3 = larger(a0, a1), larger(a2, a3), larger(a4, a5), larger(a6, a7)
        store(out, p * LANES, larger(larger(a0, a1), larger(a2, a3)))


def read_memory(memory: F32) -> None:
    """Go once through float32 [n] with all threads of the kernels."""
    out = np.zeros((threads(), LANES), np.float32)
    _read(memory, threads(), out)
