"""This machine as its system files and commands describe it; tests put another root here."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_COMMAND_S: Final = 10.0


class Host:
    """What checks ask the system beside sockets.

    Args:
        root: directory that stands for `/`.
        system: as `sys.platform`.
    """

    def __init__(self, root: Path = Path("/"), system: str = sys.platform) -> None:
        self.root = root
        self.system = system

    @property
    def linux(self) -> bool:
        """Whether Linux' files are to be looked at."""
        return self.system == "linux"

    def path(self, name: str) -> Path:
        """A path that is absolute on this machine."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """A small file's text without spaces around it; empty when it can not be read."""
        return read_text(self.path(name))

    def number(self, name: str) -> int | None:
        """A file's whole number, if it holds one."""
        return whole_number(self.read(name))

    def find(self, directory: str, pattern: str) -> list[Path]:
        """Paths in a directory, sorted; empty when it is not there."""
        try:
            return sorted(self.path(directory).glob(pattern))
        except OSError:
            return []

    def may_use(self, path: Path) -> bool:
        """Whether this process may read and write it."""
        return os.access(path, os.R_OK | os.W_OK)

    def loads(self, library: str) -> str:
        """Why a shared library can not be loaded; empty when it can."""
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return str(error)
        return ""

    def kernel(self) -> str:
        """The system's release, such as 6.17.0-5-generic."""
        return platform.release()

    def run(self, command: Sequence[str]) -> str | None:
        """A command's output; None when there is no such command or it fails."""
        try:
            found = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMMAND_S, check=True, errors="replace"
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return found.stdout


def read_text(path: Path) -> str:
    """A small file's text without spaces around it; empty when it can not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def whole_number(text: str) -> int | None:
    """The number that a text is, if it is one."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, as in (2026, 4, 1) of `2026.4.1-22982`."""
    numbers: list[int] = []
    for part in text.strip().replace("-", ".").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
