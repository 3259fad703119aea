"""Machine code between runs: found again, never stale, never in two processes' way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Three kernels, compiled or loaded; prints how many were compiled, then a result.
SCRIPT = """
import numpy as np
from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernels import norms
import numba.core.event as event
with event.install_recorder("numba:compile") as recorder:
    seen = []
    compiling.warm_up(lambda name, done, total: seen.append((name, done, total)))
assert seen == [("_normalise", 1, 3), ("_look_up_bf16", 2, 3), ("_embed", 3, 3)], seen
x = np.full((1, 4), 3.0, np.float32)
norms.normalise(x, np.ones(4, np.float32), 0.0, x)
print(sum(e.is_start for _, e in recorder.buffer) > 0, x[0, 0], compiling.cache_directory())
"""


def environment(home: Path, root: Path = ROOT) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(root), "HOME": str(home)}


def start(home: Path, root: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment(home, root),
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[bool, float, Path]:
    """Whether it compiled, its result, and its cache directory."""
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    compiled, result, directory = out.splitlines()[-1].split()
    return compiled == "True", float(result), Path(directory)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    if sys.platform != "linux":
        pytest.skip("the cache's place is set by XDG_CACHE_HOME")
    return tmp_path


def test_of_several_processes_at_once_one_compiles_and_the_next_run_loads(home: Path) -> None:
    results = [finish(process) for process in [start(home) for _ in range(2)]]
    assert sum(compiled for compiled, _, _ in results) == 1
    assert {result for _, result, _ in results} == {1.0}
    assert finish(start(home))[0] is False


def test_damaged_and_empty_cache_files_are_compiled_anew(home: Path) -> None:
    _, _, directory = finish(start(home))
    files = sorted(directory.glob("*.nbc")) + sorted(directory.glob("*.nbi"))
    assert len(files) == 6
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:100])
    files[2].write_bytes(b"nothing of ours")
    assert finish(start(home))[:2] == (True, 1.0)
    assert finish(start(home))[:2] == (False, 1.0)


def test_an_edit_anywhere_in_the_kernels_makes_old_code_unreachable(home: Path) -> None:
    """Also in a file that only a helper of the kernel lies in."""
    edited = home / "edited"
    package = edited / "cascadia_p2p"
    shutil.copytree(ROOT / "cascadia_p2p", package, ignore=shutil.ignore_patterns("__pycache__"))
    first = finish(start(home, edited))
    assert first[:2] == (True, 1.0)
    simd = package / "compiled" / "simd.py"
    text = simd.read_text()
    assert text.count("lambda b, a: b.fmul(a[0], a[1])") == 1
    simd.write_text(text.replace("b.fmul(a[0], a[1])", "b.fadd(a[0], a[1])"))
    second = finish(start(home, edited))
    assert second[0] is True
    # 3 + 1/3 in place of 3 * 1/3, then + 1 in place of * 1.
    assert second[1] == pytest.approx(3 + 1 / 3 + 1)
    assert second[2] != first[2]


def test_without_a_writable_cache_kernels_still_compile(home: Path) -> None:
    (home / "cascadia-p2p").write_text("a file where the directory should be")
    assert finish(start(home))[:2] == (True, 1.0)


def test_what_is_said_of_compiling_counts_what_the_cache_lacks(home: Path) -> None:
    def said() -> list[str]:
        out, err = (process := start(home)).communicate(timeout=250)
        assert process.returncode == 0, err
        return re.findall(r"compiling \d+ kernels? .*, about \d+ s", out)

    place = "for this PC's processor"
    assert said() == [f"compiling 3 kernels {place}, about 4 s"]
    assert said() == []
    for file in home.rglob("*_embed-*.nbi"):
        file.unlink()
    assert said() == [f"compiling 1 kernel {place}, about 2 s"]
    assert said() == []


THREADS = """
import threading
from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernels import norms
failures, start = [], threading.Barrier(4)
def load():
    start.wait()
    try:
        compiling.warm_up()
    except Exception as error:
        failures.append(repr(error))
threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
"""


def test_threads_that_load_at_once_do_not_compile_twice(home: Path) -> None:
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
