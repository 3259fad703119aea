"""The side of the benchmark: starts children, orders calls, and reads the bus around each group of calls."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from cascadia_p2p.engine.kernels import bus
from timed.serving import Order

SCRIPTS = Path(__file__).resolve().parents[1]


class Child(AbstractContextManager["Child"]):
    """An engine in a process of its own.

    Args:
        name: for tables and reports.
        python: the interpreter that has the engine.
        module: of `timed`.
        arguments: for the module's command line.
    """

    def __init__(self, name: str, python: str, module: str, arguments: Sequence[str]) -> None:
        self.name = name
        paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [python, "-m", f"timed.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.about = self._answer()

    def order(self, order: Order) -> tuple[list[float], dict[str, float]]:
        """Seconds of each call, and mean seconds by part where the engine tells."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["parts"]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"{self.name} ended with exit code {code}; its last words are above")
        return json.loads(line)


class Bus:
    """Reads memory with all threads of the kernels, for bytes a second."""

    def __init__(self) -> None:
        self._memory = np.ones(2**26, np.float32)

    def rate(self) -> float:
        """The median of four passes."""
        rates = []
        for _ in range(4):
            begin = time.perf_counter()
            bus.read_memory(self._memory)
            rates.append(self._memory.nbytes / (time.perf_counter() - begin))
        return statistics.median(rates)


@dataclass
class Series:
    """All calls of one engine for one order, over all rounds."""

    name: str
    order: Order
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    bus: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second of all streams, or ids of a prompt a second, by the median call."""
        each = self.order.ids if self.order.kind == "prefill" else self.order.streams
        return each / statistics.median(self.seconds)

    def report(self) -> dict[str, object]:
        """As JSON."""
        median = statistics.median(self.seconds)
        names = {name: None for parts in self.parts for name in parts}
        means = {n: statistics.mean(parts.get(n, 0.0) for parts in self.parts) for n in names}
        result: dict[str, object] = {
            "engine": self.name,
            **asdict(self.order),
            "calls": len(self.seconds),
            "ms": round(1e3 * median, 3),
            "best_ms": round(1e3 * min(self.seconds), 3),
            "tokens_a_second": round(self.rate, 2),
            "bus_gb_s": [[round(each / 1e9, 1) for each in pair] for pair in self.bus],
        }
        if means:
            rest = statistics.mean(self.seconds) - sum(means.values())
            told = means | {"outside the stage": rest}
            result["parts_ms"] = {name: round(1e3 * each, 3) for name, each in told.items()}
        return result


def run_rounds(children: Sequence[Child], orders: Sequence[Order], rounds: int) -> list[Series]:
    """Every order by all children in turns, so many times; they compare within a state of the bus."""
    memory = Bus()
    series = [Series(child.name, order) for order in orders for child in children]
    for _ in range(rounds):
        before = memory.rate()
        for place, each in enumerate(series):
            child = children[place % len(children)]
            seconds, parts = child.order(each.order)
            after = memory.rate()
            each.seconds += seconds
            each.parts += [parts] if parts else []
            each.bus.append((before, after))
            before = after
    return series


def show(series: Sequence[Series], against: Sequence[str]) -> list[dict[str, object]]:
    """Print a line for each series with its ratio to the engines named, and return all as JSON."""
    reports = []
    for each in series:
        rates = {other.name: other.rate for other in series if other.order == each.order}
        ratios = {name: round(each.rate / rates[name], 3) for name in against if name != each.name}
        report = each.report() | {"times": ratios}
        reports.append(report)
        told = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in ratios.items())
        buses = " ".join(f"{first / 1e9:.0f}-{last / 1e9:.0f}" for first, last in each.bus)
        kind = f"{each.order.kind} {each.order.ids if each.order.kind == 'prefill' else each.order.streams}"
        print(
            f"{kind:12} {each.name:22} {each.rate:8.1f} tokens/s, {report['ms']:9} ms "
            f"(best {report['best_ms']}) | {told} | bus {buses} GB/s",
            flush=True,
        )
        if parts := report.get("parts_ms"):
            print(f"{'':12} {' '.join(f'{name} {ms}' for name, ms in parts.items())}", flush=True)
    return reports
