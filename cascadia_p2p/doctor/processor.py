"""Checks the processor: cores, and the instructions that our kernels are written for."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Final

import llvmlite.binding
import psutil

from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host

_GOOD: Final = ("avx512vnni", "avxvnni", "avx2")
_X86: Final = ("x86_64", "amd64")


def check_processor(host: Host, threads: int) -> Finding:
    """What computes here.

    Args:
        host: this machine.
        threads: that a node would use.
    """
    return judge_processor(
        _name(host),
        psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        threads,
        platform.machine().lower(),
        dict(llvmlite.binding.get_host_cpu_features()),
    )


def judge_processor(
    name: str, cores: int, threads: int, machine: str, features: Mapping[str, bool]
) -> Finding:
    """As `check_processor`, of what the system said."""
    found = [each for each in _GOOD if features.get(each)]
    message = f"{name}, {cores} cores, a node would use {threads}"
    if machine in _X86 and not found:
        return Finding(
            "processor",
            Level.WARN,
            f"{message}; it has no AVX2",
            "products are slow here: give this PC few layers, or leave it out",
            {"cores": cores},
        )
    words = f", {found[0].upper()}" if found else ""
    if threads > cores:
        return Finding(
            "processor",
            Level.WARN,
            f"{message}{words}",
            f"more threads than cores slow kernels down: use --threads {cores}",
            {"cores": cores, "threads": threads},
        )
    return Finding(
        "processor",
        Level.OK,
        message + words,
        facts={"cores": cores, "threads": threads, "features": list(found)},
    )


def _name(host: Host) -> str:
    for line in host.read("/proc/cpuinfo").splitlines() if host.linux else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
