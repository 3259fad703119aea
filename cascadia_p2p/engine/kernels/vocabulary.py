"""The next token from a row of logits: the largest, and its log probability."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.compiling import kernel
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    add,
    exp,
    fma,
    keep,
    larger,
    largest,
    load_part,
    splat,
    sub,
    total,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.rows import I32

_CHUNK = 16 * LANES


@kernel("(float32[:,::1], int32[::1], float32[::1], boolean[::1])")
def _pick(logits: F32, tokens: I32, logprobs: F32, finite: npt.NDArray[np.bool_]) -> None:
    count = logits.shape[1]
    for row in range(logits.shape[0]):
        at = row * count
        top, check = splat(np.float32(-np.inf)), splat(0.0)
        for c in range(0, count, LANES):
            x = load_part(logits, at + c, count - c)
            check = fma(x, splat(0.0), check)
            top = larger(keep(x, 0, count - c, np.float32(-np.inf)), top)
        best = largest(top)
        finite[row] = total(check) == 0.0
        sum_of_exps = 0.0
        for start in range(0, count, _CHUNK):
            sums = splat(0.0)
            for c in range(start, min(start + _CHUNK, count), LANES):
                e = exp(sub(load_part(logits, at + c, count - c), splat(best)))
                sums = add(sums, keep(e, 0, count - c, np.float32(0.0)))
            sum_of_exps += total(sums)
        logprobs[row] = -math.log(sum_of_exps)
        token = 0
        while token < count - 1 and logits[row, token] != best:
            token += 1
        tokens[row] = token


def pick_tokens(logits: F32, tokens: I32, logprobs: F32, finite: npt.NDArray[np.bool_]) -> None:
    """Greedy choice for each row, ties to the lower id.

    Args:
        logits: float32 [rows, vocabulary].
        tokens: int32 [rows], the ids of the largest logits.
        logprobs: float32 [rows], their natural log probabilities; summed over the vocabulary in float64.
        finite: bool [rows]; where it comes out False the row's token means nothing.
    """
    for name, array in (("tokens", tokens), ("logprobs", logprobs), ("finite", finite)):
        expect(name, array, (len(logits),))
    _pick(logits, tokens, logprobs, finite)
