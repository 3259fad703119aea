"""Compiling the kernels, keeping the machine code between runs, and choosing threads.

Every kernel has exactly one signature. Its machine code lies in a directory of the user's cache whose name
is a hash of all kernel sources, the compiler's version and the processor's features, so neither an edit nor
another version or processor can meet stale code. A lock lets the first of several processes compile while
the others wait, then load.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, cast

import filelock
import llvmlite.binding
import numba
import platformdirs
import structlog
from numba.core import caching, codegen, sigutils
from numba.core.registry import CPUDispatcher

__all__ = [
    "Progress",
    "address",
    "cache_directory",
    "kernel",
    "part",
    "set_threads",
    "threads",
    "twin_kernels",
    "warm_up",
]

P = ParamSpec("P")
R = TypeVar("R")

Progress = Callable[[str, int, int], None]
"""Called with what was done, how many are done, and how many there are."""

_APP: Final = "cascadia-p2p"
_PLACES: Final = ("compiled", "matrices", "engine/kernels")
"""Every package that has kernels, or functions that become part of them."""

_TBB_NAMES: Final = {"win32": "tbb12.dll", "darwin": "libtbb.12.dylib"}
_log = structlog.get_logger()


@cache
def cache_directory() -> Path:
    """Where this version of the kernels keeps its machine code for this processor."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(path for place in _PLACES for path in (root / place).glob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    # What numba compiles for, which a user may have set to another processor than this one.
    name = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = numba.config.CPU_FEATURES
    if features is None:
        features = codegen.get_host_cpu_features()
    for fact in (numba.__version__, llvmlite.__version__, sys.version, platform.machine(), name, features):
        digest.update(str(fact).encode() + b"\0")
    return platformdirs.user_cache_path(_APP, appauthor=False) / "kernels" / digest.hexdigest()[:20]


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """Puts a kernel's machine code into `cache_directory`, whose name holds all that it depends on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_cache_path(self) -> str:
        return str(cache_directory())

    def get_source_stamp(self) -> str:
        return cache_directory().name

    def get_disambiguator(self) -> str:
        return self._name


class _Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(name)
        self._filename_base = self.get_filename_base(function.__name__, getattr(sys, "abiflags", ""))


class _MachineCode(caching.Cache):  # type: ignore[misc]
    """Numba's cache of one function, in our directory; files that can not be read count as absent."""

    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._name = name
        self._py_func = function
        self._impl = _Files(function, name)
        self._cache_path = self._impl.locator.get_cache_path()
        self._cache_file = caching.IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )
        self.enable()

    def exists(self) -> bool:
        """Whether there seems to be machine code for the kernel's one signature."""
        paths = (self._cache_file._index_path, self._cache_file._data_path(self._cache_file._data_name(1)))
        return all(Path(path).exists() for path in paths)

    def load_overload(self, sig: object, target_context: object) -> object:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            _log.warning("kernel_cache_unreadable", kernel=self._name, error=repr(error))
            # An index that can not be read would also keep the new code from being written.
            with contextlib.suppress(OSError):
                self._cache_file.flush()
            return None

    def save_overload(self, sig: object, data: object) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _log.warning("kernel_cache_not_written", kernel=self._name, error=str(error))


@dataclass(slots=True)
class _Kernel:
    name: str
    dispatcher: Any
    signature: tuple[object, ...]
    twin_for: bool | None
    """True: runs where there are several threads; False: where there is one; None: everywhere."""
    usable: bool = True
    ready: bool = False

    def compile(self) -> None:
        self.dispatcher.compile(self.signature)
        # Arrays of another type are a mistake of ours: an error, not another second of compiling.
        self.dispatcher.disable_compile()
        self.ready = True


_kernels: Final[list[_Kernel]] = []
_threads = 1
_one_thread: Final = threading.Lock()
_KERNEL_S: Final = 1.5
"""What compiling one kernel takes, about, in seconds."""


class _Part(CPUDispatcher):  # type: ignore[misc]
    """What kernels find compiled, and callers from Python as the plain function that it is made of.

    Compiled without the wrappers that a call from Python needs, which take a third of the time.
    """

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.py_func(*args, **kwargs)


_PART: Final = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for kernels, of each of which it becomes part; from Python it runs uncompiled."""
    compiled = numba.njit(**_PART)(function)
    compiled.__class__ = _Part
    return cast("Callable[P, R]", compiled)


Signature: TypeAlias = str | tuple[object, ...]
"""Argument types, in numba's notation or as its types."""


def kernel(
    signature: Signature, form: str = "", *, usable: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a kernel: compiled, without the interpreter's lock, kept in the cache.

    Args:
        signature: argument types; results go into array arguments.
        form: goes into the kernel's name where several functions have the same.
        usable: whether this processor has what the kernel needs; if not, `warm_up` leaves it out, because
            LLVM ends the process over an instruction that its target lacks.
    """
    return lambda function: _register(function, signature, False, None, form, usable)


def twin_kernels(
    signature: Signature, form: str = "", *, usable: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function with `prange` loops a kernel in two forms, of which `set_threads` decides.

    With one thread the loops are plain ones and no thread pool is touched; only the form in use is compiled.

    Args:
        signature: argument types.
        form: goes into the kernels' names where one function is compiled for several signatures.
        usable: as for `kernel`.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        serial = _register(function, signature, False, False, form, usable)
        parallel = _register(function, signature, True, True, form, usable)

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return serial(*args, **kwargs) if _threads == 1 else parallel(*args, **kwargs)

        return run

    return wrap


def _register(
    function: Callable[P, R],
    signature: Signature,
    parallel: bool,
    twin_for: bool | None,
    form: str,
    usable: bool,
) -> Callable[P, R]:
    types, _ = sigutils.normalize_signature(signature)
    dispatcher = numba.njit(nogil=True, parallel=parallel, error_model="numpy")(function)
    name = "_".join(word for word in (function.__name__, form, "parallel" if parallel else "") if word)
    # Functions of one name in several modules must not find each other's code.
    dispatcher._cache = _MachineCode(function, f"{function.__module__.rpartition('.')[2]}_{name}")
    _kernels.append(_Kernel(name, dispatcher, types, twin_for, usable))
    return cast("Callable[P, R]", dispatcher)


def address(function: Callable[..., object]) -> int:
    """Where a kernel's machine code lies, for `addresses.call` in other kernels; compiles it if need be.

    Kernels that call each other so are compiled apart: code that is large is made once, not in every caller.
    """
    item = next(item for item in _kernels if item.dispatcher is function)
    if not item.ready:
        stored = item.dispatcher._cache.exists()
        with _one_thread, contextlib.nullcontext() if stored else _compiler_lock():
            if not item.ready:
                item.compile()
    result = item.dispatcher.overloads[tuple(item.signature)]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


def warm_up(progress: Progress | None = None) -> None:
    """Compile every kernel that the chosen number of threads needs, or load it from the cache.

    Of several processes one compiles and the others wait for it. Without a writable cache directory each
    compiles for itself.
    """
    needed = [
        item for item in _kernels if item.usable and not item.ready and item.twin_for is not (_threads == 1)
    ]
    if not needed:
        return
    # Loading needs no lock between processes: files appear whole or not at all.
    missing = sum(not item.dispatcher._cache.exists() for item in needed)
    if missing:
        message = (
            f"compiling {missing} {'kernel' if missing == 1 else 'kernels'} for this PC's processor, "
            f"about {_KERNEL_S * missing:.0f} s; later starts that need the same ones load them"
        )
        _log.info("kernels_compiling", message=message, kernels=missing)
    with _one_thread, _compiler_lock() if missing else contextlib.nullcontext():
        for done, item in enumerate(needed, 1):
            # Another thread may have been first.
            if not item.ready:
                item.compile()
            if progress is not None:
                progress(item.name, done, len(needed))


class _compiler_lock:  # noqa: N801
    """Holds the cache directory for one process; does nothing where the directory can not be made."""

    def __enter__(self) -> None:
        self._lock: filelock.BaseFileLock | None = None
        directory = cache_directory()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(directory / "compiling.lock")
            lock.acquire()
            self._lock = lock
        except OSError as error:
            _log.warning("kernel_cache_not_writable", directory=str(directory), error=str(error))

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.release()


def threads() -> int:
    """Threads that kernels use."""
    return _threads


def set_threads(count: int) -> int:
    """Let kernels use this many threads, at most one a core; with one no thread pool is ever made.

    Returns:
        The number in force.
    """
    global _threads
    _threads = max(1, min(count, int(numba.config.NUMBA_NUM_THREADS)))
    if _threads > 1:
        _choose_thread_pool()
        numba.set_num_threads(_threads)
    return _threads


@cache
def _choose_thread_pool() -> None:
    """Take Intel TBB, the pool that neither slows OpenVINO down nor minds several calling threads."""
    if _load_tbb():
        numba.config.THREADING_LAYER = "tbb"
    else:
        _log.warning("tbb_not_found", advice="pip install tbb", instead="numba's default thread pool")


def _load_tbb() -> bool:
    """Bring the TBB library into the process; where pip puts it no loader looks."""
    name = _TBB_NAMES.get(sys.platform, "libtbb.so.12")
    for place in (name, *_installed(name)):
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


def _installed(name: str) -> Iterator[str]:
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == name:
            path = Path(str(file.locate())).resolve()
            if sys.platform == "win32":
                os.add_dll_directory(str(path.parent))
            yield str(path)
