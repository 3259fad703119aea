"""Shape checks in front of kernels, which index memory unchecked."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from cascadia_p2p.errors import CascadiaError


def expect(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuse an array of another shape.

    Raises:
        CascadiaError: the shapes differ; the message holds both.
    """
    if array.shape != shape:
        raise CascadiaError(
            f"{name} has shape {list(array.shape)} where the kernel needs {list(shape)}: "
            "the model's files and its config do not fit together"
        )
