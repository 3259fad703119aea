"""The commands: one file each, joined here under one parser, one error rule and one table of exit codes.

Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 failure, 2 usage, 3 port, 4 not enough
memory or no plan, 5 version or model mismatch, 6 unreachable, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from cascadia_p2p import __version__
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.logs import configure_logs

__all__ = ["main"]

COMMANDS: Final = {
    "pull": "download a small model that is ready to be exported",
    "export": "turn a checkpoint into shards, one directory for each PC",
    "keygen": "make the fleet's key, issue keys to clients and withdraw them",
    "join": "make this PC a node of the fleet",
    "generate": "send one prompt and print the answer",
    "chat": "talk with the model in a terminal",
    "status": "show the ring, its nodes and what is missing",
    "profile": "measure how fast this PC computes its shard",
    "plan": "say which PC takes which layers, what that needs, and how fast it will be",
    "simulate": "run the scheduler on a fleet of which only times are known",
    "doctor": "look at this PC, its network and its fleet, and say what to do",
    "bench": "measure how fast the ring serves many streams at once",
    "demo": "run a whole ring on this machine and ask it one question",
}
"""Name and one line of help; each is the module of that name with `configure(parser)` and `run(args)`."""

INTERRUPTED: Final = 130

_NO_ROOM: Final = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Why output may not be taken, through no fault of the program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for what a user can cause."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parsed(arguments)
        # Commands that have more to tell than errors say so themselves.
        configure_logs("console", "error")
        code: int = importlib.import_module(f"cascadia_p2p.cli.{args.command}").run(args)
        # What is only written while the interpreter shuts down can not fail in words.
        sys.stdout.flush()
    except CascadiaError as error:
        print(f"cascadia-p2p: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _write_no_more()
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        _write_no_more()
        print(f"cascadia-p2p: the output can not be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _write_no_more() -> None:
    """Nobody takes our output; nothing may be written while the interpreter shuts down either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The arguments' values; where one is wrong, usage and exit code 2."""
    parser, commands = _parsers(arguments)
    args, strange = parser.parse_known_args(arguments)
    if strange:
        command = commands[args.command]
        flags = [flag for flag in command._option_string_actions if flag.startswith("--")]
        near = [
            each for word in strange if word.startswith("-") for each in get_close_matches(word, flags, 1)
        ]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        command.error(f"unrecognized arguments: {' '.join(strange)}{hint}")
    return args


def _parsers(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands, and theirs; only the one that is asked for is imported: help is instant."""
    parser = argparse.ArgumentParser(
        prog="cascadia-p2p",
        description="Pool the PCs of one LAN into a ring that runs a language model too large for any one.",
        epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 port, 4 memory or plan, 5 mismatch, 6 unreachable, "
        "130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"cascadia-p2p {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, words in COMMANDS.items():
        parsers[name] = command = commands.add_parser(
            name, help=words, description=words[0].upper() + words[1:] + "."
        )
        if name == asked:
            importlib.import_module(f"cascadia_p2p.cli.{name}").configure(command)
    return parser, parsers
