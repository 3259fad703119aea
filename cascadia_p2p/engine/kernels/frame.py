"""What compiled code knows of the frame that it computes, and of what one step of a layer works on.

Steps of a layer that differ between model families are kernels of their own. The stage's program calls them
by address with the addresses of a record, of the frame, and with an index; so it need not know them, and
each is compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.addresses import pointer
from cascadia_p2p.compiled.compiling import part

STEP: Final = "(int64, int64, int64)"
"""The arguments of a step: addresses of its record and of the frame, and an index."""

WORKING_STEP: Final = "(int64, int64, int64, int64, int64)"
"""The same, and address and length of float32 memory of the thread."""

Record: TypeAlias = npt.NDArray[np.void]
"""One record in an array, so that it has an address."""


def record_of(integers: str, numbers: str = "") -> np.dtype[np.void]:
    """A record of int64 fields, then float64 ones, by their names."""
    names = [(name, np.int64) for name in integers.split()]
    return np.dtype([*names, *((name, np.float64) for name in numbers.split())], align=True)


FRAME: Final = record_of(
    "rows hidden slots positions before after x normed failed cosines sines pairs "
    "workers items merges places partials partial_numbers"
)
"""A frame: rows; addresses of the row table's int32 [rows] arrays, of the residual and its norm, float32
[rows][hidden], of int32 failed [rows], and of the rows' angles, float32 [rows][pairs].

For attention: threads; addresses of int32 items and merges [places][8]; address and length of float32
partials.
"""

ATTENTION: Final = record_of(
    "q k v r out heads kv_heads dim stored ranks extent window "
    "key_taps value_taps taps key_history value_history depth slots "
    "q_bias k_bias v_bias q_norm k_norm bias keys values blocks table ring",
    "floor alpha eps scale",
)
"""A layer's attention: addresses of projected rows and of the result, sizes, addresses of small weights and
of the caches. What a family does not have is 0."""

SUM: Final = record_of("update taps history tap_count depth slots bias norm layer", "eps")
"""An update of the residual: addresses of float32 update [rows][hidden], of taps and history of its
convolution or of its bias, of the norm that follows or 0, and the layer's number."""


def put_addresses(record: Record, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Put the addresses of arrays into a record's fields of these names; the caller keeps them alive."""
    for name, array in arrays.items():
        record[name] = array.ctypes.data


@part
def frame_at(address: int) -> Any:
    """The `FRAME` at an address."""
    return numba.carray(pointer(address), (1,), FRAME)[0]


@part
def attention_at(address: int) -> Any:
    """The `ATTENTION` at an address."""
    return numba.carray(pointer(address), (1,), ATTENTION)[0]


@part
def sum_at(address: int) -> Any:
    """The `SUM` at an address."""
    return numba.carray(pointer(address), (1,), SUM)[0]
