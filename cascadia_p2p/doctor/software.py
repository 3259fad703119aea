"""Checks Python, the packages, and that there is one installation of this program and not two."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cascadia_p2p
from cascadia_p2p import __version__
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host, version_of
from cascadia_p2p.wire import PROTOCOL

_SHOWN: Final = ("numpy", "numba", "openvino", "pyzmq", "zeroconf")
_LEAST_PYTHON: Final = (3, 11)
_COMMAND: Final = "cascadia-p2p"
_PROJECT: Final = "cascadia-p2p"
_REQUIREMENT: Final = re.compile(
    r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*(?:>=\s*([0-9][0-9.]*))?[^;]*(;.*)?"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that this program declares to need.

    Args:
        name: of the package.
        least: version that it needs at least; empty for any.
        everywhere: False for one that only some systems need.
    """

    name: str
    least: str
    everywhere: bool


def check_software(host: Host) -> Iterator[Finding]:
    """Python, packages and installations."""
    yield check_python(sys.version_info[:3], sys.maxsize > 2**32)
    needed = requirements()
    yield check_packages(needed, installed_versions(needed))
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


def requirements() -> list[Requirement]:
    """What this installation declares, or the source tree that it runs from; empty when neither is there."""
    try:
        lines = importlib.metadata.requires(_PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        project = Path(cascadia_p2p.__file__).parents[1] / "pyproject.toml"
        try:
            lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
        except (OSError, KeyError, tomllib.TOMLDecodeError):
            lines = []
    return read_requirements(lines)


def read_requirements(lines: Iterable[str]) -> list[Requirement]:
    """Requirements as packages declare them, without those of extras."""
    found: list[Requirement] = []
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is not None and "extra ==" not in (match[3] or ""):
            found.append(Requirement(match[1], match[2] or "", match[3] is None))
    return found


def installed_versions(needed: Iterable[Requirement]) -> dict[str, str | None]:
    """The version of every needed package; None where it is absent."""
    found: dict[str, str | None] = {}
    for each in needed:
        try:
            found[each.name] = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            found[each.name] = None
    return found


def check_packages(needed: Sequence[Requirement], found: Mapping[str, str | None]) -> Finding:
    """That every package is there and new enough."""
    wrong: list[str] = []
    for each in needed:
        version = found.get(each.name)
        if version is None:
            if each.everywhere:
                wrong.append(f"{each.name} is missing")
        elif version_of(version) < version_of(each.least):
            wrong.append(f"{each.name} is {version}, needed is {each.least}")
    if wrong:
        return Finding(
            "packages", Level.FAIL, "; ".join(wrong), "install again with 'pip install .' in this environment"
        )
    shown = ", ".join(f"{name} {found[name]}" for name in _SHOWN if found.get(name))
    if not needed:
        return Finding(
            "packages",
            Level.WARN,
            "what this program needs is not declared here",
            "install it with 'pip install .'",
        )
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
