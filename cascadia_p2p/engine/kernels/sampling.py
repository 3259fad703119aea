"""Tokens by chance: random numbers from a counter, cuts, the draw; and the names of the likeliest tokens.

All of it is defined by the float32 logits. Tokens are ordered by logit, ties by the lower id. The weight of a
token is exp((logit - largest) / temperature) in float32, by the kernels' own exp, which is the same on every
processor; sums of weights are float64. Only the `top_k` first stay; of these only the first whose weights
together reach `top_p` times the sum of all that stayed, at least one. Of what is left, in order of ids, the
first token is drawn where the running sum exceeds the random number times the whole sum.

No cut sorts. Where one lies is found by counting into bins between the largest and the smallest candidate,
then going on with the one bin in which the count reaches its goal.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.compiling import kernel, part
from cascadia_p2p.compiled.simd import (
    F32,
    LANES,
    choose,
    div,
    exp,
    keep,
    larger,
    largest,
    load_part,
    splat,
    store_part,
    sub,
)
from cascadia_p2p.engine.kernels.checks import Shaped, expect
from cascadia_p2p.engine.kernels.rows import I32

F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
U64: TypeAlias = npt.NDArray[np.uint64]

_BLOCK: Final = 64
_BINS: Final = 2048
_LOWEST: Final = np.float32(-np.inf)

# Philox4x64 with ten rounds: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
# SC 2011, https://doi.org/10.1145/2063384.2063405, section 3.3; the constants are those of Random123.
_ROUNDS: Final = 10
_MULTIPLY_0: Final = np.uint64(0xD2E7470EE14C6C93)
_MULTIPLY_1: Final = np.uint64(0xCA5A826395121157)
_WEYL_0: Final = np.uint64(0x9E3779B97F4A7C15)
_WEYL_1: Final = np.uint64(0xBB67AE8584CAA73B)
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFFFFFF)
_ONE: Final = np.uint64(1)
_UNUSED_BITS: Final = np.uint64(11)
_UNIT: Final = 2.0**-53


class Scratch:
    """Memory that `sample_tokens` works in, about 8 bytes for each token of the vocabulary.

    Args:
        vocabulary: token ids that exist.
    """

    def __init__(self, vocabulary: int) -> None:
        blocks = -(-vocabulary // _BLOCK)
        self.weights = np.empty(vocabulary, np.float32)
        self.candidates = np.empty(vocabulary, np.int32)
        self.sums = np.empty(blocks, np.float64)
        self.tops = np.empty(blocks, np.float32)
        self.bins = np.empty(_BINS, np.float64)


@part
def _high_half(a: np.uint64, b: np.uint64) -> np.uint64:
    """The upper 64 bits of a product."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    one = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (one & _LOW)
    return a_high * b_high + (one >> _HALF) + (other >> _HALF)


@kernel("(uint64[::1], uint64[::1], float64[::1])")
def _draw(seeds: U64, positions: U64, numbers: F64) -> None:
    for row in range(len(seeds)):
        key_0, key_1 = seeds[row], np.uint64(0)
        a, b, c, d = positions[row] + _ONE, np.uint64(0), np.uint64(0), np.uint64(0)
        for _ in range(_ROUNDS):
            high_0, low_0 = _high_half(_MULTIPLY_0, a), _MULTIPLY_0 * a
            high_1, low_1 = _high_half(_MULTIPLY_1, c), _MULTIPLY_1 * c
            a, b, c, d = high_1 ^ b ^ key_0, low_1, high_0 ^ d ^ key_1, low_0
            key_0 += _WEYL_0
            key_1 += _WEYL_1
        numbers[row] = np.float64(a >> _UNUSED_BITS) * _UNIT


def draw_numbers(seeds: U64, positions: U64, numbers: F64) -> None:
    """A random number from 0 to below 1 for each seed and position, which depends on nothing else.

    It is what NumPy's `Generator(Philox(key=seed, counter=position)).random()` gives.

    Args:
        seeds: uint64 [rows].
        positions: uint64 [rows].
        numbers: float64 [rows], the result.
    """
    expect("positions", positions, (len(seeds),))
    expect("numbers", numbers, (len(seeds),))
    _draw(seeds, positions, numbers)


@part
def _weigh(logits: F32, best: np.float32, temperature: np.float32, weights: F32) -> None:
    count = len(logits)
    for c in range(0, count, LANES):
        # By division: the inverse of a small temperature is infinite.
        x = div(sub(load_part(logits, c, count - c), splat(best)), splat(temperature))
        store_part(weights, c, exp(x), count - c)


@part
def _sum(weights: F32, sums: F64) -> float:
    """The sum of all weights, and of each block of them."""
    total = 0.0
    for block in range(len(sums)):
        start = block * _BLOCK
        end = min(start + _BLOCK, len(weights))
        whole = start + (end - start) // 4 * 4
        a = b = c = d = 0.0
        for i in range(start, whole, 4):
            a += weights[i]
            b += weights[i + 1]
            c += weights[i + 2]
            d += weights[i + 3]
        for i in range(whole, end):
            a += weights[i]
        sums[block] = (a + b) + (c + d)
        total += sums[block]
    return total


@part
def _bin(high: float, x: np.float32, scale: float) -> int:
    return min(int((high - np.float64(x)) * scale), _BINS - 1)


@part
def _bound(
    logits: F32, weights: F32, candidates: I32, count: int, bins: F64, goal: float, counted: bool
) -> tuple[np.float32, int, int]:
    """Where the largest candidates reach a goal, by number if `counted`, by weight otherwise.

    Returns:
        The smallest logit that is needed; how many of those with just this logit are; how many there are,
        whose ids `candidates` then holds in their order.
    """
    above = 0.0
    while True:
        low = high = logits[candidates[0]]
        for i in range(1, count):
            low, high = min(low, logits[candidates[i]]), max(high, logits[candidates[i]])
        if low == high:
            break
        # The largest falls into the first bin and the smallest into the last, so the candidates get fewer.
        top = np.float64(high)
        scale = _BINS / (top - np.float64(low))
        bins[:] = 0.0
        for i in range(count):
            token = candidates[i]
            bins[_bin(top, logits[token], scale)] += 1.0 if counted else np.float64(weights[token])
        place = 0
        while place < _BINS - 1 and above + bins[place] < goal:
            above += bins[place]
            place += 1
        inside = 0
        for i in range(count):
            token = candidates[i]
            candidates[inside] = token
            inside += _bin(top, logits[token], scale) == place
        count = inside
    each = 1.0 if counted else np.float64(weights[candidates[0]])
    needed = 0
    while needed < count and above < goal:
        above += each
        needed += 1
    return low, needed, count


@part
def _candidates_by_rank(logits: F32, weights: F32, wanted: int, tops: F32, candidates: I32, bins: F64) -> int:
    """Gather tokens among which the `wanted` first are, and not many others where few are wanted."""
    count, blocks = len(logits), len(tops)
    if wanted > blocks:
        for i in range(count):
            candidates[i] = i
        return count
    for block in range(blocks):
        candidates[block] = block
        top = splat(_LOWEST)
        end = min(block * _BLOCK + _BLOCK, count)
        for c in range(block * _BLOCK, end, LANES):
            top = larger(keep(load_part(logits, c, end - c), 0, end - c, _LOWEST), top)
        tops[block] = largest(top)
    # As many blocks as tokens are wanted hold one that is no smaller.
    least, _, _ = _bound(tops, weights, candidates, blocks, bins, np.float64(wanted), True)
    found = 0
    for block in range(blocks):
        if tops[block] >= least:
            for i in range(block * _BLOCK, min(block * _BLOCK + _BLOCK, count)):
                candidates[found] = i
                found += logits[i] >= least
    return found


@part
def _candidates_by_weight(weights: F32, sums: F64, least: np.float32, candidates: I32) -> int:
    """Gather the tokens of at least this weight."""
    found = 0
    for block in range(len(sums)):
        if sums[block] >= least:
            for i in range(block * _BLOCK, min(block * _BLOCK + _BLOCK, len(weights))):
                candidates[found] = i
                found += weights[i] >= least
    return found


@part
def _drop(logits: F32, weights: F32, bound: np.float32, needed: int, candidates: I32, count: int) -> None:
    """Take the weight from all behind what `_bound` found."""
    for c in range(0, len(logits), LANES):
        left = len(logits) - c
        kept = choose(
            load_part(logits, c, left), splat(bound), splat(np.float32(0.0)), load_part(weights, c, left)
        )
        store_part(weights, c, kept, left)
    for i in range(needed, count):
        weights[candidates[i]] = 0.0


@part
def _find(weights: F32, sums: F64, target: float) -> int:
    """The first token of any weight up to which the weights exceed the target; the last one if none does."""
    below, block, last = 0.0, 0, len(sums) - 1
    while last > 0 and sums[last] == 0.0:
        last -= 1
    while block < last and below + sums[block] <= target:
        below += sums[block]
        block += 1
    token = -1
    for i in range(block * _BLOCK, min(block * _BLOCK + _BLOCK, len(weights))):
        if weights[i] > 0.0:
            token = i
            below += weights[i]
            if below > target:
                break
    return token


@kernel(
    "(float32[:,::1], float32[::1], int64[::1], float32[::1], float64[::1], float32[::1], int32[::1], "
    "float64[::1], float32[::1], float64[::1], int32[::1], float32[::1])"
)
def _sample(
    logits: F32,
    temperatures: F32,
    top_k: I64,
    top_p: F32,
    numbers: F64,
    weights: F32,
    candidates: I32,
    sums: F64,
    tops: F32,
    bins: F64,
    tokens: I32,
    logprobs: F32,
) -> None:
    vocabulary = logits.shape[1]
    for row in range(logits.shape[0]):
        if not temperatures[row] > 0.0:
            continue
        x, best = logits[row], logits[row, tokens[row]]
        _weigh(x, best, temperatures[row], weights)
        if 0 < top_k[row] < vocabulary:
            count = _candidates_by_rank(x, weights, top_k[row], tops, candidates, bins)
            goal = np.float64(top_k[row])
            bound, needed, count = _bound(x, weights, candidates, count, bins, goal, True)
            _drop(x, weights, bound, needed, candidates, count)
        total = _sum(weights, sums)
        if top_p[row] < 1.0:
            # Lighter tokens than this are together less than what top_p leaves out.
            least = np.float32((1.0 - top_p[row]) * total / vocabulary)
            count = _candidates_by_weight(weights, sums, least, candidates)
            bound, needed, count = _bound(x, weights, candidates, count, bins, top_p[row] * total, False)
            _drop(x, weights, bound, max(needed, 1), candidates, count)
            total = _sum(weights, sums)
        token = _find(weights, sums, numbers[row] * total)
        logprobs[row] = np.float32(np.float64(logprobs[row]) + (np.float64(x[token]) - np.float64(best)))
        tokens[row] = token


def sample_tokens(
    logits: F32,
    temperatures: F32,
    top_k: I64,
    top_p: F32,
    numbers: F64,
    scratch: Scratch,
    tokens: I32,
    logprobs: F32,
) -> None:
    """Draw a token for each row whose temperature is above 0, and leave the other rows as they are.

    Args:
        logits: float32 [rows, vocabulary]; finite where a token is drawn.
        temperatures: float32 [rows].
        top_k: int64 [rows]; tokens that stay, 0 for all.
        top_p: float32 [rows], up to 1; the share of their probability that stays.
        numbers: float64 [rows], from 0 to below 1: what each row draws.
        scratch: made for this vocabulary.
        tokens: int32 [rows]; the likeliest tokens, which become the drawn ones.
        logprobs: float32 [rows]; natural log probabilities of `tokens` at temperature 1, before and after.
    """
    rows, vocabulary = logits.shape
    given: dict[str, Shaped] = {
        "temperatures": temperatures,
        "top_k": top_k,
        "top_p": top_p,
        "numbers": numbers,
        "tokens": tokens,
        "logprobs": logprobs,
    }
    for name, array in given.items():
        expect(name, array, (rows,))
    expect("scratch", scratch.weights, (vocabulary,))
    _sample(
        logits,
        temperatures,
        top_k,
        top_p,
        numbers,
        scratch.weights,
        scratch.candidates,
        scratch.sums,
        scratch.tops,
        scratch.bins,
        tokens,
        logprobs,
    )


@kernel("(float32[:,::1], int32[::1], float32[::1], int64[::1], int32[:,::1], float32[:,::1])")
def _rank(logits: F32, tokens: I32, logprobs: F32, counts: I64, found: I32, found_logprobs: F32) -> None:
    vocabulary = logits.shape[1]
    for row in range(logits.shape[0]):
        wanted = min(counts[row], vocabulary)
        if wanted <= 0:
            continue
        x, ids = logits[row], found[row]
        held = 0
        for start in range(0, vocabulary, LANES):
            left = vocabulary - start
            if held == wanted:
                top = largest(keep(load_part(x, start, left), 0, left, _LOWEST))
                if top <= x[ids[held - 1]]:
                    continue
            for token in range(start, start + min(left, LANES)):
                if held == wanted and x[token] <= x[ids[held - 1]]:
                    continue
                at = held if held < wanted else held - 1
                while at > 0 and x[ids[at - 1]] < x[token]:
                    ids[at] = ids[at - 1]
                    at -= 1
                ids[at] = token
                held = min(held + 1, wanted)
        known = np.float64(logprobs[row]) - np.float64(x[tokens[row]])
        for at in range(held):
            found_logprobs[row, at] = np.float32(known + np.float64(x[ids[at]]))


def rank_tokens(
    logits: F32, tokens: I32, logprobs: F32, counts: I64, found: I32, found_logprobs: F32
) -> None:
    """Name the likeliest tokens of each row, the likeliest first, ties by the lower id.

    Args:
        logits: float32 [rows, vocabulary]; finite where tokens are asked for.
        tokens: int32 [rows], any token of each row.
        logprobs: float32 [rows], its natural log probability at temperature 1.
        counts: int64 [rows]; tokens to name, at most all of the vocabulary are.
        found: int32 [rows, at least the largest count]; the ids, and nothing behind a row's count.
        found_logprobs: float32, as `found`: their natural log probabilities.
    """
    rows = len(logits)
    for name, array in (("tokens", tokens), ("logprobs", logprobs), ("counts", counts)):
        expect(name, array, (rows,))
    width = max(found.shape[1], int(counts.max(initial=0)))
    expect("found", found, (rows, width))
    expect("found_logprobs", found_logprobs, (rows, width))
    _rank(logits, tokens, logprobs, counts, found, found_logprobs)
