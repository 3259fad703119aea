"""Our own kernels as a matrix backend: stored matrices are used as they lie in their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cascadia_p2p.compiled.compiling import address
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.frame import put_addresses
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.kernels.mixture import MIXING, MIXTURE, PHASES, work_mixture
from cascadia_p2p.engine.kernels.products import (
    EXACT,
    PROJECTING,
    SCRATCH,
    work_projections,
)
from cascadia_p2p.engine.kernels.team import new_counters, run_team
from cascadia_p2p.engine.kernels.workspace import (
    MatrixTable,
    Workspace,
    describe_mixture,
    new_picks,
    wants_floats,
)
from cascadia_p2p.engine.matrix import F32, I32, Experts, GatedWeights, Projections, RowMap
from cascadia_p2p.errors import CapacityError, CascadiaError
from cascadia_p2p.matrices.encoding import StoredMatrix

PLANES: Final = {"exact": EXACT, "fast": 1, "fine": 2}
"""How activations enter products, by precision: as float32, or as one or two planes of 8-bit codes."""


class KernelBackend:
    """A `MatrixBackend` on the CPU.

    Args:
        precision: exact, fine or fast; float32 matrices are always taken exactly.
        rows: most rows a call.
        threads: of the team.

    Raises:
        CapacityError: the processor lacks AVX2.
    """

    def __init__(self, precision: str, rows: int, threads: int) -> None:
        if instructions() is None:
            raise CapacityError(
                "this processor has no AVX2, which the kernels need: take --device with what OpenVINO offers"
            )
        self.planes = PLANES[precision]
        self._rows = rows
        self._threads = threads
        self._scratch = np.zeros((threads, SCRATCH), np.float32)

    @property
    def device(self) -> str:
        return "CPU"

    def projections(self, weights: Sequence[StoredMatrix], name: str) -> Projections:
        return _Projections(self, self._rows, self._threads, self._scratch, weights)

    def gated_mlp(self, weights: GatedWeights, scale: float, name: str, attenuation: int = 0) -> RowMap:
        return _Mixture(self, self._rows, self._threads, self._scratch, None, weights, 0, scale).dense

    def experts(
        self, routed: GatedWeights, shared: GatedWeights, chosen: int, name: str, attenuation: int = 0
    ) -> Experts:
        return _Mixture(self, self._rows, self._threads, self._scratch, routed, shared, chosen, 1.0).sparse


class _Projections:
    """Several matrices on the same rows."""

    def __init__(
        self,
        backend: KernelBackend,
        rows: int,
        threads: int,
        scratch: F32,
        weights: Sequence[StoredMatrix],
    ) -> None:
        for weight in weights:
            expect("weight", weight, (weight.outputs, weights[0].inputs))
        self._workspace = Workspace(backend.planes)
        self._floats_too = wants_floats(*weights)
        self._panels = self._workspace.panels(rows, weights[0].inputs, self._floats_too)
        table = MatrixTable(self._workspace)
        self._results = [self._workspace.array(np.float32, rows, weight.outputs) for weight in weights]
        for weight, result in zip(weights, self._results, strict=True):
            table.add(weight, result.ctypes.data)
        self._matrices = table.records()
        self._counters = new_counters(2)
        self._threads, self._scratch = threads, scratch
        self._inputs, self._rows = weights[0].inputs, rows
        self._work, self._run = address(work_projections), np.zeros(1, PROJECTING)
        arrays = {
            "counters": self._counters,
            "matrices": self._matrices,
            "panels": self._panels,
            "scratch": scratch,
        }
        put_addresses(self._run, arrays)
        self._run["count"], self._run["planes"] = len(weights), backend.planes
        self._run["floats_too"], self._run["threads"] = self._floats_too, threads

    def __call__(self, x: F32) -> tuple[F32, ...]:
        rows = len(x)
        expect("x", x, (min(rows, self._rows), self._inputs))
        x = np.ascontiguousarray(x, np.float32)
        self._run["x"], self._run["rows"] = x.ctypes.data, rows
        self._counters.fill(0)
        run_team(self._work, self._run.ctypes.data, self._threads)
        return tuple(result[:rows] for result in self._results)


class _Mixture:
    """Experts, or one MLP as a mixture of one."""

    def __init__(
        self,
        backend: KernelBackend,
        rows: int,
        threads: int,
        scratch: F32,
        routed: GatedWeights | None,
        always: GatedWeights,
        chosen: int,
        scale: float,
    ) -> None:
        self._workspace = Workspace(backend.planes)
        table = MatrixTable(self._workspace)
        self._record = np.zeros(1, MIXTURE)
        stack = None if routed is None else (routed.gate, routed.up, routed.down)
        describe_mixture(self._record[0], table, stack, (always.gate, always.up, always.down), chosen)
        self._matrices = table.records()
        own = self._record[0]
        members, shared = int(own["routed"] + own["always"]), int(own["always"])
        every = rows * (chosen + shared)
        self._outer = self._workspace.panels(every, always.gate.inputs, bool(own["outer_floats"]))
        self._inner = self._workspace.panels(every, always.down.inputs, bool(own["inner_floats"]))
        self._picks = new_picks(self._workspace, rows, chosen, members, shared)
        self._result = self._workspace.array(np.float32, rows, always.down.outputs)
        self._picks["result"] = self._result.ctypes.data
        self._scales = np.full((rows, 1), scale, np.float32)
        self._nothing = np.zeros((rows, 0), np.int32)
        self._counters = new_counters(PHASES)
        self._work, self._run = address(work_mixture), np.zeros(1, MIXING)
        arrays = {
            "counters": self._counters,
            "mixture": self._record,
            "matrices": self._matrices,
            "picks": self._picks,
            "outer": self._outer,
            "inner": self._inner,
            "scratch": scratch,
        }
        put_addresses(self._run, arrays)
        self._run["count"], self._run["planes"] = len(self._matrices), backend.planes
        self._run["threads"] = threads
        self._threads, self._scratch = threads, scratch
        self._inputs, self._rows, self._chosen, self._shared = always.gate.inputs, rows, chosen, shared

    def dense(self, x: F32) -> F32:
        """Every row through the one MLP."""
        nothing = self._nothing[: len(x)]
        return self.sparse(x, nothing, nothing.astype(np.float32), self._scales[: len(x)])

    def sparse(self, x: F32, ids: I32, weights: F32, shared: F32) -> F32:
        """See `matrix.Experts`."""
        rows = len(x)
        expect("x", x, (min(rows, self._rows), self._inputs))
        expect("ids", ids, (rows, self._chosen))
        expect("weights", weights, (rows, self._chosen))
        expect("shared", shared, (rows, self._shared))
        # Kernels find an expert's weights by its number.
        if ids.size and not 0 <= ids.min() <= ids.max() < self._record[0]["routed"]:
            raise CascadiaError(
                f"ids {ids.min()} to {ids.max()} of {self._record[0]['routed']} experts: the router and the "
                "experts do not fit together"
            )
        held = (
            np.ascontiguousarray(x, np.float32),
            np.ascontiguousarray(ids, np.int32),
            np.ascontiguousarray(weights, np.float32),
            np.ascontiguousarray(shared, np.float32),
        )
        for name, array in zip(("x", "ids", "weights", "always"), held, strict=True):
            self._picks[name] = array.ctypes.data
        self._run["rows"] = rows
        self._counters.fill(0)
        run_team(self._work, self._run.ctypes.data, self._threads)
        return self._result[:rows]
