"""How many bytes a weight takes in the memory of each backend, by the form that it is kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cascadia_p2p.models.sizes import Matrices, Part


class Form(StrEnum):
    """How weights are kept."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    """One scale for each output."""
    INT4 = "int4"
    """One scale for 32 inputs of an output."""


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


@dataclass(frozen=True, slots=True)
class Rule:
    """What a weight of one form takes.

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

    def bytes_of(self, matrices: Matrices, lean: bool = False) -> int:
        """What these matrices take, under the best circumstances if `lean`."""
        weight = self.least if lean and self.least is not None else self.weight
        return round(matrices.weights * weight + matrices.outputs * self.output)


RULES: Final[Mapping[tuple[Backend, Form], Rule]] = {
    (Backend.KERNELS, Form.INT4): Rule(
        0.5625, 0.5625, "block of 16 outputs by 64 inputs: 512 bytes of codes, 64 of FP16 scales"
    ),
    (Backend.KERNELS, Form.INT8): Rule(1.0, 1.0, "one byte, and an FP32 scale an output", output=4.0),
    (Backend.KERNELS, Form.F32): Rule(4.0, 4.0, "as in the file"),
    (Backend.OPENVINO_CPU, Form.INT4): Rule(
        0.77, 0.5, "measured, plugin 2026.4.1: 0.77 with FP16 scales in the file, 0.64 with FP32", least=0.64
    ),
    (Backend.OPENVINO_CPU, Form.INT8): Rule(1.1, 1.0, "measured, plugin 2026.4.1"),
    (Backend.OPENVINO_CPU, Form.F32): Rule(4.0, 4.0, "measured: the plugin's packed copy"),
    (Backend.OPENVINO_GPU, Form.INT4): Rule(
        18.5 / 32, 0.5, "4-bit code, FP16 scale and 4-bit zero point for 32: 18.5 bytes for 32 weights"
    ),
    (Backend.OPENVINO_GPU, Form.INT8): Rule(
        1.0, 1.0, "one byte, and scale and zero point an output", output=4.0
    ),
    (Backend.OPENVINO_GPU, Form.F32): Rule(4.0, 4.0, "as in the file; not measured"),
}
"""Bytes by backend and form. Forms that are not here can not be multiplied by that backend."""

EMBEDDING_BYTES: Final[Mapping[Form, float]] = {Form.F32: 4.0, Form.BF16: 2.0}
"""Bytes for a number of the embedding, which stays a mapped file on every backend."""

_SMALL_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """The forms of a model's parts on one backend.

    Args:
        backend: who multiplies.
        experts: form of experts and dense MLPs.
        projections: form of the attention projections.
        head: form of the vocabulary head.
        embedding: form of the embedding.
        lean: whether a backend whose needs vary is taken at its least.
    """

    backend: Backend = Backend.OPENVINO_CPU
    experts: Form = Form.F32
    projections: Form = Form.F32
    head: Form = Form.F32
    embedding: Form = Form.F32
    lean: bool = False

    @property
    def known(self) -> bool:
        """Whether the backend can multiply in these forms."""
        return all((self.backend, form) in RULES for form in (self.experts, self.projections, self.head))

    @property
    def varies(self) -> bool:
        """Whether it depends on circumstances what the backend takes for these forms."""
        forms = (self.experts, self.projections, self.head)
        return any(RULES[self.backend, form].least is not None for form in forms)

    def form(self, part: Part) -> Form:
        """How a part is kept."""
        forms = {Part.PROJECTIONS: self.projections, Part.HEAD: self.head, Part.EMBEDDING: self.embedding}
        return forms.get(part, self.experts)

    def rule(self, part: Part) -> Rule:
        """The rule for a part's matrices; not for the embedding, which is none."""
        return RULES[self.backend, self.form(part)]

    def bytes_of(self, matrices: Matrices) -> int:
        """What these matrices take in memory."""
        if matrices.part is Part.EMBEDDING:
            return round(matrices.weights * EMBEDDING_BYTES[self.embedding])
        return self.rule(matrices.part).bytes_of(matrices, self.lean)

    def largest_of(self, matrices: Matrices) -> int:
        """The largest single allocation for these matrices."""
        return round(matrices.weights * self.rule(matrices.part).codes)

    def small_bytes(self, numbers: int) -> int:
        """What so many numbers of small tensors take; they are float32 everywhere."""
        return _SMALL_BYTES * numbers


EXACT: Final = Footprint()
"""Float32 throughout, as `--precision exact` computes."""
