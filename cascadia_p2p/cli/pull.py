"""The command `pull`: a model that can be downloaded comes into the user's cache."""

from __future__ import annotations

import argparse

from rich.console import Console

from cascadia_p2p.catalog import KNOWN, find_known, pull


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its argument."""
    known = "; ".join(f"{model.name}: {model.words}" for model in KNOWN.values())
    parser.epilog = f"Known models: {known}. Its name is also a source for 'export'."
    parser.add_argument("name", metavar="NAME", help=f"which model: {', '.join(KNOWN)}")


def run(args: argparse.Namespace) -> int:
    """Pull; the file's path goes to stdout, everything else to stderr.

    Raises:
        CascadiaError: as `catalog.pull`.
    """
    console = Console(stderr=True)

    def note(sentence: str) -> None:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    print(pull(find_known(args.name), note))
    return 0
