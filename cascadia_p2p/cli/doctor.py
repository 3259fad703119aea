"""`doctor`: look at this PC, its network and its fleet, and say what to do."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator

import orjson
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from cascadia_p2p import __version__
from cascadia_p2p.cli.join import FLAGS, loop_factory
from cascadia_p2p.config import Config, add_flags, flags_of, load_config
from cascadia_p2p.doctor.examine import Group, examine
from cascadia_p2p.doctor.finding import Finding, Level, worst
from cascadia_p2p.doctor.host import Host
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.shards.reader import VerifyProgress

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.epilog = "Exit code: 0 when all is well or only warned of, 1 when something fails."
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="with --model: look at sizes of files, not at their contents"
    )
    parser.add_argument(
        "--only",
        choices=[group.value for group in Group],
        action="append",
        help="examine only this; may be repeated (default: everything)",
    )
    # Those of `join`, so that what is examined is what would be started.
    add_flags(parser, *FLAGS)


def run(args: argparse.Namespace) -> int:
    """Examine and print; 1 when something fails."""
    config = load_config(flags_of(args), file=args.config)
    configure_logs(
        config.log_format, "error" if config.source("log_level") == "default" else config.log_level
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        groups = [Group(name) for name in args.only or Group]
        findings = runner.run(_examine(config, groups, as_json=args.json, contents=not args.quick))
    level = worst(findings)
    if args.json:
        _print_json(findings, level)
    else:
        print(_summary(findings, level))
    return 1 if level is Level.FAIL else 0


async def _examine(config: Config, groups: list[Group], *, as_json: bool, contents: bool) -> list[Finding]:
    console = Console(highlight=False)
    findings: list[Finding] = []
    with _bar() as tell:
        async for finding in examine(config, Host(), groups=groups, contents=contents, progress=tell):
            findings.append(finding)
            if not as_json:
                _show(console, finding)
    return findings


def _show(console: Console, finding: Finding) -> None:
    line = Text.assemble(
        (f"{finding.level.value:<5}", _COLOURS[finding.level]), f"{finding.check:<13}", finding.message
    )
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(Text(f"     {'':<13}-> {finding.advice}"), soft_wrap=True)


def _summary(findings: list[Finding], level: Level) -> str:
    counts = {each: sum(finding.level is each for finding in findings) for each in Level}
    words = {
        Level.OK: "all is well",
        Level.WARN: "it works, but could be better",
        Level.FAIL: "a node would not work as asked for",
    }
    return f"{counts[Level.OK]} ok, {counts[Level.WARN]} warn, {counts[Level.FAIL]} fail: {words[level]}"


def _print_json(findings: list[Finding], level: Level) -> None:
    body = {
        "version": __version__,
        "level": level.value,
        "findings": [finding.as_json() for finding in findings],
    }
    sys.stdout.buffer.write(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[VerifyProgress], None]]:
    """A progress bar on stderr that appears once files are being read."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = None

    def tell(step: VerifyProgress) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task("reading", total=step.total)
        bar.update(task, description=step.file, completed=step.done, total=step.total)

    try:
        yield tell
    finally:
        if task is not None:
            bar.stop()
