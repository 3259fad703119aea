"""Measure what choosing one token costs beside the greedy choice, at Inkling's vocabulary.

    python scripts/bench_sampling.py [--vocabulary N] [--seconds S] [--json FILE]

One row, one thread. `peaked` are logits as a model gives them where it knows what comes, `normal` a wide
bell, `flat` nearly equal ones, where no cut finds few candidates. Each way of choosing takes its turn with
the greedy choice, so that the ratio of the two is of the same moments; each holds the greedy choice that it
begins with. Microseconds are the best of all turns, since others share the machine. A table goes to stdout,
JSON to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.sampling import Choice, SlotSampling
from cascadia_p2p.types import GREEDY, Sampling
from cascadia_p2p.wire.frames import OperationKind, operation_table

F32 = npt.NDArray[np.float32]
VOCABULARY: Final = 200_058
WAYS: Final[dict[str, tuple[Sampling, int]]] = {
    "temperature": (Sampling(1.0, seed=1), 0),
    "top_k 50": (Sampling(1.0, 50, seed=1), 0),
    "top_p 0.95": (Sampling(1.0, 0, 0.95, 1), 0),
    "top_k 50, top_p 0.95": (Sampling(1.0, 50, 0.95, 1), 0),
    "top_k 100000": (Sampling(1.0, 100_000, seed=1), 0),
    "20 alternatives": (GREEDY, 20),
}


@dataclass(frozen=True)
class Measured:
    """One way of choosing a token from one row."""

    logits: str
    way: str
    us: float
    greedy_us: float
    ratio: float
    turns: int


def rows(vocabulary: int) -> dict[str, F32]:
    """Logits, float32 [1, vocabulary] each."""
    rng = np.random.default_rng(1)
    peaked = rng.normal(0, 2, vocabulary)
    peaked[rng.choice(vocabulary, 5, replace=False)] = 20, 19, 18, 17.5, 17
    made = {
        "peaked": peaked,
        "normal": rng.normal(0, 3, vocabulary),
        "flat": rng.normal(0, 0.01, vocabulary),
    }
    return {name: row.astype(np.float32)[None].copy() for name, row in made.items()}


def chooser(logits: F32, sampling: Sampling, alternatives: int) -> Callable[[], float]:
    """Chooses a token at the next position, as a stage does; returns the seconds that it took."""
    start = operation_table(1)
    start["kind"], start["logprobs"] = OperationKind.START, alternatives
    for name in ("seed", "top_k", "temperature", "top_p"):
        start[name] = getattr(sampling, name)
    slots = SlotSampling(1)
    slots.operate(start)
    slot, position = np.zeros(1, np.uint32), np.zeros(1, np.uint32)

    def choose() -> float:
        position[0] += 1
        began = time.perf_counter()
        choice = Choice(1)
        choice.pick(logits, 0)
        if not slots.all_greedy:
            slots.choose(logits, slot, position, choice, 0)
        return time.perf_counter() - began

    choose()
    return choose


def measure(name: str, logits: F32, way: str, seconds: float) -> Measured:
    """Turns of greedy and of this way."""
    greedy, other = chooser(logits, GREEDY, 0), chooser(logits, *WAYS[way])
    pairs: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while len(pairs) < 20 or time.monotonic() < end:
        pairs.append((greedy(), other()))
    plain, chosen = (min(each) * 1e6 for each in zip(*pairs, strict=True))
    return Measured(name, way, round(chosen, 1), round(plain, 1), round(chosen / plain, 2), len(pairs))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Measure the cost of choosing a token.")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each way and kind of logits")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compiling.set_threads(1)
    compiling.warm_up()
    results = [
        measure(name, logits, way, args.seconds)
        for name, logits in rows(args.vocabulary).items()
        for way in WAYS
    ]
    for each in results:
        beside = f"{each.ratio:5.2f} x greedy ({each.greedy_us:.0f} us)"
        print(f"{each.logits:8} {each.way:22} {each.us:8.0f} us, {beside}")
    if args.json is not None:
        facts = {
            "vocabulary": args.vocabulary,
            "cpu": numba.config.CPU_NAME or platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numba": numba.__version__,
        }
        args.json.write_text(
            json.dumps({**facts, "results": [asdict(each) for each in results]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
