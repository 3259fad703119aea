"""The command `export`: a checkpoint becomes shards."""

from __future__ import annotations

import argparse
import difflib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cascadia_p2p.catalog import KNOWN, source_path
from cascadia_p2p.compiled.compiling import set_threads
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.keys.places import FLEET_KEY, find_key_to_lay, fleet_key_path, lay_key, make_fleet_key
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.shards.attenuation import parse_attenuation
from cascadia_p2p.shards.encodings import (
    DEFAULT,
    EMBEDDING,
    MATRICES,
    Asked,
    Choice,
    Encodings,
    parse_encoding,
)
from cascadia_p2p.shards.export import Progress as Step
from cascadia_p2p.shards.export import bytes_in_words, export, needed_files
from cascadia_p2p.shards.manifest import MANIFEST, Manifest, shard_directory
from cascadia_p2p.shards.split import choose_shards, parse_shards, parse_split, spell_split

SAY_EVERY_S = 30.0
"""Between two lines on progress where there is no terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.epilog = (
        "Splits a checkpoint into shards of consecutive layers, one directory each. Run again after an "
        "interruption, it goes on where it stopped. A PC may export only the shards that it will hold "
        "(--only-shards): it then needs config, tokenizer and index of the checkpoint, and the files that "
        "--list-files names."
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="directory with config.json and safetensors, a .gguf file, or a name that 'pull' knows",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write the shards to")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--shards", type=int, metavar="N", help="N shards, of sizes as even as possible")
    how.add_argument("--split", metavar="A,B,...", help="layers of each shard, as in 6,6,4")
    parser.add_argument(
        "--only-shards", metavar="I,J,...", help="only these shards, counted from 0 (default: all)"
    )
    parser.add_argument(
        "--list-files", action="store_true", help="print the files of CHECKPOINT that are needed, and stop"
    )
    parser.add_argument(
        "--attenuate",
        metavar="LAYER=N,...",
        help="where results may pass FP16's range, compute a layer's MLP at 2^-N on devices that compute in "
        "FP16; exact (default: estimated from the weights)",
    )
    parser.add_argument(
        "--fleet",
        default="cascadia",
        metavar="NAME",
        help="the fleet whose key is laid beside the shards (default: cascadia)",
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="that key (default: the user's own, made on first use)"
    )
    parser.add_argument(
        "--no-key", action="store_true", help="lay no key: copying a shard then admits no PC to the fleet"
    )
    add_encodings(parser)


def add_encodings(parser: argparse.ArgumentParser) -> None:
    """Give a command the flags on stored forms."""
    group = parser.add_argument_group(
        "stored forms",
        "int4: 4-bit codes, one scale for 32 inputs. int8: 8-bit codes, one scale an output. int8g32: 8-bit "
        "codes, one scale for 32 inputs. f32: exact, as transformers computes. keep, the default for GGUF "
        "files: Q4_0, Q4_1, Q5_0 and Q8_0 without loss, other quantised forms of more than 5 bits a weight "
        "as int8g32, all else as if nothing was said.",
    )
    for part, what, allowed in (
        ("experts", "experts and dense MLPs", MATRICES),
        ("projections", "attention projections", MATRICES),
        ("head", "the vocabulary head", MATRICES),
        ("embedding", "the embedding; keep: bf16 where the file has bf16, else f32", EMBEDDING),
    ):
        usual = DEFAULT.model_dump(mode="json")[part]
        group.add_argument(
            f"--{part}",
            metavar="FORM",
            help=f"{what}: {', '.join(allowed)} (default: {usual}; of GGUF files keep)",
        )


def asked_encodings(args: argparse.Namespace) -> Asked:
    """What the flags ask for.

    Raises:
        UsageError: a form that is not possible.
    """
    found: dict[str, Choice] = {}
    for part in Encodings.model_fields:
        text = getattr(args, part)
        if text is not None:
            found[part] = parse_encoding(f"--{part}", text, EMBEDDING if part == "embedding" else MATRICES)
    return cast("Asked", found)


def run(args: argparse.Namespace) -> int:
    """Export, or list files; the manifest's path or the list goes to stdout, everything else to stderr.

    Raises:
        UsageError: a flag is wrong, or there is no such checkpoint.
        CascadiaError: as `shards.export.export`.
    """
    configure_logs("console", "info")
    split = None if args.split is None else parse_split(args.split)
    asked = asked_encodings(args)
    attenuation = None if args.attenuate is None else parse_attenuation(args.attenuate)
    only = None if args.only_shards is None else parse_shards(args.only_shards)
    if args.list_files:
        for file in needed_files(_source(args.checkpoint), shards=args.shards, split=split, only=only):
            print(file)
        return 0
    return _export(args, split, only, asked, attenuation)


def _export(
    args: argparse.Namespace,
    split: tuple[int, ...] | None,
    only: tuple[int, ...] | None,
    asked: Asked,
    attenuation: dict[int, int] | None,
) -> int:
    set_threads(os.cpu_count() or 1)
    console = Console(stderr=True)
    key = _find_key(args)
    try:
        with _Teller(console) as teller:
            manifest = export(
                _source(args.checkpoint, teller.note),
                args.out,
                shards=args.shards,
                split=split,
                only=only,
                encodings=asked,
                attenuation=attenuation,
                progress=teller.step,
                note=teller.note,
            )
    except KeyboardInterrupt:
        console.print("stopped: run the same command again, it goes on where it stopped", soft_wrap=True)
        return 130
    console.print(_summary(manifest, args.out, only), markup=False, highlight=False, soft_wrap=True)
    console.print(_lay_key(args, key, manifest, only), markup=False, highlight=False, soft_wrap=True)
    print(args.out / MANIFEST)
    return 0


def _source(text: str, note: Callable[[str], None] | None = None) -> Path:
    """The checkpoint that the user means, pulled if needed.

    Raises:
        UsageError: there is none, here or by that name.
    """
    path = source_path(text, note)
    if path.exists():
        return path
    near = difflib.get_close_matches(text, KNOWN, n=1)
    raise UsageError(
        f"{path} does not exist: expected the directory of a checkpoint, with its config.json, a .gguf file, "
        f"or a name that 'cascadia-p2p pull' knows: {', '.join(KNOWN)}"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _find_key(args: argparse.Namespace) -> KeyFile | None:
    """The key to lay, judged before hours of work; None when there is none, or none is to be laid."""
    if args.no_key:
        if args.key is not None:
            raise UsageError("--no-key and --key exclude each other: give one of them")
        return None
    return find_key_to_lay(args.fleet, key=args.key, out=args.out)


def _lay_key(
    args: argparse.Namespace, found: KeyFile | None, manifest: Manifest, only: Sequence[int] | None
) -> str:
    """Lay the key beside the shards, making one on first use; what was done, in a sentence."""
    without = (
        f"no key was laid beside the shards: nodes need the fleet's own as {FLEET_KEY} beside theirs, see "
        "'cascadia-p2p keygen'"
    )
    key, made = found, ""
    # Who exports parts on several PCs would make a key on each.
    if key is None and not args.no_key and only is None:
        try:
            key = make_fleet_key(args.fleet, fleet_key_path(args.fleet))
        except CascadiaError as error:
            return f"{without}; {error}"
        made = f"made {key.path}; "
    if key is None:
        return without
    shards = choose_shards(only, manifest.shards)
    lay_key(key, args.out, [args.out / shard_directory(shard) for shard in shards])
    return (
        f"{made}the fleet's key (fingerprint {key.print}) lies in each shard's directory: copying one to "
        "a PC also admits that PC, so mind who gets it"
    )


class _Teller:
    """Shows how far the export is and how long is left: a bar at a terminal, elsewhere a line at times."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # Where there is no terminal, all that is seen of a bar is an empty line at its end.
            disable=not console.is_interactive,
        )
        self._task = self._bar.add_task("reading the checkpoint", total=None)
        self._told_at: float | None = None

    def step(self, now: Step) -> None:
        """Something was written."""
        # Speed and time left are counted from the first step on: what an earlier run wrote took no time.
        tell = self._bar.reset if self._told_at is None else self._bar.update
        tell(self._task, description=now.file, completed=now.done, total=now.total)
        if self._told_at is None:
            self._told_at = time.monotonic()
        elif not self._console.is_terminal and time.monotonic() - self._told_at >= SAY_EVERY_S:
            self._told_at = time.monotonic()
            task = self._bar.tasks[0]
            self.note(
                f"{now.file}: {bytes_in_words(now.done)} of {bytes_in_words(now.total)}, "
                f"{bytes_in_words(int(task.speed or 0.0))}/s, {_time_in_words(task.time_remaining)} left"
            )

    def note(self, sentence: str) -> None:
        """Say a sentence."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _time_in_words(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"about {minutes} min" if minutes < 60 else f"about {minutes // 60} h {minutes % 60} min"


def _summary(manifest: Manifest, out: Path, only: Sequence[int] | None) -> str:
    shards = choose_shards(only, manifest.shards)
    size = bytes_in_words(
        sum(manifest.entry(i, name).size for i in shards for name in manifest.expected_files(i))
    )
    if only is None:
        layers = (
            f"{manifest.layers} layers in {manifest.shards} shards of {spell_split(tuple(manifest.split))}"
        )
        return (
            f"{layers}; {size}. Copy one directory of {out} to each PC and run there: "
            "cascadia-p2p join --model DIRECTORY"
        )
    parts = ", ".join(
        f"shard {shard} of {manifest.shards} with {_layers(manifest.layers_of(shard))}" for shard in shards
    )
    return f"{parts}; {size}. Run on this PC: cascadia-p2p join --model {out}"


def _layers(layers: range) -> str:
    return f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
