"""`bench`: how fast a ring serves many streams at once, measured as the published curve was."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import orjson
from pydantic import JsonValue
from rich.console import Console

from cascadia_p2p.bench.asking import Asked
from cascadia_p2p.bench.counting import NodeAsker
from cascadia_p2p.bench.emulation import EmulatedRing, Emulation, emulated_ring
from cascadia_p2p.bench.prompts import ID_PROMPT, IdPrompts, Prompts, TextPrompts
from cascadia_p2p.bench.report import Setting, as_json, as_table, ring_facts
from cascadia_p2p.bench.running import Bench, LevelReport
from cascadia_p2p.cli.join import loop_factory
from cascadia_p2p.cli.simulate import profiled_machines
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.config import Config, add_flags, flags_of, load_config
from cascadia_p2p.errors import CascadiaError, UnreachableError, UsageError
from cascadia_p2p.keys.places import find_client_key
from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.models.emulated.model import expected_answers
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.shards.files import write_whole
from cascadia_p2p.simulate.plot import Curve, check_plot, draw
from cascadia_p2p.simulate.published import NAME, published
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.types import Endpoint, Promise
from cascadia_p2p.workload import LEVELS, LevelResult, Protocol, parse_levels

INTERRUPTED = 130
DEFAULTS = Protocol()
ANSWER_S = 15.0
"""How long a node has to answer, in seconds: it may be busy, and counters must not be missed for that."""


_console = Console(stderr=True, highlight=False, soft_wrap=True)


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    levels = ",".join(map(str, LEVELS))
    parser.add_argument(
        "--levels", default=levels, metavar="N,N,...", help=f"streams at once (default: {levels})"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=DEFAULTS.tokens,
        metavar="N",
        help=f"tokens of every answer (default: {DEFAULTS.tokens})",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=DEFAULTS.least_requests,
        metavar="N",
        help=f"requests a level, at least (default: {DEFAULTS.least_requests})",
    )
    parser.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="a prompt a line, in place of the twelve of its own"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts of token ids (default: 0)"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="words that are kept in the JSON")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all as JSON, after every level")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the curve and the published one")
    parser.add_argument(
        "--emulate",
        nargs="+",
        metavar="FLEET",
        help="measure a ring of this machine's own processes, which wait as long as that fleet computes: "
        f"'{NAME}', or files that 'profile' wrote, in ring order",
    )
    parser.add_argument(
        "--model", dest="subject", metavar="CONFIG", help="for profiles: the model, as 'plan' takes it"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="for one profile: so many nodes like it")
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="K", help="divide the emulated fleet's times by K"
    )
    add_flags(parser, "endpoint", "fleet", "key", "timeout", "slots", "context")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON; 1 when counts or answers are wrong."""
    config = load_config(flags_of(args), file=args.config)
    levels = parse_levels("--levels", args.levels)
    protocol = Protocol(tokens=args.tokens, least_requests=args.requests)
    _check(args)
    # A polite kill must end the nodes too.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        if args.emulate is None:
            texts = None if args.prompt_file is None else TextPrompts.read(args.prompt_file)
            return _Command(args, config, levels, protocol, texts).run(config.endpoint)
        emulation = _emulation(args, config, levels, protocol)
        with emulated_ring(emulation, _tell) as ring:
            return _Command(args, config, levels, protocol, None, emulation, ring).run(ring.endpoint)
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together, before anything is started."""
    if args.emulate is None:
        for name in ("slots", "context"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} is what emulated nodes promise: it goes with --emulate only")
        for flag, given in (
            ("time-scale", args.time_scale != 1.0),
            ("model", args.subject),
            ("nodes", args.nodes),
        ):
            if given:
                raise UsageError(f"--{flag} goes with --emulate only: a ring that runs is as it is")
    else:
        for flag in ("endpoint", "key"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--emulate starts a ring of its own: leave out --{flag}")
        if args.prompt_file is not None:
            raise UsageError("an emulated model has no tokenizer: leave out --prompt-file")
        if not 0.01 <= args.time_scale <= 1000:
            raise UsageError(f"--time-scale {args.time_scale:g}: expected 0.01 to 1000")
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed {args.seed}: expected 0 or more")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no directory {args.json.parent}")
    if args.plot is not None:
        check_plot(args.plot)


def _emulation(
    args: argparse.Namespace, config: Config, levels: Sequence[int], protocol: Protocol
) -> Emulation:
    least = ID_PROMPT + protocol.tokens
    if config.context < least:
        raise UsageError(
            f"--context {config.context}: prompts of {ID_PROMPT} tokens and answers of {protocol.tokens} "
            f"need {least}"
        )
    slots = max(levels) if args.slots is None else config.slots
    if args.emulate == [NAME]:
        if args.subject is not None or args.nodes is not None:
            raise UsageError(f"--model and --nodes are for fleets of profiles; '{NAME}' has its own")
        fleet, hidden = published().fleet(), published().hidden
        promise = Promise(slots, config.context, fleet.promise.rows)
        return Emulation.of(fleet, hidden, promise, args.time_scale)
    asked = argparse.Namespace(
        fleet=args.emulate,
        model=args.subject,
        nodes=args.nodes,
        device="CPU",
        prompt=ID_PROMPT,
        tokens=protocol.tokens,
    )
    promise = Promise(slots, config.context, config.rows)
    machines = profiled_machines(asked, promise)
    fleet = machines.fleet(tuple(range(machines.count)), machines.split)
    return Emulation.of(fleet, machines.reading.sizes.hidden, promise, args.time_scale)


@dataclass(frozen=True, slots=True)
class _Command:
    """One run of the command, on a ring that is there.

    Args:
        args, config: from the command line.
        levels, protocol: what is measured.
        texts: the user's own prompts.
        emulation, ring: what is emulated, and where.
    """

    args: argparse.Namespace
    config: Config
    levels: tuple[int, ...]
    protocol: Protocol
    texts: TextPrompts | None = None
    emulation: Emulation | None = None
    ring: EmulatedRing | None = None

    def run(self, endpoint: Endpoint | None) -> int:
        """Measure, then print what there is, however it ended."""
        reports: list[LevelReport] = []
        settings: list[Setting] = []
        code = 0
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                runner.run(self._measure(endpoint, settings, reports))
            except KeyboardInterrupt:
                code = INTERRUPTED
                _tell("interrupted: this is what was measured")
            except UnreachableError as error:
                if not reports:
                    raise
                code = error.exit_code
                _tell(f"the ring went away: {error}")
        if settings:
            self._print(settings[0], reports)
        wrong = [f"{each.streams} streams: {fault}" for each in reports for fault in each.faults]
        for sentence in wrong:
            print(f"cascadia-p2p: {sentence}", file=sys.stderr)
        return code or int(bool(wrong))

    async def _measure(
        self, endpoint: Endpoint | None, settings: list[Setting], reports: list[LevelReport]
    ) -> None:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        fleet, key = (self.config.fleet, self.config.key) if self.ring is None else (self.ring.fleet, None)
        found = find_client_key(fleet, key=key)
        ask: NodeAsker | None = node_asker(None if found is None else Keys(found.pair, found.server))
        if found is not None and found.client is not None:
            ask = None
            _tell("a client's key opens no control ports: only the head's own counts can be looked at")
        # A refusal is to be seen, not to be waited out.
        timeout = self.config.timeout
        async with AsyncClient(endpoint, fleet=fleet, timeout_s=timeout, key=key, retry=False) as client:
            status = await client.status()
            self._require_open(status)
            prompts = self._prompts(status)
            setting = self._setting(started, prompts, status)
            settings.append(setting)
            bench = Bench(client, ask, self.protocol, prompts, self._judge, _tell, self._simulated, reports)
            await bench.watch_idle()
            if idle := list(bench.idle_cpu.values()):
                _tell(f"while nobody asks, the head takes {idle[0]:.1%} of a core, the tail {idle[-1]:.1%}")
            for streams in self.levels:
                await bench.run([streams])
                self._write(setting, reports)

    def _require_open(self, status: Mapping[str, JsonValue]) -> None:
        if status.get("state") != "open":
            missing = status.get("waiting_for") or "its nodes to form it"
            raise CascadiaError(f"the ring is not open, it waits for {missing}: see 'cascadia-p2p status'")
        promise = status.get("promise")
        slots = promise.get("slots") if isinstance(promise, dict) else None
        if isinstance(slots, int) and slots < max(self.levels):
            _tell(f"the ring holds {slots} streams at once: at larger levels the others wait for their turn")

    def _prompts(self, status: Mapping[str, JsonValue]) -> Prompts:
        facts = status.get("vocabulary")
        ids = facts.get("ids") if isinstance(facts, dict) and not facts.get("tokenizer") else None
        if isinstance(ids, int):
            if self.texts is not None:
                raise UsageError("the ring's model has no tokenizer: leave out --prompt-file")
            return IdPrompts(ids, self.args.seed)
        return self.texts or TextPrompts.families()

    def _setting(self, started: str, prompts: Prompts, status: Mapping[str, JsonValue]) -> Setting:
        emulated: dict[str, JsonValue] | None = None
        if self.emulation is not None:
            emulated = {"fleet": self.emulation.fleet.name, "time_scale": self.args.time_scale}
        return Setting(
            started=started,
            note=self.args.note,
            prompts=prompts.words,
            seed=self.args.seed,
            protocol=self.protocol,
            ring=ring_facts(status),
            emulated=emulated,
        )

    def _judge(self, asked: Sequence[Asked]) -> list[str | None]:
        """Whether emulated stages gave the tokens that they must; of others nothing is known."""
        if self.ring is None:
            return [None] * len(asked)
        return wrong_answers(self.ring.model, asked, self.protocol.tokens)

    def _print(self, setting: Setting, reports: Sequence[LevelReport]) -> None:
        curve = {point.streams: point.decode_tok_s for point in published().curve}
        # Narrow columns in a file would hide what they are.
        width = None if sys.stdout.isatty() else 160
        Console(highlight=False, width=width).print(as_table(reports, curve))
        self._write(setting, reports)
        if self.args.plot is not None:
            self._draw(reports)

    def _simulated(self, streams: int) -> LevelResult | None:
        return None if self.emulation is None else self.emulation.simulated(streams, self.protocol)

    def _write(self, setting: Setting, reports: Sequence[LevelReport]) -> None:
        path = self.args.json
        if path is None:
            return
        body = as_json(setting, reports, complete=len(reports) == len(self.levels))
        try:
            write_whole(path, orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise CascadiaError(f"--json {path} can not be written: {error.strerror}") from error

    def _draw(self, reports: Sequence[LevelReport]) -> None:
        results = [each.result for each in reports if each.result is not None]
        best = [each.simulated for each in reports if each.simulated is not None]
        if not results:
            return
        emulated = "" if self.emulation is None else f"emulated {self.emulation.fleet.name}, "
        curves = [Curve(f"{emulated}measured", results)]
        if best:
            curves.append(Curve("simulated, software free of cost", best, dashed=True))
        draw(self.args.plot, "streams at once", [*curves, Curve("published", published().curve, dashed=True)])


def node_asker(keys: Keys | None) -> NodeAsker:
    """Asks nodes of the fleet that has these keys; nodes without a key take None."""
    return lambda endpoint: ask_node(endpoint, ANSWER_S, keys)


def wrong_answers(model: EmulatedConfig, asked: Sequence[Asked], tokens: int) -> list[str | None]:
    """What is wrong with each answer of emulated stages to prompts of token ids; None where nothing is."""
    prompts = [each.prompt for each in asked if not isinstance(each.prompt, str)]
    expected = expected_answers(model, prompts, tokens)
    return [
        _difference(each.reply.token_ids if each.reply else (), right)
        for each, right in zip(asked, expected, strict=True)
    ]


def _difference(tokens: Sequence[int], right: Sequence[int]) -> str | None:
    """In words where an answer leaves the right one; None when it does not."""
    pairs = enumerate(zip(tokens, right, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(right)))
    if place == len(tokens) == len(right):
        return None
    return f"its answer is wrong from token {place} on: rows came to the wrong place, or not at all"


def _tell(sentence: str) -> None:
    _console.print(sentence, markup=False)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
