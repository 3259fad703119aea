"""Which instructions for products of bytes the kernels may use.

The choice follows what numba compiles for, because LLVM ends the process when it is told to use an
instruction that its target lacks.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from functools import cache

import llvmlite.binding
import numba
from numba.core import codegen


class Instructions(StrEnum):
    """A way to multiply unsigned bytes by signed ones and add up four neighbours."""

    AVX512_VNNI = "AVX-512 VNNI"
    """Sixteen sums at once."""
    AVX_VNNI = "AVX-VNNI"
    """Eight sums at once."""
    AVX2 = "AVX2"
    """Eight sums at once in two steps."""

    @property
    def lanes(self) -> int:
        """32-bit sums in one register."""
        return 16 if self is Instructions.AVX512_VNNI else 8

    @property
    def most_rows(self) -> int:
        """Rows of activations that one pass over weights can take without running out of registers."""
        return 8 if self is Instructions.AVX512_VNNI else 4


@cache
def least_prefetched() -> int:
    """Rows from which on weights are asked for before they are needed.

    On AMD's processors the hardware's own prefetching keeps up with few rows, and ours is in its way; on
    Intel's it is behind even with one (both measured).
    """
    name = str(numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name())
    return 4 if name.startswith("znver") else 1


@cache
def instructions() -> Instructions | None:
    """The best of this processor, or of the one that numba is told to compile for; None without AVX2."""
    features = numba.config.CPU_FEATURES
    if features is None:
        features = codegen.get_host_cpu_features() if sys.maxsize > 2**32 else ""
    return choose(str(features))


def choose(features: str) -> Instructions | None:
    """The best set that LLVM's feature string, such as `+avx2,-avx512f`, allows."""
    has = {name[1:] for name in features.split(",") if name.startswith("+")}
    if not has >= {"avx2", "fma", "f16c"}:
        return None
    if has >= {"avx512vnni", "avx512f", "avx512bw", "avx512vl"}:
        return Instructions.AVX512_VNNI
    return Instructions.AVX_VNNI if "avxvnni" in has else Instructions.AVX2
