"""Checks Python, the packages, and that there is one installation of this program and not two."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Final

from cascadia_p2p import __version__
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host, version_of
from cascadia_p2p.wire import PROTOCOL

LEAST: Final[Mapping[str, str]] = {
    "filelock": "3.16",
    "ifaddr": "0.2",
    "ml-dtypes": "0.5",
    "numba": "0.61",
    "numpy": "2.0",
    "openvino": "2026.3",
    "orjson": "3.10",
    "platformdirs": "4.3",
    "psutil": "6.0",
    "pydantic": "2.10",
    "pyzmq": "26.4",
    "rich": "13.9",
    "structlog": "24.4",
    "tbb": "2022",
    "tokenizers": "0.21",
    "zeroconf": "0.140",
}
"""Packages and the least version of each, as the project declares them."""

_SHOWN: Final = ("numpy", "numba", "openvino", "pyzmq", "zeroconf")
_LEAST_PYTHON: Final = (3, 11)
_ON_X86_ONLY: Final = "tbb"
_COMMAND: Final = "cascadia-p2p"


def check_software(host: Host) -> Iterator[Finding]:
    """Python, packages and installations."""
    yield check_python(sys.version_info[:3], sys.maxsize > 2**32)
    yield check_packages(installed_versions())
    yield check_installation(host, shutil.which(_COMMAND))


def check_python(version: tuple[int, ...], wide: bool) -> Finding:
    """The interpreter: its version, and that it has 64 bits."""
    spelled = ".".join(map(str, version))
    message = f"cascadia-p2p {__version__}, protocol {PROTOCOL}; Python {spelled} on {platform.platform()}"
    if version[:2] < _LEAST_PYTHON:
        return Finding(
            "python", Level.FAIL, message, "install Python 3.11 or newer and make the environment anew"
        )
    if not wide:
        return Finding("python", Level.FAIL, message, "this Python has 32 bits: install a 64-bit one")
    return Finding("python", Level.OK, message)


def installed_versions() -> dict[str, str | None]:
    """The version of every needed package; None where it is absent."""
    found: dict[str, str | None] = {}
    for name in LEAST:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def check_packages(found: Mapping[str, str | None]) -> Finding:
    """That every package is there and new enough."""
    wrong: list[str] = []
    for name, least in LEAST.items():
        version = found.get(name)
        if version is None:
            if name != _ON_X86_ONLY or platform.machine().lower() in ("x86_64", "amd64"):
                wrong.append(f"{name} is missing")
        elif version_of(version) < version_of(least):
            wrong.append(f"{name} is {version}, needed is {least}")
    if wrong:
        return Finding(
            "packages", Level.FAIL, "; ".join(wrong), "install again with 'pip install .' in this environment"
        )
    shown = ", ".join(f"{name} {found[name]}" for name in _SHOWN)
    return Finding("packages", Level.OK, shown, facts=dict(found.items()))


def check_installation(host: Host, command: str | None) -> Finding:
    """That the command on PATH is the program that runs here."""
    if command is None:
        return Finding(
            "installation",
            Level.OK,
            f"the command {_COMMAND} is not on PATH: 'python -m cascadia_p2p' is the same",
        )
    said = host.run([command, "--version"])
    version = None if said is None else said.strip().rpartition(" ")[2]
    if version == __version__:
        return Finding("installation", Level.OK, f"{command} is of this version")
    other = "does not run" if version is None else f"is version {version}"
    return Finding(
        "installation",
        Level.WARN,
        f"this is version {__version__}, but {command} {other}",
        "two installations on one PC get mixed up: remove one, or call 'python -m cascadia_p2p' in this one",
    )
