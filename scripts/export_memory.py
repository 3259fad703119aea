"""Measures the memory that exporting a layer of true width takes: `python scripts/export_memory.py`.

The checkpoint is made of holes: files of their full size and with true headers, in which nearly nothing is
stored, so that it needs no room on the disk, and every byte is read all the same. What is written is left
as holes too where it is zero; `--write` stores it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from cascadia_p2p.compiled.compiling import set_threads
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.quantise import prepare
from cascadia_p2p.models.inkling.names import Spelling, plan_tensors
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards import export as export_module
from cascadia_p2p.shards.export import bytes_in_words, export
from cascadia_p2p.shards.files import WholeFile

FILES = 5
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}

WIDE = Recipe(
    "true width",
    layers=1,
    dense_layers=0,
    hidden=6144,
    heads=64,
    kv_heads=8,
    head_dim=128,
    sliding_heads=64,
    sliding_kv_heads=16,
    sliding_head_dim=128,
    window=512,
    extent=1024,
    d_rel=16,
    experts=256,
    chosen=2,
    expert_width=3072,
    vocab=1024,
    vocab_valid=1000,
)
"""The 975B model's sparse layer; only the vocabulary is small."""


@dataclass(frozen=True)
class Measured:
    """What one export took.

    Args:
        layer: bytes of the exported layer.
        source: bytes of its checkpoint.
        before: bytes that the process had in memory at most before: interpreter, libraries, compiled code.
        peak: the same behind the export.
        seconds: of the export.
    """

    layer: int
    source: int
    before: int
    peak: int
    seconds: float


class HolesFile(WholeFile):
    """Leaves out zeros: reading them back gives the same."""

    def write(self, offset: int, values: npt.NDArray[np.generic]) -> None:
        if values.any():
            super().write(offset, values)


def tensor_table(recipe: Recipe, nvfp4: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor, under the published names."""
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for plan in plan_tensors(recipe.config(), Spelling.A).tensors():
        shape = plan.source_shapes[0]
        if nvfp4 and ".experts." in plan.name:
            table[plan.source] = ("U8", (*shape[:-1], shape[-1] // 2))
            table[f"{plan.source}.scale"] = ("F8_E4M3", (*shape[:-1], shape[-1] // 16))
            table[f"{plan.source}.scale2"] = ("F32", shape[:1])
        else:
            small = plan.name.endswith(("router_bias", "global_scale"))
            table[plan.source] = ("F32" if small else "BF16", shape)
    return table


def make_holes(out: Path, recipe: Recipe, nvfp4: bool) -> Path:
    """Write a checkpoint of true names, types and sizes whose numbers are all zero."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(recipe.config_json(Spelling.A)))
    table = tensor_table(recipe, nvfp4)
    home = {
        name: f"model-{place % FILES + 1:05d}-of-{FILES:05d}.safetensors" for place, name in enumerate(table)
    }
    for file in sorted(set(home.values())):
        write_holes(out / file, {name: table[name] for name in table if home[name] == file})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return out


def write_holes(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file that has a header and no data."""
    header: dict[str, object] = {}
    end = 0
    for name, (kind, shape) in tensors.items():
        start, end = end, end + ITEM_BYTES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def peak_memory() -> int:
    """Bytes that this process had in memory at most."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: there a process starts with the size of the one that started it.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(directory: Path, experts: int, nvfp4: bool) -> Measured:
    """Export a layer of that many experts below a directory."""
    recipe = Recipe(**{**{f: getattr(WIDE, f) for f in Recipe.__slots__}, "experts": experts})
    source = make_holes(directory / "in", recipe, nvfp4)
    set_threads(os.cpu_count() or 1)
    prepare()
    before = peak_memory()
    started = time.perf_counter()
    manifest = export(source, directory / "out", shards=1)
    seconds = time.perf_counter() - started
    layer = manifest.files["shard-00/layer-000.weights"].size
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return Measured(layer, size, before, peak_memory(), seconds)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument(
        "--encoding", default="NVFP4", choices=["NVFP4", "BF16"], help="(default: %(default)s)"
    )
    result.add_argument("--experts", type=int, default=256, metavar="N", help="(default: %(default)s)")
    result.add_argument(
        "--limit-mib",
        type=int,
        default=64,
        metavar="N",
        help="fail when the export takes more (default: %(default)s)",
    )
    result.add_argument("--directory", type=Path, metavar="DIR", help="work below DIR (default: temporary)")
    result.add_argument("--write", action="store_true", help="store zeros too: needs the layer's full size")
    return result


def main() -> int:
    """Measure once, and say whether it stayed below the limit."""
    args = parser().parse_args()
    if not args.write:
        export_module.WholeFile = HolesFile
        # Holes need no room.
        export_module._SPARE_BYTES = -(2**62)
    try:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            found = measure(Path(directory), args.experts, args.encoding == "NVFP4")
    except (CascadiaError, OSError) as error:
        print(f"export_memory: {error}", file=sys.stderr)
        return 1
    taken = found.peak - found.before
    print(
        f"a layer of {args.experts} experts from {args.encoding}, {bytes_in_words(found.layer)} exported: "
        f"{taken / 2**20:.0f} MiB taken (limit {args.limit_mib}), {found.peak / 2**20:.0f} MiB in all, "
        f"{found.seconds:.1f} s, {bytes_in_words(int(found.source / found.seconds))}/s read"
    )
    return 0 if taken <= args.limit_mib * 2**20 else 1


if __name__ == "__main__":
    sys.exit(main())
