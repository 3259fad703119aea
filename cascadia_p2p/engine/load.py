"""Loads one shard into a stage: room checked first, kernels ready, then layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.footprint import EXACT, Backend, Footprint, footprint_of
from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.matrix import MatrixBackend
from cascadia_p2p.engine.memory import MemoryNeed, available_memory, require_memory, stage_memory
from cascadia_p2p.engine.model import StagePlan
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.errors import UsageError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.sizing import model_sizes
from cascadia_p2p.models.stages import stage_builder
from cascadia_p2p.shards.reader import ShardReader
from cascadia_p2p.types import Promise

PRECISIONS: Final = ("exact", "fine", "fast")
"""What `precision` may be: activations of products as float32, as two planes of 8-bit codes, or as one."""

CACHES: Final = ("f32", "bf16")
"""What `cache` may be: how keys and values are kept."""

REWIND: Final = 16
"""Positions by which a stream can go back, unless said otherwise."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is.

    Args:
        phase: compiling the kernels, or loading the weights.
        part: what was made ready last.
        done: parts of the phase that are ready.
        total: parts of the phase.
    """

    phase: Literal["kernels", "weights"]
    part: str
    done: int
    total: int


def load_stage(
    directory: Path,
    index: int | None,
    promise: Promise,
    device: str = "CPU",
    precision: str = "fine",
    threads: int | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    *,
    cache: str = "f32",
    rewind: int = REWIND,
    available: int | None = None,
) -> Stage:
    """Make a stage from an exported shard. Files are used as they are; verify them before.

    Args:
        directory: of an export, or of one of its shards.
        index: which shard; None takes the only one that is there.
        promise: what to have room for, all of it from the start.
        device: as OpenVINO names it.
        precision: one of `PRECISIONS`.
        threads: of the CPU; None for one a core.
        progress: told after every part.
        cache: one of `CACHES`.
        rewind: positions by which a stream can go back.
        available: bytes of memory to count on; None asks the system.

    Raises:
        CapacityError: not enough memory.
        ShardError: the shard is not whole, or its tensors do not fit its config.
        UsageError: no such device, precision or shard.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision} is not known here: choose {', '.join(PRECISIONS)}")
    if cache not in CACHES:
        raise UsageError(f"--cache {cache} is not known here: choose {' or '.join(CACHES)}")
    reader = ShardReader(directory, index)
    build = stage_builder(reader.config)
    footprint = shard_footprint(reader, device, cache)
    need = partial(stage_need, reader, rewind=rewind, footprint=footprint)
    smaller = replace(footprint, cache=Encoding.BF16)
    require_memory(
        need,
        promise,
        available_memory() if available is None else available,
        None if smaller == footprint else partial(need, footprint=smaller),
    )
    threads = compiling.set_threads(threads or os.cpu_count() or 1)
    # A device that is not there is said before kernels are compiled.
    backend = new_backend(device, precision, promise.rows, threads)
    compiling.warm_up(_told("kernels", progress))
    attenuation = {layer: reader.attenuation(layer) for layer in reader.layers}
    plan = StagePlan(reader.layers, promise, rewind, Encoding(cache), attenuation=attenuation)
    model = build(plan, reader, backend, _told("weights", progress))
    return Stage(model, promise, rewind, reader.index)


def new_backend(device: str, precision: str, rows: int, threads: int) -> MatrixBackend:
    """Who multiplies on this device: on the CPU our kernels wherever the processor can run them.

    Raises:
        UsageError: OpenVINO does not list the device.
    """
    if backend_of(device) is Backend.KERNELS:
        return KernelBackend(precision, rows, threads)
    # Its import takes a tenth of a node's start, and most nodes do without.
    from cascadia_p2p.engine.openvino.backend import OpenVINOBackend

    # What leaves the range of a device's numbers is computed again from the same stored matrices.
    fallback = None if instructions() is None else KernelBackend("exact", rows, threads)
    return OpenVINOBackend(device, threads, rows, fallback=fallback)


def backend_of(device: str) -> Backend:
    """Who multiplies on this device, for counting bytes."""
    if device.strip().upper() != "CPU":
        return Backend.OPENVINO_GPU
    return Backend.OPENVINO_CPU if instructions() is None else Backend.KERNELS


def shard_footprint(reader: ShardReader, device: str, cache: str = "f32") -> Footprint:
    """How a shard is kept on this device."""
    return footprint_of(reader, backend_of(device), Encoding(cache))


def stage_need(
    reader: ShardReader, promise: Promise, rewind: int = REWIND, footprint: Footprint = EXACT
) -> MemoryNeed:
    """Memory that a shard takes with this promise, in bytes; of weights as its table tells them."""
    return stage_memory(model_sizes(reader.config), reader.layers, promise, rewind, footprint, reader)


def _told(
    phase: Literal["kernels", "weights"], progress: Callable[[LoadProgress], None] | None
) -> Callable[[str, int, int], None] | None:
    if progress is None:
        return None
    return lambda part, done, total: progress(LoadProgress(phase, part, done, total))
