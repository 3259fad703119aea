"""Takes blocks of GGUF files apart into codes and scales, so that they can be stored without loss.

Each form keeps 32 numbers of a row in a block, which starts with an FP16 scale. Forms: `block_q*` in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cascadia_p2p.matrices.encoding import F32, GROUP
from cascadia_p2p.matrices.packing import Codes

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers of consecutive groups: code x scale, or code x scale + offset.

    Args:
        codes: int8 [groups, 32].
        scales: float32 [groups], each an FP16 number.
        offsets: the same, or None.
    """

    codes: Codes
    scales: F32
    offsets: F32 | None = None


def take_apart(kind: str, data: bytes) -> Groups:
    """The codes and scales in whole blocks.

    Args:
        kind: Q4_0, Q4_1, Q5_0 or Q8_0.
        data: the blocks.
    """
    blocks = np.frombuffer(data, np.uint8).reshape(-1, _BYTES[kind])
    scales = _halves(blocks[:, :2])
    match kind:
        case "Q8_0":
            return Groups(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), scales)
        case "Q4_0":
            return Groups(_nibbles(blocks[:, 2:]) - np.int8(8), scales)
        case "Q4_1":
            return Groups(_nibbles(blocks[:, 4:]), scales, _halves(blocks[:, 2:4]))
        case _:
            fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").view(np.int8)
            return Groups((_nibbles(blocks[:, 6:]) | fifth << np.int8(4)) - np.int8(16), scales)


_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34}


def _halves(raw: _Bytes) -> F32:
    return np.ascontiguousarray(raw).view("<f2").reshape(-1).astype(np.float32)


def _nibbles(raw: _Bytes) -> Codes:
    """16 bytes a group to 32 codes: low halves first."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).reshape(-1, GROUP).view(np.int8)
