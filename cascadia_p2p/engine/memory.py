"""What a stage needs in memory, known before anything is loaded, and the sentence when it is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import psutil

from cascadia_p2p.engine.footprint import EMBEDDING, EXACT, Backend, Footprint, StoredShard, tensor_bytes
from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.paging import Geometry
from cascadia_p2p.errors import CapacityError
from cascadia_p2p.models.sizes import CacheSizes, LayerSizes, Matrices, ModelSizes, Part
from cascadia_p2p.types import Promise

RESERVE: Final = 192 * 2**20
"""Left for the interpreter, the compiler and the network, in bytes."""

_F32: Final = 4
_LEAST_ROWS: Final = 2
_ENTERING: Final = 6.5
"""Bytes of a number that enters a product of the kernels: float32, two 8-bit codes, and twice the scale and
the sum of codes that 32 of them share."""

_MEMBERS: Final = (Part.ROUTED, Part.SHARED, Part.DENSE)
_HALF: Final = "--cache bf16"
_PRODUCT_OVERHEAD: Final = 2**20
_DRAWING: Final = 9
"""Bytes for each token of the vocabulary that drawing one needs: see `engine.kernels.sampling.Scratch`."""
"""What OpenVINO keeps for one compiled product besides weights and results; 0.5 MiB were measured."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a stage takes.

    Args:
        weights: as the backend keeps them: its own copy, or the pages of the mapped files. The embedding, of
            which only single rows are read, is not counted.
        caches: keys, values and histories of the promised slots at the promised context, and of what kept
            prefixes need beside them.
        buffers: results of products, and what the runtime keeps for each of them.
        reserve: for everything else.
        mapped: how much of the weights are pages of mapped files.
        prefixes: how much of the caches is there for kept prefixes.
    """

    weights: int
    caches: int
    buffers: int
    reserve: int = RESERVE
    mapped: int = 0
    prefixes: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.caches + self.buffers + self.reserve


def weights_by_part(sizes: ModelSizes, layers: range, footprint: Footprint) -> dict[Part, int]:
    """Bytes of a stage's weights, without the embedding, which stays a mapped file."""
    result: dict[Part, int] = {}
    for matrices in sizes.matrices(layers):
        result[matrices.part] = result.get(matrices.part, 0) + footprint.bytes_of(matrices)
    small = sum(sizes.layers[number].small for number in layers)
    return result | {Part.SMALL: footprint.small_bytes(small)} if small else result


def shard_weights(shard: StoredShard, backend: Backend) -> int:
    """Bytes of the weights that lie in a shard, without the embedding, which stays a mapped file."""
    found = (shard.entry(name) for name in shard.names if name != EMBEDDING)
    return sum(tensor_bytes(backend, each.encoding, each.shape) for each in found)


def cache_bytes(cache: CacheSizes, promise: Promise, rewind: int, footprint: Footprint = EXACT) -> int:
    """Bytes of one layer's keys, values and histories for all promised slots and kept prefixes."""
    geometry = Geometry.of(promise, cache.window, rewind)
    history = _F32 * max(cache.taps - 1 + rewind, 0) * cache.channels
    # One block is nobody's.
    positions = BLOCK + promise.slots * geometry.positions
    slots = positions * footprint.position_bytes(cache) + promise.slots * history
    return slots + promise.kept * prefix_bytes(cache, promise, rewind, footprint)


def prefix_bytes(cache: CacheSizes, promise: Promise, rewind: int, footprint: Footprint = EXACT) -> int:
    """Bytes that one layer holds for each kept prefix, beside the blocks that prefixes and slots share.

    Of a layer with a window these are the keys and values that rows behind the prefix look back to; of any
    layer the inputs that its convolutions look back to.
    """
    positions = Geometry.of(promise, cache.window, rewind).kept_blocks() * BLOCK
    return positions * footprint.position_bytes(cache) + _F32 * max(cache.taps - 1, 0) * cache.channels


def buffer_bytes(layer: LayerSizes, promise: Promise, backend: Backend) -> int:
    """Bytes of what one layer's products hold beside their weights; the kernels have one set for all."""
    if backend is Backend.KERNELS:
        return 0
    return products_bytes(layer.row_numbers, layer.products, promise)


def head_buffer_bytes(head: Matrices, promise: Promise, backend: Backend) -> int:
    """Bytes of what the vocabulary head's product, and the drawing of tokens, hold beside its weights."""
    drawing = _DRAWING * head.rows
    if backend is Backend.KERNELS:
        return drawing + round(promise.rows * (_F32 * head.rows + _ENTERING * head.columns))
    return drawing + products_bytes(head.rows, 1, promise)


def stage_buffer_bytes(sizes: ModelSizes, promise: Promise, backend: Backend) -> int:
    """Bytes of what a stage holds whatever its layers are."""
    return kernel_buffer_bytes(sizes, promise) if backend is Backend.KERNELS else 0


def kernel_buffer_bytes(sizes: ModelSizes, promise: Promise) -> int:
    """Bytes of the kernels' workspace at most, which the layers of a stage use in turn.

    Results of products as float32; what enters products as float32 and as codes. In a mixture that is once
    for each member that a row passes.
    """
    results = attended = members = inner = 0
    for layer in sizes.layers:
        outward = [each for each in layer.matrices if each.part is Part.PROJECTIONS]
        # The last one is behind attention.
        results = max(results, sum(each.rows for each in outward[:-1]))
        attended = max(attended, outward[-1].columns)
        gates = {each.part: each for each in layer.matrices if each.part in _MEMBERS}.values()
        members = max(members, sum(each.count if each.taken is None else each.taken for each in gates))
        widths = (
            each.columns for each in layer.matrices if each.part in _MEMBERS and each.rows == sizes.hidden
        )
        inner = max(inner, *widths)
    entering = sizes.hidden + attended + members * (sizes.hidden + inner)
    return round(promise.rows * (_F32 * (results + attended + 2 * sizes.hidden) + _ENTERING * entering))


def products_bytes(row_numbers: int, products: int, promise: Promise) -> int:
    """Bytes of so many numbers a row of a frame, and of so many compiled products."""
    return _F32 * max(promise.rows, _LEAST_ROWS) * row_numbers + products * _PRODUCT_OVERHEAD


def stage_memory(
    sizes: ModelSizes,
    layers: range,
    promise: Promise,
    rewind: int,
    footprint: Footprint = EXACT,
    shard: StoredShard | None = None,
) -> MemoryNeed:
    """Bytes that a stage takes.

    Args:
        sizes: of the whole model.
        layers: of the stage; the head is with the last one.
        promise: slots, context, rows a frame and kept prefixes.
        rewind: positions by which a stream can go back.
        footprint: how weights, keys and values are kept.
        shard: the stage's own tensors as they are stored; without it their sizes follow from the footprint.
    """
    inside = [sizes.layers[number] for number in layers]
    backend = footprint.backend
    buffers = stage_buffer_bytes(sizes, promise, backend)
    buffers += sum(buffer_bytes(layer, promise, backend) for layer in inside)
    if layers.stop == len(sizes.layers):
        buffers += head_buffer_bytes(sizes.head, promise, backend)
    by_part = weights_by_part(sizes, layers, footprint)
    weights = sum(by_part.values()) if shard is None else shard_weights(shard, backend)
    return MemoryNeed(
        weights=weights,
        caches=sum(cache_bytes(layer.cache, promise, rewind, footprint) for layer in inside),
        buffers=buffers,
        mapped=weights - by_part.get(Part.SMALL, 0) if backend.maps_weights else 0,
        prefixes=promise.kept * sum(prefix_bytes(each.cache, promise, rewind, footprint) for each in inside),
    )


def available_memory() -> int:
    """Bytes that this machine can give without paging."""
    return int(psutil.virtual_memory().available)


def require_memory(
    need_of: Callable[[Promise], MemoryNeed],
    promise: Promise,
    available: int,
    halved: Callable[[Promise], MemoryNeed] | None = None,
) -> MemoryNeed:
    """What the promise needs, if it is there.

    Args:
        need_of: the need for any promise; it grows with slots, context and kept prefixes.
        promise: what is wanted.
        available: bytes.
        halved: the need with `--cache bf16`, where that is another one.

    Raises:
        CapacityError: it is not; the message holds need, have, and what would fit: `--cache bf16`, or smaller
            promises, the largest of their kind.
    """
    need = need_of(promise)
    if need.total <= available:
        return need
    raise CapacityError(
        f"this shard needs {in_words(need.total)} of memory and {in_words(available)} are free "
        f"(weights {in_words(need.weights)}, caches for {promise.slots} slots of {promise.context} positions "
        f"{in_words(need.caches)}{_for_prefixes(need, promise)}, "
        f"buffers {in_words(need.buffers)}, reserve {in_words(need.reserve)}): "
        f"{_advice(need_of, promise, available, halved)}"
    )


def _for_prefixes(need: MemoryNeed, promise: Promise) -> str:
    if not need.prefixes:
        return ""
    each = in_words(need.prefixes // promise.kept)
    return f" with {in_words(need.prefixes)} for {promise.kept} kept prefixes ({each} each)"


def _advice(
    need_of: Callable[[Promise], MemoryNeed],
    promise: Promise,
    available: int,
    halved: Callable[[Promise], MemoryNeed] | None,
) -> str:
    ways = _smaller(need_of, promise, available)
    if halved is not None and halved(promise).total <= available:
        ways.insert(0, _HALF)
    elif halved is not None and not ways:
        ways = [f"{way} {_HALF}" for way in _smaller(halved, promise, available)]
    if ways:
        return f"it would fit with {' or with '.join(ways)}"
    return "no smaller promise fits; free memory, or export the model into more shards"


def _smaller(need_of: Callable[[Promise], MemoryNeed], promise: Promise, available: int) -> list[str]:
    """Flags of smaller promises that fit, the largest of their kind."""

    def fits(smaller: Promise) -> bool:
        return need_of(smaller).total <= available

    prefixes = _largest(promise.kept, lambda n: fits(replace(promise, kept=n)))
    slots = _largest(promise.slots - 1, lambda n: fits(replace(promise, slots=n)))
    blocks = _largest((promise.context - 1) // BLOCK, lambda n: fits(replace(promise, context=n * BLOCK)))
    both = _largest(
        (promise.context - 1) // BLOCK, lambda n: fits(replace(promise, slots=1, context=n * BLOCK))
    )
    ways: list[str] = []
    if promise.kept and fits(replace(promise, kept=prefixes)):
        ways.append(f"--prefixes {prefixes}")
    if slots:
        ways.append(f"--slots {slots}")
    if blocks:
        ways.append(f"--context {blocks * BLOCK}")
    if not ways and both:
        ways.append(f"--slots 1 --context {both * BLOCK}")
    if not ways and promise.kept:
        # Without kept prefixes the other two may do.
        ways = [f"--prefixes 0 {way}" for way in _smaller(need_of, replace(promise, kept=0), available)]
    return ways


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, or 0; whatever is below one that fits, fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def in_words(count: int) -> str:
    """Bytes as text, such as 1.5 GiB."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"
