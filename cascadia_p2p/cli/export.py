"""The command `export`: a checkpoint becomes shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cascadia_p2p.shards.encodings import Encodings, parse_encoding
from cascadia_p2p.shards.export import Progress as Step
from cascadia_p2p.shards.export import bytes_in_words, export
from cascadia_p2p.shards.manifest import MANIFEST, Manifest
from cascadia_p2p.shards.split import parse_split, spell_split


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.epilog = (
        "Splits a checkpoint into shards of consecutive layers, one directory each. Run again after an "
        "interruption, it goes on where it stopped."
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="directory with config.json and safetensors"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write the shards to")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--shards", type=int, metavar="N", help="N shards, of sizes as even as possible")
    how.add_argument("--split", metavar="A,B,...", help="layers of each shard, as in 6,6,4")
    for part, what in (
        ("experts", "experts and dense MLPs"),
        ("projections", "attention projections"),
        ("head", "the vocabulary head"),
    ):
        parser.add_argument(
            f"--{part}",
            default="f32",
            metavar="ENCODING",
            help=f"stored form of {what} (default: %(default)s)",
        )


def run(args: argparse.Namespace) -> int:
    """Export; the manifest's path goes to stdout, everything else to stderr.

    Raises:
        CascadiaError: as `shards.export.export`.
    """
    console = Console(stderr=True)
    split = None if args.split is None else parse_split(args.split)
    encodings = Encodings(
        experts=parse_encoding("--experts", args.experts),
        projections=parse_encoding("--projections", args.projections),
        head=parse_encoding("--head", args.head),
    )
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    try:
        with bar:
            task = bar.add_task("reading the checkpoint", total=None)

            def step(now: Step) -> None:
                bar.update(task, description=now.file, completed=now.done, total=now.total)

            def note(sentence: str) -> None:
                console.print(sentence, markup=False, highlight=False, soft_wrap=True)

            manifest = export(
                args.checkpoint,
                args.out,
                shards=args.shards,
                split=split,
                encodings=encodings,
                progress=step,
                note=note,
            )
    except KeyboardInterrupt:
        console.print("stopped: run the same command again, it goes on where it stopped", soft_wrap=True)
        return 130
    console.print(_summary(manifest, args.out), markup=False, highlight=False, soft_wrap=True)
    print(args.out / MANIFEST)
    return 0


def _summary(manifest: Manifest, out: Path) -> str:
    total = bytes_in_words(sum(entry.size for entry in manifest.files.values()))
    layers = f"{manifest.layers} layers in {manifest.shards} shards of {spell_split(tuple(manifest.split))}"
    return (
        f"{layers}; {total}. Copy one directory of {out} to each PC and run there: "
        "cascadia-p2p join --model DIRECTORY"
    )
