"""Who this node is: its locked state directory, its lasting node id, and the instance drawn at each start."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import structlog
from filelock import FileLock, Timeout

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.types import Instance, NodeId

__all__ = ["Identity", "new_instance"]

_MAX_NODES = 256
_NODE_ID = re.compile(r"[0-9a-f]{16}")
_REASONS = {
    errno.EACCES: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOTDIR: "part of the path is a file, not a directory",
}

_log = structlog.get_logger()


def new_instance() -> Instance:
    """16 random hex digits for one start of a process."""
    return Instance(secrets.token_hex(8))


class Identity:
    """A node's identity together with the lock that makes it this process's alone; close it at the end.

    The state directory holds one numbered directory a node (`node-0`, `node-1`, ...), so several nodes of one
    user on one PC keep apart: each takes the first that no living process holds.
    """

    def __init__(self, root: Path, number: int, lock: FileLock) -> None:
        self._lock = lock
        self.number = number
        self.directory = root / f"node-{number}"
        self.instance = new_instance()
        self.node_id = _node_id(self.directory)
        self._remove_scratch()

    @classmethod
    def open(cls, root: Path) -> Self:
        """Lock the first free numbered directory under `root`, and read or make the node id there.

        Raises:
            CascadiaError: the directory can not be written, or all numbers are taken.
        """
        with _clear_errors(root):
            for number in range(_MAX_NODES):
                directory = root / f"node-{number}"
                directory.mkdir(parents=True, exist_ok=True)
                lock = FileLock(directory / "lock", is_singleton=False, thread_local=False)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    continue
                try:
                    return cls(root, number, lock)
                except BaseException:
                    lock.release()
                    raise
        raise CascadiaError(
            f"{root} already serves {_MAX_NODES} living nodes: give another with --state-dir DIR"
        )

    def scratch(self, name: str) -> Path:
        """A path for a temporary file of this instance; its directory exists, and goes at the end.

        Raises:
            CascadiaError: the directory can not be written.
        """
        directory = self.directory / f"scratch-{self.instance}"
        with _clear_errors(self.directory):
            directory.mkdir(exist_ok=True)
        return directory / name

    def close(self) -> None:
        """Remove the scratch files and let go of the directory; may be called twice."""
        if self._lock.is_locked:
            self._remove_scratch()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _remove_scratch(self) -> None:
        # The lock is held: whatever other instances left here belongs to dead processes.
        for directory in self.directory.glob("scratch-*"):
            shutil.rmtree(directory, ignore_errors=True)


def _node_id(directory: Path) -> NodeId:
    path = directory / "node-id"
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError:
        text = "not text"
    if _NODE_ID.fullmatch(text):
        return NodeId(text)
    node_id = secrets.token_hex(8)
    if text:
        _log.warning(
            "node_id_replaced",
            message=f"{path} does not hold 16 hex digits, so this node has a new id, {node_id}",
        )
    _write(path, node_id + "\n")
    return NodeId(node_id)


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_state_root(path: Path) -> None:
    """Make the state directory where it is not there yet.

    Raises:
        CascadiaError: it can not be made, or not be written to.
    """
    with _clear_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _refuse(path, _REASONS.get(error.errno or 0) or error.strerror or str(error), error)
    except NotImplementedError as error:
        _refuse(path, "its file system has no file locks", error)


def _refuse(path: Path, reason: str, error: Exception) -> NoReturn:
    raise CascadiaError(
        f"the state directory {path} can not be used: {reason}. "
        "Give a writable directory on this machine with --state-dir DIR"
    ) from error
