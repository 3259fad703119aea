"""How many bytes a weight takes in the memory of each backend, by the encoding that it is stored in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from cascadia_p2p.matrices.encoding import Encoding, stored_bytes
from cascadia_p2p.models.sizes import CacheSizes, Matrices, Part


class Backend(StrEnum):
    """Who multiplies the large matrices."""

    KERNELS = "kernels"
    """Our own kernels on the CPU."""
    OPENVINO_CPU = "openvino-cpu"
    OPENVINO_GPU = "openvino-gpu"

    @property
    def on_gpu(self) -> bool:
        """Whether weights and results count as the GPU's memory."""
        return self is Backend.OPENVINO_GPU

    @property
    def maps_weights(self) -> bool:
        """Whether weights stay mapped files, of which there is no second copy in memory."""
        return self is Backend.KERNELS


@dataclass(frozen=True, slots=True)
class Rule:
    """What a weight of one encoding takes.

    Args:
        weight: bytes for a weight, with the scales of its group.
        output: bytes for an output beside that.
        codes: bytes for a weight in its largest single allocation.
        source: where the numbers come from.
        least: bytes for a weight under the best circumstances, where they vary.
    """

    weight: float
    codes: float
    source: str
    output: float = 0.0
    least: float | None = None

    def bytes_of(self, weights: int, outputs: int, lean: bool = False) -> int:
        """What so many weights take, under the best circumstances if `lean`."""
        weight = self.least if lean and self.least is not None else self.weight
        return round(weights * weight + outputs * self.output)


RULES: Final[Mapping[tuple[Backend, Encoding], Rule]] = {
    (Backend.KERNELS, Encoding.INT4): Rule(
        0.5625, 0.5625, "block of 16 outputs by 64 inputs: 512 bytes of codes, 64 of FP16 scales"
    ),
    (Backend.KERNELS, Encoding.INT4_AFFINE): Rule(
        0.625, 0.625, "block of 16 outputs by 64 inputs: 512 bytes of codes, 128 of FP16 scales and offsets"
    ),
    (Backend.KERNELS, Encoding.INT8): Rule(1.0, 1.0, "one byte, and an FP32 scale an output", output=4.0),
    (Backend.KERNELS, Encoding.INT8_GROUPED): Rule(
        1.0625, 1.0625, "block of 16 outputs by 64 inputs: 1024 bytes of codes, 64 of FP16 scales"
    ),
    (Backend.KERNELS, Encoding.BF16): Rule(2.0, 2.0, "as in the file"),
    (Backend.KERNELS, Encoding.F32): Rule(4.0, 4.0, "as in the file"),
    (Backend.OPENVINO_CPU, Encoding.INT4): Rule(
        0.77, 0.5, "measured, plugin 2026.4.1: 0.77 with FP16 scales in the file, 0.64 with FP32", least=0.64
    ),
    (Backend.OPENVINO_CPU, Encoding.INT4_AFFINE): Rule(
        0.8325, 0.5, "as int4, and an FP16 offset for 32; not measured"
    ),
    (Backend.OPENVINO_CPU, Encoding.INT8): Rule(1.1, 1.0, "measured, plugin 2026.4.1"),
    (Backend.OPENVINO_CPU, Encoding.INT8_GROUPED): Rule(
        1.225, 1.0, "as int8, and an FP32 scale for 32; not measured"
    ),
    (Backend.OPENVINO_CPU, Encoding.BF16): Rule(4.0, 4.0, "turned into FP32; not measured"),
    (Backend.OPENVINO_CPU, Encoding.F32): Rule(4.0, 4.0, "measured: the plugin's packed copy"),
    (Backend.OPENVINO_GPU, Encoding.INT4): Rule(
        18.5 / 32, 0.5, "4-bit code, FP16 scale and 4-bit zero point for 32: 18.5 bytes for 32 weights"
    ),
    (Backend.OPENVINO_GPU, Encoding.INT4_AFFINE): Rule(
        0.625, 0.5, "4-bit code, FP16 scale and FP16 offset for 32; not measured"
    ),
    (Backend.OPENVINO_GPU, Encoding.INT8): Rule(
        1.0, 1.0, "one byte, and scale and zero point an output", output=4.0
    ),
    (Backend.OPENVINO_GPU, Encoding.INT8_GROUPED): Rule(
        35.0 / 32, 1.0, "one byte, FP16 scale and 8-bit zero point for 32; not measured"
    ),
    (Backend.OPENVINO_GPU, Encoding.BF16): Rule(4.0, 4.0, "turned into FP32; not measured"),
    (Backend.OPENVINO_GPU, Encoding.F32): Rule(4.0, 4.0, "as in the file; not measured"),
}
"""Bytes by backend and encoding."""

_SMALL_BYTES: Final = 4

EMBEDDING: Final = "embed.weight"
"""The tensor of which a token reads one row, so that it need not stay in memory."""


class StoredEntry(Protocol):
    """What a shard's table says of a tensor."""

    @property
    def encoding(self) -> Encoding:
        """Its stored form."""

    @property
    def shape(self) -> Sequence[int]:
        """Its axes."""


class StoredShard(Protocol):
    """A shard's table."""

    @property
    def names(self) -> Sequence[str]:
        """The tensors that are there."""

    def entry(self, name: str) -> StoredEntry:
        """What the table says of one."""


def tensor_bytes(backend: Backend, encoding: Encoding, shape: Sequence[int], lean: bool = False) -> int:
    """What a stored tensor takes in the memory of a backend.

    Args:
        backend: who multiplies. The kernels use what is stored, with what fills up blocks; the others pack
            a copy of the weights alone.
        encoding: of the stored tensor.
        shape: (..., outputs, inputs), or any shape of a float32 tensor.
        lean: whether a backend whose needs vary is taken at its least.
    """
    if backend.maps_weights or len(shape) < 2:
        return stored_bytes(encoding, shape)
    weights = math.prod(shape)
    return RULES[backend, encoding].bytes_of(weights, weights // shape[-1], lean)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The stored forms of a model's parts, and of what a stage keeps, on one backend.

    Args:
        backend: who multiplies.
        experts: form of experts and dense MLPs.
        projections: form of the attention projections.
        head: form of the vocabulary head.
        embedding: form of the embedding.
        lean: whether a backend whose needs vary is taken at its least.
        cache: form of keys and values, float32 or bfloat16.
    """

    backend: Backend = Backend.OPENVINO_CPU
    experts: Encoding = Encoding.F32
    projections: Encoding = Encoding.F32
    head: Encoding = Encoding.F32
    embedding: Encoding = Encoding.F32
    lean: bool = False
    cache: Encoding = Encoding.F32

    @property
    def varies(self) -> bool:
        """Whether it depends on circumstances what the backend takes for these forms."""
        forms = (self.experts, self.projections, self.head)
        return any(RULES[self.backend, form].least is not None for form in forms)

    def form(self, part: Part) -> Encoding:
        """How a part is kept."""
        forms = {Part.PROJECTIONS: self.projections, Part.HEAD: self.head, Part.EMBEDDING: self.embedding}
        return forms.get(part, self.experts)

    def bytes_of(self, matrices: Matrices) -> int:
        """What these matrices take in memory."""
        shape = (matrices.count, matrices.rows, matrices.columns)
        form = self.form(matrices.part)
        # The embedding stays a mapped file on every backend.
        backend = Backend.KERNELS if matrices.part is Part.EMBEDDING else self.backend
        return tensor_bytes(backend, form, shape, self.lean)

    def largest_of(self, matrices: Matrices) -> int:
        """The largest single allocation for these matrices."""
        return round(matrices.weights * RULES[self.backend, self.form(matrices.part)].codes)

    def small_bytes(self, numbers: int) -> int:
        """What so many numbers of small tensors take; they are float32 everywhere."""
        return _SMALL_BYTES * numbers

    def position_bytes(self, cache: CacheSizes) -> int:
        """What one layer keeps of one position."""
        return cache.position_bytes // 2 if self.cache is Encoding.BF16 else cache.position_bytes


EXACT: Final = Footprint()
"""Float32 throughout, packed by OpenVINO."""


_EXPERTS: Final = "experts"
_WHOLE: Final = {EMBEDDING: "embedding", "head.weight": "head"}
_PARTS: Final = {
    **dict.fromkeys(("q", "k", "v", "r", "o"), "projections"),
    **dict.fromkeys(("gate", "up", "down"), _EXPERTS),
}
"""What a matrix of a layer is for, by the last word of its name."""


def stored_forms(shard: StoredShard) -> dict[str, Encoding]:
    """The encodings in which most bytes of experts, projections, head and embedding are stored, if there."""
    counts: dict[str, dict[Encoding, int]] = {}
    for name in shard.names:
        part = _WHOLE.get(name) or _PARTS.get(name.rpartition(".")[2])
        if part is not None:
            entry, of_part = shard.entry(name), counts.setdefault(part, {})
            size = stored_bytes(entry.encoding, entry.shape)
            of_part[entry.encoding] = of_part.get(entry.encoding, 0) + size
    return {part: max(found, key=found.__getitem__) for part, found in counts.items()}


def footprint_of(shard: StoredShard, backend: Backend, cache: Encoding) -> Footprint:
    """The forms in which most bytes of each part of a shard are stored; a part that it lacks is as experts.

    Args:
        shard: its table.
        backend: who multiplies.
        cache: form of keys and values.
    """
    forms = stored_forms(shard)
    experts = forms.get(_EXPERTS, Encoding.F32)
    return Footprint(
        backend,
        experts,
        forms.get("projections", experts),
        forms.get("head", experts),
        forms.get("embedding", Encoding.BF16),
        cache=cache,
    )
