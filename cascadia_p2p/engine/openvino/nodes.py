"""Looks at a compiled model as its device runs it: experts sparse, weights compressed, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import openvino as ov

from cascadia_p2p.engine.openvino.device import DeviceKind, DeviceRules
from cascadia_p2p.engine.openvino.row_major import Element
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import GROUP

Compiled: TypeAlias = Any

_DENSE_ON_GPU: Final = frozenset({"gather_matmul", "moe_gemm", "gemm", "fully_connected", "fullyconnected"})
_WIDE: Final = frozenset({"f32", "f16", "bf16", "f64"})
_ADVICE: Final = "use an OpenVINO version and driver that this release was tested with (2026.4.1)"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a compiled model has to be.

    Args:
        element: of the weights.
        shapes: of its matrices and stacks.
        sparse: whether it has routed experts, which must not run over all of them.
        alone: whether the experts are all of it, so that no other product may be left.
    """

    element: Element
    shapes: frozenset[tuple[int, ...]]
    sparse: bool = False
    alone: bool = False


def node_kinds(compiled: Compiled) -> dict[str, int]:
    """How often each kind of node occurs in a compiled model as its device runs it."""
    counts: dict[str, int] = {}
    for kind, _ in _nodes(compiled):
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def require_nodes(compiled: Compiled, rules: DeviceRules, expected: Expected, name: str) -> None:
    """Refuse a model that would not run as it was written.

    Raises:
        CascadiaError: it runs on another device, its experts run dense, or its weights were decompressed.
    """
    if wrong := wrong_nodes(compiled, rules, expected):
        raise CascadiaError(f"{name}: OpenVINO {ov.__version__} on {rules.device} {wrong}: {_ADVICE}")


def wrong_nodes(compiled: Compiled, rules: DeviceRules, expected: Expected) -> str:
    """What is wrong with a compiled model; empty when nothing is."""
    devices = [str(device) for device in compiled.get_property("EXECUTION_DEVICES")]
    if any(DeviceKind.of(device.strip("()")) is not rules.kind for device in devices):
        return f"would compute it on {', '.join(devices)}"
    if expected.sparse:
        kinds = node_kinds(compiled)
        found = kinds.get(rules.experts.kind, 0)
        if found != rules.experts.count:
            return (
                f"would compute every expert for every row (it has {found} of {rules.experts.count} "
                f"{rules.experts.kind} nodes, and {_in_words(kinds)})"
            )
        left = sorted(kind for kind in kinds if kind.lower() in _DENSE_ON_GPU)
        if expected.alone and rules.kind is DeviceKind.GPU and left:
            return f"left {', '.join(left)} beside the experts"
    if expected.element is not Element.F32:
        return _decompressed(compiled, expected)
    return ""


def _decompressed(compiled: Compiled, expected: Expected) -> str:
    """Where a whole matrix is an input in floating point."""
    for kind, node in _nodes(compiled):
        for port in node.inputs():
            shape, element = port.get_partial_shape(), port.get_element_type().get_type_name()
            if element in _WIDE and shape.is_static and _is_one_of(list(shape.to_shape()), expected.shapes):
                return (
                    f"decompressed its {expected.element} weights (a {kind} node takes {element} "
                    f"{list(shape.to_shape())})"
                )
    return ""


def _is_one_of(found: list[int], shapes: frozenset[tuple[int, ...]]) -> bool:
    """Whether a shape is that of a matrix, as a whole or cut into groups."""
    if len(found) > 2 and found[-1] == GROUP and tuple(found) not in shapes:
        found = [*found[:-2], found[-2] * GROUP]
    return tuple(found) in shapes


def _nodes(compiled: Compiled) -> Iterator[tuple[str, Any]]:
    for node in compiled.get_runtime_model().get_ops():
        yield str(node.get_rt_info()["layerType"].astype(str)), node


def _in_words(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind not in _QUIET)


_QUIET: Final = frozenset({"Const", "Input", "Output"})
