"""Fuzzes every decoder of what comes from outside, and the state behind it.

    python scripts/fuzz.py --seconds 60 --json docs/measurements/fuzz.json
    python scripts/fuzz.py --list
    python scripts/fuzz.py --seconds 600 --target frame --corpus corpus

With the extra `fuzz` (atheris) inputs are led by coverage; without, they are random changes of what real
encoders made. A target holds its decoder to four promises: only declared errors leave it; memory and CPU time
stay bounded by the input's size, whatever numbers it claims; what was taken comes back the same through the
encoder. Faults are printed with the input that showed them, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import pkgutil
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from fuzzing.driving import bound_memory, drive, has_atheris, run_child

from cascadia_p2p import matrices


def main() -> int:
    """Fuzz one target after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description="Fuzz every decoder.")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target (10)")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--corpus", type=Path, help="directory to keep what reached something new in")
    parser.add_argument("--json", type=Path, help="file to keep the results in, each target's last")
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(args.child, args.seconds, args.corpus)
    from fuzzing.targets import TARGETS

    if args.list:
        print("\n".join(TARGETS))
        return 0
    names = args.target or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}: --list prints them")
    results = []
    for name in names:
        results.append(drive(Path(__file__).resolve(), name, args.seconds, args.corpus))
        print(_line(results[-1]), flush=True)
        if args.json is not None:
            _keep(args.json, results[-1])
    inputs, faults = sum(each["inputs"] for each in results), sum(len(each["faults"]) for each in results)
    print(f"{inputs} inputs, {faults} faults")
    return 1 if faults else 0


def _keep(file: Path, result: dict[str, Any]) -> None:
    """Write a target's result among those of the others that the file has."""
    kept = json.loads(file.read_text())["targets"] if file.exists() else []
    targets = [each for each in kept if each["target"] != result["target"]]
    targets.append(result | {"python": platform.python_version(), "led_by_coverage": has_atheris()})
    summary = {
        "inputs": sum(each["inputs"] for each in targets),
        "faults": sum(len(each["faults"]) for each in targets),
        "targets": sorted(targets, key=lambda each: str(each["target"])),
    }
    file.write_text(json.dumps(summary, indent=1) + "\n")


def _child(name: str, seconds: float, corpus: Path | None) -> None:
    with contextlib.ExitStack() as stack:
        if has_atheris():
            import atheris

            # What numba compiles for the seeds must stay as it is written.
            for module in pkgutil.iter_modules(matrices.__path__, "cascadia_p2p.matrices."):
                importlib.import_module(module.name)
            stack.enter_context(atheris.instrument_imports(include=["cascadia_p2p"]))
        from fuzzing.file_targets import scratch
        from fuzzing.targets import TARGETS

        from cascadia_p2p.logs import configure_logs
    configure_logs("json", "error", io.StringIO())
    try:
        run_child(TARGETS[name], seconds, corpus, bound_memory)
    finally:
        shutil.rmtree(scratch(), ignore_errors=True)


def _line(result: dict[str, Any]) -> str:
    reached = "" if result["coverage"] is None else f", coverage {result['coverage']}"
    words = f"{result['target']:14} {result['inputs']:9} inputs, {result['refused']:9} refused{reached}"
    for fault in result["faults"]:
        words += f"\n  FAULT {fault['kind']}\n    input {fault['input'][:400]}"
        words += f"\n    {fault['trace'].strip()[-600:]}"
    return words


if __name__ == "__main__":
    sys.exit(main())
