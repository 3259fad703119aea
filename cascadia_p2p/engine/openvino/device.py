"""All that differs between devices: options, row counts, forms of graphs, precision, limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

import openvino as ov

from cascadia_p2p.engine.openvino.environment import LEAST_OPENVINO
from cascadia_p2p.errors import CascadiaError, UsageError

LEAST_ROWS: Final = 2
"""A call of one row takes other kernels: on the CPU with other last bits, on the GPU with refused groups."""

_BUCKETS: Final = (2, 8, 16, 24, 32, 64, 96, 128)
_BUCKET_STEP: Final = 128
_GPU_PIECE: Final = 4_294_959_104


class DeviceKind(StrEnum):
    """Devices that follow the same rules."""

    CPU = "cpu"
    GPU = "gpu"
    OTHER = "other"

    @classmethod
    def of(cls, device: str) -> DeviceKind:
        """The kind of a device as OpenVINO names it."""
        family = device.partition(".")[0]
        return {"CPU": cls.CPU, "GPU": cls.GPU}.get(family, cls.OTHER)


@dataclass(frozen=True, slots=True)
class SparseNode:
    """The node that a plugin makes of the experts' tiled block.

    Args:
        kind: as the runtime graph names it.
        count: how many of them one layer has.
    """

    kind: str
    count: int


CPU_EXPERTS: Final = SparseNode("GatherMatmul", 3)
GPU_EXPERTS: Final = SparseNode("moe_3gemm_fused_compressed", 1)


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """How graphs are built for a device and called on it.

    Args:
        device: as OpenVINO names it.
        properties: options of every compiled model.
        experts: what the tiled block has to become.
        half: products are computed in FP16, so that ranges are guarded.
        half_edges: rows cross into and out of a graph in FP16, where the plugin accepts that.
        one_operation: shared experts ride as two more ids, and dense layers as slices that every row passes.
        rereads_plain: plain products may pack their weights anew for another number of rows, from where the
            constants lie; the experts' sparse node packs once, while it is compiled.
        buckets: row counts that calls are filled up to, ascending; None calls with any number of rows.
        tolerance: largest RMS error against float64, as a part of the result's RMS.
        largest_constant: bytes that one allocation may have; None for no limit.
    """

    device: str
    properties: Mapping[str, object]
    experts: SparseNode
    half: bool
    half_edges: bool
    one_operation: bool
    rereads_plain: bool
    buckets: tuple[int, ...] | None
    tolerance: float
    largest_constant: int | None

    @property
    def kind(self) -> DeviceKind:
        """What kind of device it is."""
        return DeviceKind.of(self.device)

    def filled(self, rows: int) -> int:
        """Rows that a call of `rows` is made with.

        Raises:
            CascadiaError: more than the largest bucket.
        """
        if self.buckets is None:
            return max(rows, LEAST_ROWS)
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise CascadiaError(f"a call has {rows} rows: this stage was made for {self.buckets[-1]}")

    def warmed(self, rows: int) -> tuple[int, ...]:
        """Row counts to call once at load, for calls of up to `rows`."""
        return self.buckets or tuple(sorted({LEAST_ROWS, max(rows, LEAST_ROWS)}))


def rules_of(device: str, threads: int, rows: int) -> DeviceRules:
    """The rules of a device.

    Args:
        device: as OpenVINO names it.
        threads: of the CPU.
        rows: most rows a call.
    """
    kind = DeviceKind.of(device)
    if kind is DeviceKind.GPU:
        return DeviceRules(
            device,
            _gpu_properties(),
            GPU_EXPERTS,
            half=True,
            half_edges=True,
            one_operation=True,
            rereads_plain=False,
            buckets=row_buckets(rows),
            tolerance=1e-2,
            largest_constant=_GPU_PIECE,
        )
    return DeviceRules(
        device,
        cpu_properties(threads) if kind is DeviceKind.CPU else _EXACT,
        CPU_EXPERTS,
        half=False,
        half_edges=False,
        one_operation=False,
        rereads_plain=True,
        buckets=None,
        tolerance=1e-4,
        largest_constant=None,
    )


def row_buckets(rows: int) -> tuple[int, ...]:
    """Row counts for calls of up to `rows`: each costs the GPU up to a second at its first use, so few."""
    whole = max(rows, LEAST_ROWS)
    more = range(_BUCKETS[-1] + _BUCKET_STEP, whole, _BUCKET_STEP)
    return (*(bucket for bucket in (*_BUCKETS, *more) if bucket < whole), whole)


_EXACT: Final[Mapping[str, object]] = {
    "EXECUTION_MODE_HINT": "ACCURACY",
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "PERFORMANCE_HINT": "LATENCY",
}


def cpu_properties(threads: int) -> dict[str, object]:
    """Options on the CPU: its defaults are BF16 and activations of 8 bits."""
    return {
        **_EXACT,
        # Several nodes may share a machine: none may claim cores for itself.
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 0 if threads == 1 else 1,
    }


def _gpu_properties() -> dict[str, object]:
    return {
        "INFERENCE_PRECISION_HINT": "f16",
        # By default prompts above 64 rows would be computed with activations of 8 bits.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # Experts from a cached model are read through its file, eight times as slow.
        "CACHE_DIR": "",
    }


@cache
def core() -> Any:
    """OpenVINO, made once.

    Raises:
        CascadiaError: it is older than the graphs here need.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", ov.__version__)[:2])
    if numbers < LEAST_OPENVINO:
        raise CascadiaError(
            f"OpenVINO {ov.__version__} is too old: 2026.3 is the oldest that fits; "
            "pip install 'openvino>=2026.4.1'"
        )
    return ov.Core()


def available_devices() -> tuple[str, ...]:
    """The devices that OpenVINO finds on this machine."""
    return tuple(core().available_devices)


def known_device(device: str) -> str:
    """The device's name as OpenVINO spells it.

    Raises:
        UsageError: it does not list the device.
    """
    name = device.strip().upper()
    devices = available_devices()
    if not any(name in (listed, listed.partition(".")[0]) for listed in devices):
        raise UsageError(
            f"--device {name}: OpenVINO finds no such device on this machine, only {', '.join(devices)}; "
            f"choose one of these, or let 'cascadia-p2p doctor --device {name}' say what it lacks"
        )
    return name
