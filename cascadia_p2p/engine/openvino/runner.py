"""A compiled model with memory bound to it, so that a call sets nothing up."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov

from cascadia_p2p.engine.openvino.device import DeviceRules
from cascadia_p2p.engine.openvino.nodes import Compiled
from cascadia_p2p.errors import CascadiaError

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Port:
    """An input of a model as its callers give it.

    Args:
        width: numbers a row; the model may take more, which are zero then.
        empty: whether rows that fill up a call are zeros and not row 0 again.
    """

    width: int
    empty: bool = False


@dataclass(slots=True)
class _Staged:
    """Memory for calls of one number of rows."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]


class Runner:
    """Calls a compiled model with arrays of rows.

    What a call returns has the model's own type and holds until the next call.

    Args:
        compiled: the model; inputs and outputs are [rows, width].
        ports: of its inputs, in order.
        widths: numbers a row of its outputs, of which the model may give more.
        rules: of its device.
        rows: most rows a call.
    """

    def __init__(
        self, compiled: Compiled, ports: Sequence[Port], widths: Sequence[int], rules: DeviceRules, rows: int
    ) -> None:
        self._ports, self._widths, self._rules = tuple(ports), tuple(widths), rules
        self._most = rules.filled(rows)
        self._request = compiled.create_infer_request()
        self._whole_in = tuple(_memory(self._most, port) for port in compiled.inputs)
        self._whole_out = tuple(_memory(self._most, port) for port in compiled.outputs)
        cut = any(_width(w) != width for w, width in zip(self._whole_out, widths, strict=True))
        self._cut = tuple(
            np.zeros((self._most, width), whole.dtype) if _width(whole) != width else whole
            for whole, width in zip(self._whole_out, widths, strict=True)
        )
        self._is_cut = cut
        self._staged: dict[int, _Staged] = {}
        self._sources: tuple[Array, ...] = ()
        self._bound: tuple[Array, ...] = ()
        self._bound_rows = 0

    def __call__(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        rows = len(inputs[0])
        filled = self._rules.filled(rows)
        staged = self._staged_for(filled)
        if filled != rows or not all(map(_same_form, inputs, staged.inputs)):
            for array, port, target in zip(inputs, self._ports, staged.inputs, strict=True):
                _stage(array, port, target)
            inputs = staged.inputs
        self._bind(inputs, staged)
        self._request.infer(share_outputs=True)
        if self._is_cut:
            for whole, kept, width in zip(staged.outputs, self._cut, self._widths, strict=True):
                if whole.shape[1] != width:
                    kept[:rows] = whole[:rows, :width]
            return tuple(kept[:rows] for kept in self._cut)
        return staged.outputs if rows == filled else tuple(output[:rows] for output in staged.outputs)

    def keep(self, sources: Sequence[Array]) -> None:
        """Hold the memory that the model's constants lie in for as long as this lives."""
        self._sources = tuple(sources)

    def warm(self, name: str) -> None:
        """Call with every number of rows that costs something the first time.

        Raises:
            CascadiaError: the device can not compute it.
        """
        for rows in self._rules.warmed(self._most):
            inputs = tuple(
                np.zeros((rows, port.width), whole.dtype)
                for port, whole in zip(self._ports, self._whole_in, strict=True)
            )
            for array in inputs:
                if array.dtype == np.int32:
                    array[...] = np.arange(array.shape[1])
            try:
                self(inputs)
            except RuntimeError as error:
                raise CascadiaError(
                    f"{name}: OpenVINO {ov.__version__} on {self._rules.device} compiled it and fails at "
                    f"{rows} rows ({_first_line(error)}); use a version and driver that this release was "
                    "tested with"
                ) from error

    def _staged_for(self, rows: int) -> _Staged:
        staged = self._staged.get(rows)
        if staged is None:
            staged = self._staged[rows] = _Staged(
                tuple(whole[:rows] for whole in self._whole_in),
                tuple(whole[:rows] for whole in self._whole_out),
            )
        return staged

    def _bind(self, inputs: tuple[Array, ...], staged: _Staged) -> None:
        """Make arrays the request's inputs and outputs, unless they already are."""
        rows = len(inputs[0])
        if len(inputs) != len(self._bound) or not all(map(operator.is_, inputs, self._bound)):
            for index, array in enumerate(inputs):
                self._request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
            # Held, because the request does not hold them.
            self._bound = inputs
        if rows != self._bound_rows:
            for index, output in enumerate(staged.outputs):
                self._request.set_output_tensor(index, ov.Tensor(output, shared_memory=True))
            self._bound_rows = rows


def _memory(rows: int, port: Any) -> Array:
    width = port.get_partial_shape()[1].get_length()
    memory: Array = np.zeros((rows, width), port.get_element_type().to_dtype())
    return memory


def _width(array: Array) -> int:
    return int(array.shape[1])


def _same_form(array: Array, target: Array) -> bool:
    return array.dtype == target.dtype and array.shape == target.shape and array.flags.c_contiguous


def _stage(array: Array, port: Port, target: Array) -> None:
    rows = len(array)
    with np.errstate(over="ignore"):
        target[:rows, : port.width] = array
    if len(target) > rows:
        target[rows:] = 0 if port.empty else target[0]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
