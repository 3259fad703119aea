"""`plan`: say which PC takes which layers, what that needs, and how fast it will be."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import psutil

from cascadia_p2p.catalog import KNOWN, source_path
from cascadia_p2p.cli.plan_text import enough, show
from cascadia_p2p.config import Config, add_flags, flags_of, load_config
from cascadia_p2p.engine.footprint import Backend, Footprint, stored_forms
from cascadia_p2p.engine.memory import RESERVE
from cascadia_p2p.errors import CapacityError, CheckpointError, UsageError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.family import ModelConfig, read_config
from cascadia_p2p.models.layout import TensorRole
from cascadia_p2p.models.sizes import ModelSizes
from cascadia_p2p.models.sizing import model_sizes
from cascadia_p2p.planning.machine import (
    LEFT_TO_SYSTEM,
    GpuMemory,
    Machine,
    gib,
    make_machine,
    parse_amount,
    parse_memory,
)
from cascadia_p2p.planning.measured import MeasuredNode, read_measured, told_apart
from cascadia_p2p.planning.needs import Demand, Needs
from cascadia_p2p.planning.plan import Question, make_plan
from cascadia_p2p.planning.report import as_json
from cascadia_p2p.planning.split import Split, fewest_stages
from cascadia_p2p.shards.encodings import DEFAULT, MATRICES
from cascadia_p2p.shards.manifest import MANIFEST, Manifest
from cascadia_p2p.shards.opening import open_source
from cascadia_p2p.shards.reader import ShardReader, held_shards
from cascadia_p2p.shards.safetensors import read_json_object
from cascadia_p2p.types import Promise

_CONFIG: Final = "config.json"
_MOST_NODES: Final = 4096
_ROLES: Final = {
    "experts": TensorRole.EXPERTS,
    "projections": TensorRole.PROJECTIONS,
    "head": TensorRole.HEAD,
    "embedding": TensorRole.EMBEDDING,
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned for: a model, how its parts are stored, and the split if it is exported already."""

    config: ModelConfig
    forms: Mapping[str, Encoding]
    split: Split | None = None


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.epilog = (
        "Memory: 64GB means a PC as sold, which shows its system about 61 GiB; 61GiB means what the system "
        "shows. Bytes of weights follow the backend's own rules. With one --profile a node (or one for all) "
        "speed is predicted, too."
    )
    parser.add_argument(
        "source",
        metavar="CONFIG",
        help="directory of a checkpoint or of an export, a config.json or manifest.json alone, a .gguf file, "
        "or a name that 'pull' knows",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="PCs (default: the fewest that suffice)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="of each PC: 64GB as sold, 61GiB as shown (default: like this one)"
    )
    parser.add_argument(
        "--leave", metavar="SIZE", help=f"left to the system (default: {gib(LEFT_TO_SYSTEM)})"
    )
    parser.add_argument(
        "--gpu-memory",
        choices=[each.value for each in GpuMemory],
        default=GpuMemory.LIFTED.value,
        help="what a GPU may take: shipped is half, lifted all but 8 GiB (default: lifted)",
    )
    parser.add_argument(
        "--backend",
        choices=("kernels", "openvino"),
        help="who multiplies (default: kernels on the CPU, openvino elsewhere)",
    )
    for part in ("experts", "projections", "head"):
        parser.add_argument(
            f"--{part}",
            choices=[each.value for each in MATRICES if isinstance(each, Encoding)],
            help=f"form of the {part} (default: {DEFAULT.of(_ROLES[part])}, or the export's or GGUF file's)",
        )
    parser.add_argument("--streams", type=int, metavar="N", help="to be fast for (default: all slots)")
    parser.add_argument(
        "--profile", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help="measured nodes"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_flags(parser, "device", "cache", "context", "slots", "prefixes", "rows")


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it.

    Raises:
        CapacityError: no plan fits; what is printed before holds the details.
        CascadiaError: a flag is wrong, or a file can not be read.
    """
    config = load_config(flags_of(args), file=args.config)
    subject = read_subject(source_path(args.source, lambda note: print(note, file=sys.stderr)))
    footprint = _footprint(args, config, subject)
    sizes = model_sizes(subject.config)
    promise = Promise(config.slots, min(config.context, sizes.context), config.rows, config.prefixes)
    measured = _measured(args)
    demand = Demand(promise, footprint, reserve=max([RESERVE, *(each.overhead_bytes for each in measured)]))
    streams = promise.slots if args.streams is None else args.streams
    if not 1 <= streams <= promise.slots:
        raise UsageError(f"--streams is {streams}: expected 1 to {promise.slots}, the slots")
    machines = _machines(args, footprint.backend, measured, sizes, demand, subject.split)
    question = Question(sizes, demand, machines, tuple(measured), streams, subject.split)
    plan = make_plan(question)
    if args.json:
        sys.stdout.buffer.write(
            orjson.dumps(as_json(plan), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        sys.stdout.flush()
    else:
        show(plan, args.memory)
    if not plan.fits:
        raise CapacityError("; ".join([plan.problem, *plan.advice, *enough(plan)]))
    return 0


# --- what is asked ------------------------------------------------------------------------------------------


def read_subject(source: Path) -> Subject:
    """The model at a path: a checkpoint, an export, a config or manifest alone, or a GGUF file.

    Raises:
        UsageError: there is none.
        CheckpointError: it can not be read.
    """
    if source.suffix == ".gguf" and source.is_file():
        return _unexported(source)
    path = source
    if source.is_dir():
        path = next((source / name for name in (MANIFEST, _CONFIG) if (source / name).is_file()), source)
        if path is source and any(source.glob("*.gguf")):
            return _unexported(source)
    if not path.is_file():
        raise UsageError(
            f"{source} is no model: give the directory of a checkpoint or of an export, its {_CONFIG} or "
            f"{MANIFEST} alone, a .gguf file, or one of the names {', '.join(KNOWN)}"
        )
    content = read_json_object(path)
    if "format" in content and "split" in content:
        manifest = Manifest.load(path.parent)
        return Subject(
            manifest.model_config_of(), _exported_forms(path.parent, manifest), tuple(manifest.split)
        )
    generation = path.parent / "generation_config.json"
    try:
        _, config = read_config(content, read_json_object(generation) if generation.is_file() else None)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Subject(config, {part: DEFAULT.of(role) for part, role in _ROLES.items()})


def _unexported(source: Path) -> Subject:
    """A GGUF file, in the forms that it would be exported to."""
    with open_source(source) as checkpoint:
        model = checkpoint.model()
        counts: dict[str, Counter[Encoding]] = {part: Counter() for part in _ROLES}
        for tensor in model.layout.tensors():
            for part, role in _ROLES.items():
                if tensor.role is role or (part == "experts" and tensor.role is TensorRole.DENSE):
                    form = checkpoint.form(tensor.source)
                    encoding = checkpoint.encodings.of(tensor.role, form.kind, form.bits)
                    counts[part][encoding] += math.prod(tensor.shape)
        usual = {part: checkpoint.encodings.of(role) for part, role in _ROLES.items()}
    found = {part: max(count, key=count.__getitem__) for part, count in counts.items() if count}
    return Subject(model.config, usual | found)


def _exported_forms(directory: Path, manifest: Manifest) -> dict[str, Encoding]:
    """How an export stores its parts: as the shards here say, or else as most of each is."""
    asked = {part: manifest.stored.of(role) for part, role in _ROLES.items()}
    for shard in held_shards(directory):
        asked |= stored_forms(ShardReader(directory, shard))
    return asked


def _footprint(args: argparse.Namespace, config: Config, subject: Subject) -> Footprint:
    on_cpu = config.device == "CPU"
    backend = args.backend or ("kernels" if on_cpu else "openvino")
    if backend == "kernels" and not on_cpu:
        raise UsageError(
            f"--backend kernels computes on the CPU, not on {config.device}: leave one of them out"
        )
    if not on_cpu and not config.device.startswith("GPU"):
        raise UsageError(
            f"--device {config.device}: what weights take there is not known; plan for CPU or GPU"
        )
    chosen = {
        "kernels": Backend.KERNELS,
        "openvino": Backend.OPENVINO_CPU if on_cpu else Backend.OPENVINO_GPU,
    }[backend]
    forms = dict(subject.forms)
    for part in ("experts", "projections", "head"):
        asked: str | None = getattr(args, part)
        if asked is None:
            continue
        if subject.split is not None and asked != forms[part].value:
            raise UsageError(
                f"--{part} {asked}: this export has {forms[part]}; plan for the checkpoint instead"
            )
        forms[part] = Encoding(asked)
    return Footprint(
        chosen,
        forms["experts"],
        forms["projections"],
        forms["head"],
        forms["embedding"],
        cache=Encoding(config.cache),
    )


def _measured(args: argparse.Namespace) -> list[MeasuredNode]:
    found: list[MeasuredNode] = []
    for path in args.profile:
        try:
            found += read_measured(path.read_bytes(), str(path))
        except OSError as error:
            raise UsageError(f"--profile {path} can not be read: {error.strerror}") from None
    if len(found) == 1 and args.nodes:
        found *= args.nodes
    if found and args.nodes not in (None, len(found)):
        raise UsageError(
            f"--nodes is {args.nodes} and --profile gives {len(found)}: give one profile for each node, "
            "or one for all"
        )
    return told_apart(found)


def _machines(
    args: argparse.Namespace,
    backend: Backend,
    measured: Sequence[MeasuredNode],
    sizes: ModelSizes,
    demand: Demand,
    split: Split | None,
) -> tuple[Machine, ...]:
    left = LEFT_TO_SYSTEM if args.leave is None else parse_amount("--leave", args.leave)
    gpu = GpuMemory(args.gpu_memory)
    shown = psutil.virtual_memory().total if args.memory is None else parse_memory("--memory", args.memory)
    if args.nodes is not None and not 1 <= args.nodes <= _MOST_NODES:
        raise UsageError(f"--nodes is {args.nodes}: expected 1 to {_MOST_NODES}")
    if measured:
        return tuple(_measured_machine(node, shown, left, backend, gpu) for node in measured)
    count = args.nodes
    if count is None:
        one = make_machine("any", shown, left, backend, gpu)
        fewest = fewest_stages(Needs(sizes, demand).lack(one) <= 0)
        count = len(split) if split is not None else fewest or 1
    return tuple(make_machine(f"node {index}", shown, left, backend, gpu) for index in range(count))


def _measured_machine(node: MeasuredNode, shown: int, left: int, backend: Backend, gpu: GpuMemory) -> Machine:
    made = make_machine(node.name, node.memory_shown or shown, left, backend, gpu)
    usable = made.usable if node.memory_usable is None else node.memory_usable
    limit = made.gpu if node.gpu_limit is None or made.gpu is None else node.gpu_limit
    return Machine(made.name, made.shown, usable, limit)
