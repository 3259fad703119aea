"""Results do not depend on the instruction set, and a processor without any of ours takes OpenVINO."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_world import AVX2
from numba.core import codegen

from cascadia_p2p.engine.kernels.instructions import Instructions, choose

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SETS = {
    "host": (None, None, "stages"),
    "AVX-VNNI": ("alderlake", f"{AVX2[1]},+avxvnni", "products"),
    "AVX2": (*AVX2, "products"),
    "none": ("x86-64", "+sse2", "stages"),
}
"""Processor and features that numba is told to compile for, and what of `digests` is computed.

Stages beside products take thrice the time to compile. What they add knows only whether registers are wide,
which is attention, and `test_long_attention` compares it.
"""

_SECONDS = 1500
slow = pytest.mark.timeout(_SECONDS)
"""Where nothing is in the user's cache yet, whole sets of kernels are compiled."""


def runnable(features: str | None) -> bool:
    here = set(str(codegen.get_host_cpu_features()).split(","))
    return features is None or set(features.split(",")) <= here


def start(processor: str | None, features: str | None, what: str) -> subprocess.Popen[str]:
    own = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))}
    if processor is not None and features is not None:
        own |= {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, str(HERE / "digests.py"), what]
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What a process of each set prints; all run at the same time."""
    children = {name: start(*how) for name, how in SETS.items() if runnable(how[1])}
    found: dict[str, list[str]] = {}
    try:
        for name, child in children.items():
            out, error = child.communicate(timeout=_SECONDS)
            assert child.returncode == 0, f"{name}: {error}"
            found[name] = out.splitlines()
    finally:
        for child in children.values():
            with child:
                child.kill()
    return found


@slow
@pytest.mark.parametrize("name", ["AVX-VNNI", "AVX2"])
def test_every_set_gives_the_same_bits(printed: dict[str, list[str]], name: str) -> None:
    if name not in printed:
        pytest.skip(f"this processor has no {name}")
    first, *digests = printed[name]
    assert first == f"set {Instructions(name)}"
    assert digests[0].startswith("backend kernels")
    assert len(digests) == 1 + 3 * (5 * 4 + (2 if SETS[name][2] == "stages" else 0))
    assert set(digests) <= set(printed["host"])


@slow
def test_a_processor_without_any_takes_openvino(printed: dict[str, list[str]]) -> None:
    chosen, backend, finite = printed["none"]
    assert chosen == "set None"
    words = backend.split()
    assert words[:2] == ["backend", "openvino-cpu"]
    assert float(words[2]) < 1e-4
    assert finite == "finite True"


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("", None),
        ("+sse4.2,+avx", None),
        ("+avx2", None),
        ("+avx2,+fma", None),
        ("-avx2,+fma,+f16c", None),
        ("+fma,+f16c,+avxvnni,+avx512vnni", None),
        ("+avx2,+fma,+f16c", Instructions.AVX2),
        ("+avx2,+fma,+f16c,-avxvnni,-avx512vnni", Instructions.AVX2),
        ("+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl", Instructions.AVX2),
        ("+avx2,+fma,+f16c,+avx512vnni,+avx512f,+avx512bw", Instructions.AVX2),
        ("+avx2,+fma,+f16c,+avxvnni", Instructions.AVX_VNNI),
        ("+avx2,+fma,+f16c,+avxvnni,+avx512vnni,+avx512f,-avx512bw,+avx512vl", Instructions.AVX_VNNI),
        ("+avx2,+fma,+f16c,+avx512vnni,+avx512f,+avx512bw,+avx512vl", Instructions.AVX512_VNNI),
        ("+avx512vl,+avx512bw,+avx512f,+avx512vnni,+f16c,+fma,+avx2,+avxvnni", Instructions.AVX512_VNNI),
    ],
)
def test_the_best_set_of_what_there_is(features: str, expected: Instructions | None) -> None:
    assert choose(features) is expected


@pytest.mark.parametrize(("name", "lanes", "rows"), [("AVX-512 VNNI", 16, 8), ("AVX2", 8, 4)])
def test_registers_of_a_set(name: str, lanes: int, rows: int) -> None:
    chosen = Instructions(name)
    assert (chosen.lanes, chosen.most_rows) == (lanes, rows)
