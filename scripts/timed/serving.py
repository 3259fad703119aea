"""The side of the child: answers orders from standard input with seconds a call, one JSON object a line.

It needs nothing but Python and numpy, so that it runs wherever the engine to be timed is installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

HELD = 64
"""Positions that every stream holds when decoding is timed."""


@dataclass(frozen=True)
class Order:
    """Calls to be timed.

    Args:
        kind: "decode", where a call takes one id of every stream, or "prefill", where it takes a whole prompt
            up to its first token.
        streams: at once; 1 for prefill.
        ids: of the prompt.
        calls: to be counted; one more goes in front.
    """

    kind: str
    streams: int
    ids: int
    calls: int


class Engine(Protocol):
    """What is timed. Every step ends with the highest logit of every stream."""

    def about(self) -> dict[str, object]:
        """Versions and settings, for the report."""

    def prefill(self, ids: np.ndarray) -> None:
        """Forget everything, then take prompts, int64 [streams, ids], to their first tokens."""

    def decode(self, ids: np.ndarray) -> None:
        """Take the next id of every stream, int64 [streams]."""

    def parts(self) -> dict[str, float]:
        """Seconds so far by kind of work; empty where the engine does not tell."""


def serve(engine: Engine, vocab: int) -> int:
    """Answer orders until standard input ends.

    Args:
        engine: what to time; it is warm.
        vocab: ids are drawn below this, the same for every engine.
    """
    # Libraries that write to standard output would spoil the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _tell(answers.write, answers.flush, engine.about())
    for line in sys.stdin:
        order = Order(**json.loads(line))
        random = np.random.default_rng(1)
        timed = _decode if order.kind == "decode" else _prefill
        seconds, parts = timed(engine, order, random, vocab)
        _tell(answers.write, answers.flush, {"seconds": seconds, "parts": parts})
    return 0


def _decode(
    engine: Engine, order: Order, random: np.random.Generator, vocab: int
) -> tuple[list[float], dict[str, float]]:
    engine.prefill(random.integers(0, vocab, (order.streams, order.ids)))
    steps = random.integers(0, vocab, (order.calls + 1, order.streams))
    return _timed(engine, [lambda step=step: engine.decode(step) for step in steps])


def _prefill(
    engine: Engine, order: Order, random: np.random.Generator, vocab: int
) -> tuple[list[float], dict[str, float]]:
    prompts = random.integers(0, vocab, (order.calls + 1, order.streams, order.ids))
    return _timed(engine, [lambda prompt=prompt: engine.prefill(prompt) for prompt in prompts])


def _timed(engine: Engine, calls: list[Callable[[], None]]) -> tuple[list[float], dict[str, float]]:
    """Seconds of all calls but the first, and mean seconds of these by part."""
    calls[0]()
    before, seconds = engine.parts(), []
    for call in calls[1:]:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    spent = {part: (total - before[part]) / len(seconds) for part, total in engine.parts().items()}
    return seconds, {part: each for part, each in spent.items() if each}


def _tell(write: Callable[[str], object], flush: Callable[[], object], content: dict[str, object]) -> None:
    write(json.dumps(content) + "\n")
    flush()
