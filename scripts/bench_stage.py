"""Times one stage of the published model's width, part by part, beside what the memory bus allows.

python scripts/bench_stage.py --json docs/measurements/bench_stage.json

The stage has one dense layer of 24,576 and five sparse ones of 32 routed and 2 shared experts, top 6:
hidden 6144, expert width 3072, 64 heads of 128; experts and dense 4-bit, projections 8-bit. Its weights are
filled without a checkpoint, since time does not depend on their values. Rows of a frame are of as many
streams, but for `prefill`, which is one window of 64 rows.

The bus is read by all threads before and after every group of calls, from weights that no cache holds.
Bytes are those of the weights that the rows of a frame pass, experts counted as rows choose them
independently and evenly.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernel_backend import PLANES, KernelBackend
from cascadia_p2p.engine.kernels import bus
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.model import StagePlan
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.matrices.encoding import ALIGNMENT, Encoding, StoredMatrix, stored_bytes, stored_view
from cascadia_p2p.models.inkling.names import Spelling, plan_tensors
from cascadia_p2p.models.layout import TensorRole
from cascadia_p2p.models.sizes import Part
from cascadia_p2p.models.sizing import model_sizes
from cascadia_p2p.models.stages import stage_builder
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, operation_table, segment_table

F32 = npt.NDArray[np.float32]

RECIPE: Final = Recipe(
    "stage",
    layers=7,
    hidden=6144,
    heads=64,
    kv_heads=8,
    head_dim=128,
    sliding_heads=64,
    sliding_kv_heads=16,
    sliding_head_dim=128,
    window=512,
    extent=1024,
    d_rel=16,
    dense_layers=1,
    dense_width=24576,
    experts=32,
    chosen=6,
    shared=2,
    expert_width=3072,
)
LAYERS: Final = range(6)
PROMISE: Final = Promise(slots=64, context=256, rows=64)
POSITIONS: Final = 64
"""That every stream holds when rows are timed."""

_SCALE: Final = np.float16(0.002)
_PIECE: Final = 2**26


class Weights:
    """Small tensors drawn, matrices filled: a `TensorSource`."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        # Codes without a mean: with one, all rows would soon be alike and pass the same experts.
        low, high = (self._random.integers(1, 16, _PIECE, np.uint8) for _ in range(2))
        eight = self._random.integers(1, 256, _PIECE, np.uint8)
        self._bytes = {Encoding.INT4: np.tile(low | high << 4, 2), Encoding.INT8: np.tile(eight, 2)}
        # Shared by all precisions.
        self._made: dict[str, StoredMatrix] = {}
        self._read = 0
        self._plans = {plan.name: plan for plan in plan_tensors(RECIPE.config(), Spelling.B).tensors()}

    def tensor(self, name: str) -> F32:
        shape = self._plans[name].shape
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return self._random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))

    def matrix(self, name: str) -> StoredMatrix:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def next_cold(self) -> F32:
        """About 600 MB of weights that were not read lately, so that no cache holds them."""
        stacks = [made.codes for name, made in self._made.items() if ".experts." in name]
        self._read += 1
        flat = stacks[self._read % len(stacks)].reshape(-1)
        return flat[: flat.size // 4096 * 4096].view(np.float32)

    def _make(self, name: str) -> StoredMatrix:
        plan = self._plans[name]
        if plan.role is TensorRole.EMBEDDING:
            return StoredMatrix.of(self.tensor(name))
        encoding = Encoding.INT8 if plan.role is TensorRole.PROJECTIONS else Encoding.INT4
        size = stored_bytes(encoding, plan.shape)
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        raw = raw[start : start + size]
        for at in range(0, size, _PIECE):
            count = min(_PIECE, size - at)
            # Gate and up must not be alike: their product would have a mean.
            first = int(self._random.integers(0, _PIECE // 64)) * 64
            raw[at : at + count] = self._bytes[encoding][first : first + count]
        matrix = stored_view(encoding, plan.shape, raw)
        if matrix.scales is None:
            matrix.codes[..., :64].view(np.float16)[...] = _SCALE
        else:
            matrix.scales[...] = _SCALE / 16
        return matrix


@dataclass(frozen=True)
class Group:
    """Calls of one kind that followed one another.

    Args:
        precision: of activations.
        kind: decode, or prefill for one window.
        rows: of a frame.
        bus: bytes a second, before and after.
        seconds: of each call.
        parts: seconds a call, by part.
        weights: bytes of weights that a frame passes.
    """

    precision: str
    kind: str
    rows: int
    bus: tuple[float, float]
    seconds: list[float]
    parts: dict[str, float]
    weights: float

    def report(self) -> dict[str, object]:
        """As JSON."""
        median, rate = statistics.median(self.seconds), sum(self.bus) / 2
        return {
            "precision": self.precision,
            "kind": self.kind,
            "rows": self.rows,
            "calls": len(self.seconds),
            "ms": round(1e3 * median, 3),
            "best_ms": round(1e3 * min(self.seconds), 3),
            "ms_a_row": round(1e3 * median / self.rows, 3),
            "weight_bytes": round(self.weights),
            "bus_gb_s": [round(each / 1e9, 1) for each in self.bus],
            "bus_ms": round(1e3 * self.weights / rate, 3),
            "times_bus": round(median * rate / self.weights, 3),
            "parts_ms": {part: round(1e3 * each, 3) for part, each in self.parts.items() if each},
        }


class Bench:
    """The stage in one precision.

    Args:
        precision: of activations.
        weights: shared by all precisions.
        threads: of the kernels.
    """

    def __init__(self, precision: str, weights: Weights, threads: int) -> None:
        self._precision = precision
        config = RECIPE.config()
        backend = KernelBackend(precision, PROMISE.rows, threads)
        model = stage_builder(config)(StagePlan(LAYERS, PROMISE, 16), weights, backend, None)
        self._stage = Stage(model, PROMISE)
        self._weights = weights
        self._random = np.random.default_rng(1)
        sizes = model_sizes(config)
        self._matrices = [each for number in LAYERS for each in sizes.layers[number].matrices]

    def group(self, rows: int, window: bool, calls: int) -> Group:
        """Time some calls; the first, which is not counted, warms up."""
        self._start(1 if window else rows)
        ids = self._random.integers(0, RECIPE.vocab_valid, (calls + 1, rows)).astype(np.int32)
        self._call(ids[0], window, 0)
        before, seconds = self._stage.times().copy(), []
        first = self._bus()
        for call in range(1, calls + 1):
            begin = time.perf_counter()
            self._call(ids[call], window, call)
            seconds.append(time.perf_counter() - begin)
        last, spent = self._bus(), self._stage.times().since(before)
        parts = {str(part): each / calls for part, each in spent.seconds.items()}
        kind = "prefill" if window else "decode"
        return Group(self._precision, kind, rows, (first, last), seconds, parts, self._bytes(rows))

    def _bytes(self, rows: int) -> float:
        encodings = {Part.PROJECTIONS: Encoding.INT8}
        total = 0.0
        for each in self._matrices:
            stored = stored_bytes(encodings.get(each.part, Encoding.INT4), (each.rows, each.columns))
            total += stored * each.count * each.share_read(rows)
        return total

    def _bus(self) -> float:
        rates = []
        for _ in range(4):
            memory = self._weights.next_cold()
            begin = time.perf_counter()
            bus.read_memory(memory)
            rates.append(memory.nbytes / (time.perf_counter() - begin))
        return statistics.median(rates)

    def _start(self, slots: int) -> None:
        operations = operation_table(slots)
        operations["kind"] = OperationKind.START
        operations["slot"] = operations["stream"] = np.arange(slots)
        self._stage.apply(segment_table(), operations, np.empty(0, np.int32), _nothing)

    def _call(self, ids: npt.NDArray[np.int32], window: bool, position: int) -> None:
        if window:
            self._start(1)
            segments = segment_table(1)
            segments["rows"] = len(ids)
        else:
            segments = segment_table(len(ids))
            segments["slot"] = segments["stream"] = np.arange(len(ids))
            segments["rows"], segments["start"] = 1, position
        out = self._stage.apply(segments, operation_table(), ids, _nothing)
        if segments["error"].any() or not np.isfinite(out).all():
            raise SystemExit("the stage failed: its numbers are not finite, and times mean nothing")


def _nothing() -> None:
    pass


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,2,4,8,16,64", help="rows of a frame (default: %(default)s)")
    parser.add_argument("--precision", default="fast,fine,exact", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: one a core")
    parser.add_argument("--calls", type=int, default=10, help="a group (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="through all groups (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    chosen = [each for each in args.precision.split(",") if each in PLANES]
    threads = compiling.set_threads(args.threads)
    compiling.warm_up()
    print(f"{threads} threads, {instructions()}; filling the weights", file=sys.stderr)
    weights = Weights()
    benches = [Bench(precision, weights, threads) for precision in chosen]
    kinds = [(int(rows), False) for rows in args.rows.split(",")] + [(PROMISE.rows, True)]
    found: list[Group] = []
    for _ in range(args.rounds):
        for rows, window in kinds:
            # Precisions one behind the other, so that they are compared in one state of the bus.
            for bench in benches:
                group = bench.group(rows, window, max(3, args.calls // rows if window else args.calls))
                found.append(group)
                _show(group)
    if args.json is not None:
        report = {
            "processor": platform.processor() or platform.machine(),
            "instructions": str(instructions()),
            "threads": threads,
            "groups": [group.report() for group in found],
        }
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0


def _show(group: Group) -> None:
    told = group.report()
    parts = " ".join(f"{part} {1e3 * each:.2f}" for part, each in group.parts.items() if each)
    buses = " ".join(f"{each / 1e9:.1f}" for each in group.bus)
    print(
        f"{group.precision:5} {group.kind:7} {group.rows:2} rows: {told['ms']:8.2f} ms "
        f"(best {told['best_ms']:.2f}), {told['ms_a_row']:7.2f} a row, bus {buses} GB/s: "
        f"{told['times_bus']:.2f} x the {told['bus_ms']:.1f} ms of {group.weights / 1e9:.2f} GB | {parts}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
