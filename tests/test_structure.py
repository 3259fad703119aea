"""The house rules that a reader relies on: who may import whom, and what is never imported at all."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cascadia_p2p"

FORBIDDEN = {
    "wire": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr"},
    "ring": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr"},
    "text": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr"},
    "engine": {"zmq", "zeroconf", "asyncio", "ifaddr"},
    "compiled": {"zmq", "zeroconf", "asyncio", "ifaddr", "openvino"},
    "matrices": {"zmq", "zeroconf", "asyncio", "ifaddr", "openvino"},
    "models": {"zmq", "zeroconf", "asyncio", "ifaddr"},
    "shards": {"zmq", "zeroconf", "asyncio", "ifaddr", "openvino"},
    "transport": {"zeroconf", "openvino", "numba", "ifaddr"},
    "discovery": {"zmq", "openvino", "numba"},
    "planning": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr", "psutil", "pathlib"},
    "simulate": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr", "psutil", "time"},
    "workload": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr", "psutil", "pathlib", "time"},
    "keys": {"zmq", "zeroconf", "openvino", "numba", "asyncio", "ifaddr"},
}
"""Libraries that a package must not know."""

ALLOWED = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors", "types"},
    "identity": {"errors", "types"},
    "logs": {"errors", "types", "config"},
    "wire": {"errors", "types"},
    "ring": {"errors", "types", "wire"},
    "text": {"errors", "types"},
    "compiled": {"errors", "types"},
    "matrices": {"errors", "types", "compiled"},
    "shards": {"errors", "types", "models", "matrices", "text"},
    "models": {"errors", "types", "engine", "shards", "matrices"},
    "engine": {"errors", "types", "wire", "models", "shards", "compiled", "matrices"},
    "transport": {"errors", "types", "wire"},
    "keys": {"errors", "types", "transport"},
    "discovery": {"errors", "types", "wire"},
    "catalog": {"errors", "types"},
    "asking": {"errors", "types", "wire"},
    "client": {"errors", "types", "wire", "transport", "discovery", "keys", "asking"},
    "planning": {"errors", "types", "models", "engine", "matrices"},
    "doctor": {
        *("errors", "types", "config", "wire", "models", "shards", "engine", "transport", "discovery"),
        *("planning", "node", "compiled", "matrices", "keys"),
    },
    "sample": {"errors", "types", "models"},
    "local": {"errors", "types"},
    "bench": {
        *("errors", "types", "wire", "client", "node", "local", "simulate", "workload"),
        *("models", "matrices", "shards", "planning", "transport"),
    },
    "workload": {"errors"},
    "simulate": {"errors", "types", "wire", "ring", "planning", "models", "engine", "workload"},
}
"""Our own packages that a package may import, beside itself; `node` and `cli` see everything."""


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere in it."""
    names: set[str] = set()
    for found in ast.walk(tree_of(path)):
        if isinstance(found, ast.Import):
            names |= {alias.name for alias in found.names}
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, f"{path}: relative import"
            names |= {f"{found.module}.{alias.name}" for alias in found.names}
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = imports(path)
    libraries = {name.split(".")[0] for name in names}
    assert not libraries & FORBIDDEN.get(room, set())
    assert not libraries & {"pickle", "marshal", "shelve", "dill"}, "STK-11: nothing that runs what it reads"
    forks = {"multiprocessing", "concurrent.futures.ProcessPoolExecutor", "os.fork", "pty"}
    assert not {name for name in names if name in forks or name.startswith("multiprocessing.")}, "STK-09"
    if "zmq" in libraries:
        assert room == "transport", "only transport knows ZeroMQ"
    if room in ALLOWED:
        rooms = {name.split(".")[1] for name in names if name.startswith("cascadia_p2p.")}
        assert rooms <= ALLOWED[room] | {room, "__version__"}


WALL_CLOCKS = {
    "discovery/discovery.py": {"time.time"},
    "text/template.py": {"datetime.now"},
    "cli/bench.py": {"datetime.now"},
}
"""Who reads the time of day: to notice that this PC slept, to print a date, to date a report."""


def test_cas_22_nobody_else_reads_the_time_of_day() -> None:
    """Those of two machines may differ by days."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}:
                    found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
    assert found == WALL_CLOCKS


def test_ci_runs_the_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    command = next(line for line in ci.splitlines() if line.endswith("-m pytest"))
    assert command in readme.splitlines()


def test_files_and_functions_stay_readable() -> None:
    long: list[str] = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 600:
            long.append(f"{path.name}: {text.count(chr(10))} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                # A compiled kernel is one loop nest; cutting it up would only hide what it does.
                if lines > (80 if {"kernels", "compiled", "matrices"} & set(path.parts) else 60):
                    long.append(f"{path.name}:{node.name}: {lines} lines")
    assert not long
