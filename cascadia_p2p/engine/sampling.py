"""How the stream in each slot chooses its tokens, and the choice among a frame's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.kernels.rows import I32
from cascadia_p2p.engine.kernels.sampling import Scratch, draw_numbers, rank_tokens, sample_tokens
from cascadia_p2p.engine.kernels.vocabulary import pick_tokens
from cascadia_p2p.engine.matrix import F32
from cascadia_p2p.engine.paging import Mask
from cascadia_p2p.engine.slots import Table
from cascadia_p2p.wire.frames import MAX_ALTERNATIVES, OperationKind, alternative_table


class Choice:
    """The tokens of a frame's rows as they are chosen.

    Args:
        rows: rows that want a token.
    """

    def __init__(self, rows: int) -> None:
        self.tokens: I32 = np.empty(rows, np.int32)
        """int32 [rows]."""
        self.logprobs: F32 = np.empty(rows, np.float32)
        """float32 [rows], natural logarithms at temperature 1, before any cut."""
        self.finite: Mask = np.empty(rows, np.bool_)
        """bool [rows]; where it is False the row's token means nothing."""
        self.named: npt.NDArray[np.int64] | None = None
        """int64 [rows], how many of `alternatives` are the row's; None where there are none."""
        self.alternatives: list[Table] = []
        """ALTERNATIVE tables, to be read one after the other."""

    def pick(self, logits: F32, at: int) -> None:
        """Take the likeliest token for each row of `logits` [rows, vocabulary], from row `at` on."""
        end = at + len(logits)
        pick_tokens(logits, self.tokens[at:end], self.logprobs[at:end], self.finite[at:end])

    def name(self, at: int, counts: npt.NDArray[np.int64], table: Table) -> None:
        """Add the alternatives of rows from `at` on, int64 [rows] of which are each row's."""
        if self.named is None:
            self.named = np.zeros(len(self.tokens), np.int64)
        self.named[at : at + len(counts)] = counts
        self.alternatives.append(table)


class SlotSampling:
    """What START operations said of each slot's stream: seed, temperature, cuts, alternatives.

    Args:
        slots: as promised.
    """

    def __init__(self, slots: int) -> None:
        self._seed = np.zeros(slots, np.uint64)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._alternatives = np.zeros(slots, np.int64)
        self._special = np.zeros(slots, np.bool_)
        self._scratch: Scratch | None = None
        self.all_greedy = True
        """Whether every slot takes the likeliest token and names no others."""

    def operate(self, operations: Table) -> None:
        """Take the options of the streams that start; slots that do not exist are passed over."""
        starts = operations[operations["kind"] == OperationKind.START]
        starts = starts[starts["slot"] < len(self._seed)]
        slots = starts["slot"]
        self._seed[slots] = starts["seed"]
        self._temperature[slots] = starts["temperature"]
        self._top_k[slots] = starts["top_k"]
        self._top_p[slots] = starts["top_p"]
        self._alternatives[slots] = starts["logprobs"]
        self._special[slots] = (starts["temperature"] > 0) | (starts["logprobs"] > 0)
        self.all_greedy = not self._special.any()

    def choose(
        self,
        logits: F32,
        slots: npt.NDArray[np.uint32],
        positions: npt.NDArray[np.uint32],
        into: Choice,
        at: int,
    ) -> None:
        """Draw the tokens, and name the alternatives, of rows whose likeliest token is picked.

        Args:
            logits: float32 [rows, vocabulary].
            slots: uint32 [rows], whose row it is; all of them exist.
            positions: uint32 [rows], the position that each token takes.
            into: holds the picked tokens, and gets the result.
            at: the first row's place there.
        """
        end = at + len(logits)
        tokens, logprobs, finite = into.tokens[at:end], into.logprobs[at:end], into.finite[at:end]
        if not self._special[slots].any():
            return
        # Before another token is drawn: its score is no better known than that of the likeliest.
        counts = np.where(finite, self._alternatives[slots], 0)
        if counts.any():
            counts = np.minimum(counts, logits.shape[1])
            into.name(at, counts, _alternatives(logits, tokens, logprobs, counts))
        temperatures = np.where(finite, self._temperature[slots], np.float32(0.0))
        if temperatures.any():
            if self._scratch is None:
                self._scratch = Scratch(logits.shape[1])
            numbers = np.empty(len(logits), np.float64)
            draw_numbers(self._seed[slots], positions.astype(np.uint64), numbers)
            sample_tokens(
                logits,
                temperatures,
                self._top_k[slots],
                self._top_p[slots],
                numbers,
                self._scratch,
                tokens,
                logprobs,
            )


def _alternatives(logits: F32, tokens: I32, logprobs: F32, counts: npt.NDArray[np.int64]) -> Table:
    """ALTERNATIVE table of all rows, one after the other."""
    found = np.empty((len(logits), MAX_ALTERNATIVES), np.int32)
    found_logprobs = np.empty(found.shape, np.float32)
    rank_tokens(logits, tokens, logprobs, counts, found, found_logprobs)
    named = np.arange(MAX_ALTERNATIVES) < counts[:, None]
    table = alternative_table(int(counts.sum()))
    table["token"], table["logprob"] = found[named], found_logprobs[named]
    return table
