"""Makes a small Inkling checkpoint from a seed: `python scripts/make_checkpoint.py OUT --preset tiny66`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.nvfp4 import Naming, Nvfp4
from cascadia_p2p.sample.recipe import PRESETS, Recipe, find_recipe


def parser() -> argparse.ArgumentParser:
    """The command line; each size of the recipe has a flag that overrides the preset's."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    result.add_argument("--preset", default="tiny12", choices=sorted(PRESETS), help="(default: %(default)s)")
    result.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    result.add_argument("--spelling", default="B", choices=["A", "B"], help="A: published, B: transformers")
    result.add_argument("--encoding", default="F32", choices=["F32", "BF16", "F16"])
    result.add_argument("--files", type=int, default=1, metavar="N", help="spread over N indexed files")
    result.add_argument(
        "--nvfp4",
        choices=get_args(Naming),
        help="quantise the experts; the word is that for an expert's own factor in the tensors' names",
    )
    result.add_argument(
        "--two-factors", action="store_true", help="with --nvfp4: one for gate and one for up"
    )
    result.add_argument("--plain-layers", default="", metavar="N,N", help="with --nvfp4: left as they are")
    result.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer.json")
    for field in fields(Recipe):
        flag = f"--{field.name.replace('_', '-')}"
        if field.name == "eos":
            result.add_argument(flag, metavar="ID,ID", help="end-of-sequence ids; '' for none")
        elif field.name != "name":
            number = float if field.type == "float" else int
            result.add_argument(flag, type=number, metavar="X" if number is float else "N")
    return result


def main() -> int:
    """Write the checkpoint that the command line asks for."""
    args = parser().parse_args()
    sizes = {f.name: getattr(args, f.name, None) for f in fields(Recipe)}
    if args.eos is not None:
        sizes["eos"] = tuple(int(number) for number in args.eos.split(",") if number)
    recipe = replace(
        find_recipe(args.preset), **{name: value for name, value in sizes.items() if value is not None}
    )
    plain = tuple(int(layer) for layer in args.plain_layers.split(",") if layer)
    try:
        make_checkpoint(
            args.out,
            recipe,
            seed=args.seed,
            spelling=args.spelling,
            encoding=args.encoding,
            files=args.files,
            tokenizer=not args.no_tokenizer,
            nvfp4=args.nvfp4 and Nvfp4(args.nvfp4, args.two_factors, plain),
        )
    except (CascadiaError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
