"""Matrix products as OpenVINO graphs that are built in memory.

One compiled model a callable, float32 throughout, rows dynamic. A call of one row is padded to two:
OpenVINO may take another path for a single row, whose last bits differ. With that, a row's result is
bitwise the same in any company (measured for 1 to 64 rows on widths from 64 to 24,576).

Routed experts are written in the tiled form that plugins turn into a sparse operation; with float32 weights
the CPU plugin does so as well (three `GatherMatmul`, of which gate and up are packed at the first call and
down is read from the source). Every compiled expert layer is checked for it. Shared experts ride outside,
as plain products.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset15 as ops
from openvino.utils.node_factory import NodeFactory

from cascadia_p2p.engine.matrix import F32, Experts, GatedWeights, Projections, RowMap
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.matrices.encoding import StoredMatrix

__all__ = ["OpenVINOBackend", "available_devices", "layer_types"]

# OpenVINO has no types of its own.
_Node: TypeAlias = Any
_Model: TypeAlias = Any
_Compiled: TypeAlias = Any
_Array: TypeAlias = npt.NDArray[Any]

_LEAST_ROWS: Final = 2
_SPARSE: Final = "GatherMatmul"


@cache
def _core() -> Any:
    return ov.Core()


def available_devices() -> tuple[str, ...]:
    """The devices that OpenVINO finds on this machine."""
    return tuple(_core().available_devices)


def layer_types(compiled: _Compiled) -> dict[str, int]:
    """How often each kind of node occurs in a compiled model as its device runs it."""
    counts: dict[str, int] = {}
    for node in compiled.get_runtime_model().get_ops():
        kind = str(node.get_rt_info()["layerType"].astype(str))
        counts[kind] = counts.get(kind, 0) + 1
    return counts


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The float32 arrays of `GatedWeights`."""

    gate: F32
    up: F32
    down: F32

    @classmethod
    def of(cls, stored: GatedWeights) -> _Numbers:
        return cls(stored.gate.codes, stored.up.codes, stored.down.codes)


class OpenVINOBackend:
    """A `MatrixBackend` on one OpenVINO device.

    Args:
        device: as OpenVINO names it, such as CPU, GPU or GPU.1.
        threads: of the CPU. With one, products run in the calling thread and no pool is made.
        rows: most rows a call.

    Raises:
        UsageError: OpenVINO does not list the device.
    """

    def __init__(self, device: str, threads: int, rows: int) -> None:
        self._device = _known_device(device)
        self._threads = threads
        self._rows = rows

    @property
    def device(self) -> str:
        return self._device

    def projections(self, weights: Sequence[StoredMatrix], name: str) -> Projections:
        numbers = tuple(weight.codes for weight in weights)
        x = _parameter(weights[0].inputs)
        outputs = [_product(x, weight) for weight in numbers]
        runner = self._runner(ov.Model(outputs, [x], name), numbers)
        return lambda rows: runner((rows,))

    def gated_mlp(self, stored: GatedWeights, scale: float, name: str) -> RowMap:
        weights = _Numbers.of(stored)
        x = _parameter(weights.gate.shape[1])
        result = _product(_gated(_product(x, weights.gate), _product(x, weights.up)), weights.down)
        if scale != 1.0:
            result = ops.multiply(result, ops.constant(np.float32(scale)))
        runner = self._runner(ov.Model([result], [x], name), (weights.gate, weights.up, weights.down))
        return lambda rows: runner((rows,))[0]

    def experts(self, stored: GatedWeights, stored_shared: GatedWeights, chosen: int, name: str) -> Experts:
        routed, shared = _Numbers.of(stored), _Numbers.of(stored_shared)
        x = _parameter(routed.gate.shape[2])
        ids, weights = _parameter(chosen, np.int32), _parameter(chosen)
        gammas = _parameter(shared.gate.shape[0])
        result = ops.add(_tiled_experts(x, ids, weights, routed), _shared_experts(x, gammas, shared))
        model = ov.Model([result], [x, ids, weights, gammas], name)
        sources = (routed.gate, routed.up, routed.down, shared.gate, shared.up, shared.down)
        runner = self._runner(model, sources)
        if self._device == "CPU" and routed.gate.shape[0] > 1:
            _expect_sparse(runner.compiled, name)
        return lambda rows, chosen_ids, shares, always: runner((rows, chosen_ids, shares, always))[0]

    def _runner(self, model: _Model, sources: tuple[F32, ...]) -> _Runner:
        compiled = _core().compile_model(model, self._device, self._properties())
        return _Runner(compiled, sources, max(self._rows, _LEAST_ROWS))

    def _properties(self) -> Mapping[str, object]:
        properties: dict[str, object] = {
            "EXECUTION_MODE_HINT": "ACCURACY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "PERFORMANCE_HINT": "LATENCY",
        }
        if self._device == "CPU":
            # Several nodes may share a machine: none may claim cores for itself.
            properties |= {
                "ENABLE_CPU_PINNING": False,
                "INFERENCE_NUM_THREADS": self._threads,
                "NUM_STREAMS": 0 if self._threads == 1 else 1,
            }
        return properties


class _Runner:
    """A compiled model with input and output memory bound to it, so that a call sets nothing up.

    Args:
        compiled: the model; inputs and outputs are [rows, width].
        sources: arrays that the model's constants lie in.
        rows: most rows a call, two or more.
    """

    def __init__(self, compiled: _Compiled, sources: tuple[F32, ...], rows: int) -> None:
        self.compiled = compiled
        # OpenVINO does not keep the memory behind a constant alive, and goes on reading it.
        self._sources = sources
        self._request = compiled.create_infer_request()
        self._padded = tuple(
            np.zeros(
                (_LEAST_ROWS, port.get_partial_shape()[1].get_length()), port.get_element_type().to_dtype()
            )
            for port in compiled.inputs
        )
        self._outputs = tuple(
            np.zeros((rows, port.get_partial_shape()[1].get_length()), np.float32)
            for port in compiled.outputs
        )
        self._bound: tuple[_Array, ...] = ()
        self._bound_rows = 0
        self._results: tuple[F32, ...] = ()
        # Weights are packed at a model's first call, and a new number of rows costs once.
        for count in {_LEAST_ROWS, rows}:
            self(tuple(np.zeros((count, array.shape[1]), array.dtype) for array in self._padded))

    def __call__(self, inputs: tuple[_Array, ...]) -> tuple[F32, ...]:
        rows = len(inputs[0])
        if rows < _LEAST_ROWS:
            for padded, array in zip(self._padded, inputs, strict=True):
                padded[...] = array
            inputs = self._padded
        self._bind(inputs)
        self._request.infer(share_outputs=True)
        return self._results if rows == self._bound_rows else tuple(out[:rows] for out in self._results)

    def _bind(self, inputs: tuple[_Array, ...]) -> None:
        """Make the arrays the request's inputs, unless they already are."""
        if len(inputs) == len(self._bound) and all(map(operator.is_, inputs, self._bound)):
            return
        for index, array in enumerate(inputs):
            self._request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
        # Held, because the request does not hold them.
        self._bound = inputs
        rows = len(inputs[0])
        if rows != self._bound_rows:
            self._results = tuple(output[:rows] for output in self._outputs)
            for index, result in enumerate(self._results):
                self._request.set_output_tensor(index, ov.Tensor(result, shared_memory=True))
            self._bound_rows = rows


def _known_device(device: str) -> str:
    name = device.strip().upper()
    devices = available_devices()
    if not any(name in (listed, listed.partition(".")[0]) for listed in devices):
        raise UsageError(
            f"--device {device}: OpenVINO finds no such device on this machine, only {', '.join(devices)}; "
            "choose one of these, or install the device's driver"
        )
    return name


def _expect_sparse(compiled: _Compiled, name: str) -> None:
    found = layer_types(compiled).get(_SPARSE, 0)
    if found != 3:
        raise CascadiaError(
            f"{name}: OpenVINO {ov.__version__} would compute every expert for every row (it has {found} "
            f"of 3 {_SPARSE} nodes): use an OpenVINO version that this release was tested with"
        )


def _parameter(width: int, dtype: type[np.float32] | type[np.int32] = np.float32) -> _Node:
    return ops.parameter([-1, width], dtype)


def _constant(array: F32) -> _Node:
    return ov.op.Constant(ov.Tensor(array, shared_memory=True), shared_memory=True)


def _integers(*values: int) -> _Node:
    return ops.constant(np.array(values, np.int64))


def _product(x: _Node, weight: F32) -> _Node:
    return ops.matmul(x, _constant(weight), False, True)


def _gated(gate: _Node, up: _Node) -> _Node:
    # The helper of every opset gives Swish a second input, with which no plugin recognises the experts.
    silu = NodeFactory("opset4").create("Swish", [gate.output(0)], {})
    return ops.multiply(silu, up)


def _tiled_experts(x: _Node, ids: _Node, weights: _Node, routed: _Numbers) -> _Node:
    """Every expert on every row, weighted by a map with zeros but at the chosen: this form turns sparse."""
    experts, _, width = routed.gate.shape
    tiled = ops.tile(x, _integers(experts, 1))
    tiled = ops.reshape(tiled, _integers(experts, -1, width), False)
    inner = _gated(_product(tiled, routed.gate), _product(tiled, routed.up))
    out = ops.reshape(_product(inner, routed.down), _integers(experts, -1, width), False)
    rows = ops.gather(ops.shape_of(weights, "i64"), _integers(0), ops.constant(np.int64(0)))
    zeros = ops.broadcast(ops.constant(np.float32(0.0)), ops.concat([rows, _integers(experts)], 0))
    map_ = ops.scatter_elements_update(zeros, ids, weights, ops.constant(np.int64(1)))
    map_ = ops.reshape(ops.transpose(map_, _integers(1, 0)), _integers(experts, -1), False)
    weighted = ops.multiply(out, ops.unsqueeze(map_, ops.constant(np.int64(-1))))
    return ops.reshape(ops.reduce_sum(weighted, _integers(0), False), _integers(-1, width), False)


def _shared_experts(x: _Node, gammas: _Node, shared: _Numbers) -> _Node:
    """One MLP as wide as all shared experts together, but for its last products, whose weights lie apart."""
    count, inner, width = shared.gate.shape
    gate, up = (_product(x, w.reshape(count * inner, width)) for w in (shared.gate, shared.up))
    hidden = ops.reshape(_gated(gate, up), _integers(-1, count, inner), False)
    hidden = ops.multiply(hidden, ops.unsqueeze(gammas, ops.constant(np.int64(-1))))
    parts = ops.split(hidden, ops.constant(np.int64(1)), count).outputs()
    result = None
    for part, down in zip(parts, shared.down, strict=True):
        product = _product(ops.reshape(part, _integers(-1, inner), False), down)
        result = product if result is None else ops.add(result, product)
    return result
