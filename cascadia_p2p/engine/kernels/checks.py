"""Shape checks in front of kernels, which index memory unchecked."""

from __future__ import annotations

from typing import Protocol

from cascadia_p2p.errors import CascadiaError


class Shaped(Protocol):
    """An array, or a stored matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""


def expect(name: str, array: Shaped, shape: tuple[int, ...]) -> None:
    """Refuse an array, or a stored matrix, of another shape.

    Raises:
        CascadiaError: the shapes differ; the message holds both.
    """
    if array.shape != shape:
        raise CascadiaError(
            f"{name} has shape {list(array.shape)} where the kernel needs {list(shape)}: "
            "the model's files and its config do not fit together"
        )
