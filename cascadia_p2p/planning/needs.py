"""What every possible stage of a model needs, as matrices over where it begins and where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cascadia_p2p.engine.footprint import Footprint
from cascadia_p2p.engine.memory import (
    RESERVE,
    buffer_bytes,
    cache_bytes,
    head_buffer_bytes,
    prefix_bytes,
    stage_buffer_bytes,
    weights_by_part,
)
from cascadia_p2p.models.sizes import LayerSizes, Matrices, ModelSizes, Part
from cascadia_p2p.planning.machine import GPU_ALLOCATION, Machine
from cascadia_p2p.planning.split import F64, nothing_backwards
from cascadia_p2p.types import Promise


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the ring.

    Args:
        promise: slots, context, rows a frame and kept prefixes.
        footprint: how weights are kept.
        rewind: positions by which a stream can go back.
        reserve: bytes a node for everything that is not counted one by one.
    """

    promise: Promise
    footprint: Footprint
    rewind: int = 16
    reserve: int = RESERVE


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What one stage takes, by kind.

    Args:
        weights: by part, in the device's memory.
        caches: of all promised slots and kept prefixes.
        buffers: results of products and what the runtime keeps for them.
        reserve: for the rest.
        gpu: how much of all this is the GPU's; 0 when the CPU multiplies.
        mapped: the embedding's file, of which the system keeps what it has room for; not in `total`.
        prefix: how much of the caches is there for each kept prefix.
    """

    weights: dict[Part, int]
    caches: int
    buffers: int
    reserve: int
    gpu: int
    mapped: int
    prefix: int

    @property
    def total(self) -> int:
        """All but the mapped file."""
        return sum(self.weights.values()) + self.caches + self.buffers + self.reserve


class Needs:
    """The needs of all stages of one model under one demand."""

    def __init__(self, sizes: ModelSizes, demand: Demand) -> None:
        self.sizes = sizes
        self.demand = demand

    def stage(self, layers: range) -> StageBytes:
        """One stage in detail."""
        sizes, demand = self.sizes, self.demand
        weights = weights_by_part(sizes, layers, demand.footprint)
        inside = [sizes.layers[number] for number in layers]
        promise, backend = demand.promise, demand.footprint.backend
        buffers = stage_buffer_bytes(sizes, promise, backend)
        buffers += sum(buffer_bytes(layer, promise, backend) for layer in inside)
        if layers.stop == len(sizes.layers):
            buffers += head_buffer_bytes(sizes.head, promise, backend)
        on_gpu = sum(weights.values()) - weights.get(Part.SMALL, 0) + buffers
        return StageBytes(
            weights=weights,
            caches=sum(
                cache_bytes(layer.cache, promise, demand.rewind, demand.footprint) for layer in inside
            ),
            buffers=buffers,
            reserve=demand.reserve,
            gpu=on_gpu if backend.on_gpu else 0,
            mapped=demand.footprint.bytes_of(sizes.embedding) if layers.start == 0 else 0,
            prefix=sum(
                prefix_bytes(layer.cache, promise, demand.rewind, demand.footprint) for layer in inside
            ),
        )

    def lack(self, machine: Machine) -> F64:
        """Bytes that the machine lacks for layers i to j - 1 at [i, j]; negative where some are left."""
        demand = self.demand
        fixed = stage_buffer_bytes(self.sizes, demand.promise, demand.footprint.backend) + demand.reserve
        lack = self._total + (fixed - machine.usable)
        if machine.gpu is not None:
            lack = np.maximum(lack, self._gpu - machine.gpu)
        return nothing_backwards(lack)

    def too_large(self) -> tuple[Matrices, int] | None:
        """A tensor that the GPU can not allocate in one piece, and its bytes."""
        footprint = self.demand.footprint
        if not footprint.backend.on_gpu:
            return None
        every = self.sizes.matrices(range(len(self.sizes.layers)))
        largest = max(every, key=footprint.largest_of)
        count = footprint.largest_of(largest)
        return (largest, count) if count > GPU_ALLOCATION else None

    @cached_property
    def _total(self) -> F64:
        total = [
            self._weights(layer) + self._small(layer) + self._state(layer) for layer in self.sizes.layers
        ]
        return self._between(total)

    @cached_property
    def _gpu(self) -> F64:
        promise, backend = self.demand.promise, self.demand.footprint.backend
        return self._between(
            [self._weights(layer) + buffer_bytes(layer, promise, backend) for layer in self.sizes.layers]
        )

    def _between(self, layers: list[int]) -> F64:
        """Sums over layers i to j - 1 at [i, j], with the head behind the last layer."""
        behind = np.concatenate([[0], np.cumsum(layers)]).astype(np.float64)
        between: F64 = behind[None, :] - behind[:, None]
        footprint, promise = self.demand.footprint, self.demand.promise
        head = self.sizes.head
        between[:, -1] += footprint.bytes_of(head) + head_buffer_bytes(head, promise, footprint.backend)
        return between

    def _weights(self, layer: LayerSizes) -> int:
        return sum(self.demand.footprint.bytes_of(each) for each in layer.matrices)

    def _small(self, layer: LayerSizes) -> int:
        return self.demand.footprint.small_bytes(layer.small)

    def _state(self, layer: LayerSizes) -> int:
        promise, footprint = self.demand.promise, self.demand.footprint
        kept = cache_bytes(layer.cache, promise, self.demand.rewind, footprint)
        return kept + buffer_bytes(layer, promise, footprint.backend)
