"""`simulate`: run the scheduler on a fleet of which only times are known, in seconds instead of hours."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from cascadia_p2p.cli.simulate_text import progress, show
from cascadia_p2p.engine.footprint import Backend, Footprint
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.planning.measured import MeasuredNode, read_measured, told_apart
from cascadia_p2p.planning.stagetime import Reading
from cascadia_p2p.shards.files import write_whole
from cascadia_p2p.simulate.fleet import Fleet
from cascadia_p2p.simulate.placement import (
    Machines,
    Placement,
    check_order,
    check_split,
    placements,
)
from cascadia_p2p.simulate.plot import Curve, check_plot, draw
from cascadia_p2p.simulate.profiled import ProfiledMachines
from cascadia_p2p.simulate.published import NAME, published
from cascadia_p2p.simulate.published_machines import LastRole, PublishedMachines
from cascadia_p2p.simulate.report import PlacedLevel, Report, as_json
from cascadia_p2p.simulate.study import PROMPT, PolicyName, Study
from cascadia_p2p.types import Promise
from cascadia_p2p.workload import LEVELS, MOST_STREAMS, Protocol, parse_levels

_BEST: Final = "best"
_DEVICES: Final = {"CPU": Backend.KERNELS, "GPU": Backend.OPENVINO_GPU}
_LABELS: Final = {PolicyName.OURS: "our scheduler", PolicyName.PUBLISHED: "published policy"}
_MOST_PROMPT: Final = 1 << 20
_MOST_ROWS: Final = 4096
_ROWS: Final = 64
_PLACED_STREAMS: Final = 88


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is simulated: machines as they stand, and whether they are the published ones."""

    machines: Machines
    placement: Placement
    fleet: Fleet
    reply_wait_s: float | None
    is_published: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.epilog = "Times are the fleet's own: stages and hops, nothing for the software between them."
    parser.add_argument(
        "fleet",
        nargs="+",
        metavar="FLEET",
        help=f"'{NAME}', eleven PCs whose numbers are known, or files that 'profile' wrote, in ring order",
    )
    parser.add_argument("--streams", metavar="N,N,...", help="levels (default: those of the published curve)")
    parser.add_argument(
        "--policy",
        choices=[*(each.value for each in PolicyName), "both"],
        default="both",
        help="ours: this program's scheduler; published: fixed groups of streams (default: both)",
    )
    parser.add_argument("--tokens", type=int, default=Protocol().tokens, metavar="N", help="of each answer")
    parser.add_argument("--prompt", type=int, default=PROMPT, metavar="N", help="tokens of each prompt")
    parser.add_argument(
        "--gap-ms", type=float, default=1e3 * Protocol().gap_s, metavar="MS", help="between two requests"
    )
    parser.add_argument(
        "--requests", type=int, default=Protocol().least_requests, metavar="N", help="a level, at least"
    )
    parser.add_argument("--slots", type=int, metavar="N", help="streams at once (default: no bound)")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="of a frame, at most (default: what was measured, at most 64)"
    )
    parser.add_argument("--hop-ms", type=float, metavar="MS", help="of every hop, for a frame of one row")
    parser.add_argument(
        "--order", metavar="M,M,...|best", help="machines in ring order, by their numbers from 0"
    )
    parser.add_argument("--split", metavar="L,L,...|best", help="layers of each place of the ring")
    parser.add_argument(
        "--place", action="store_true", help="say what the best order and the best split would give"
    )
    parser.add_argument(
        "--most-layers",
        type=int,
        metavar="N",
        help="layers with experts that a machine can hold, for the best split (default: one more than "
        "an even split gives)",
    )
    parser.add_argument(
        "--last-role",
        choices=[each.value for each in LastRole],
        default=LastRole.LIGHT.value,
        help="of the published fleet, when machines change places: its last role's work is light, or its "
        "machine fast (default: light)",
    )
    parser.add_argument("--model", metavar="CONFIG", help="for profiles: the model, as 'plan' takes it")
    parser.add_argument("--nodes", type=int, metavar="N", help="for one profile: so many nodes like it")
    parser.add_argument(
        "--device", choices=list(_DEVICES), default="CPU", help="for profiles: who multiplies (default: CPU)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="write the curves as a picture")


def run(args: argparse.Namespace) -> int:
    """Simulate, print a table, and write what was asked for.

    Raises:
        CascadiaError: a flag is wrong, a file can not be read or written, or matplotlib is missing.
    """
    levels = LEVELS if args.streams is None else parse_levels("--streams", args.streams)
    protocol = Protocol(args.tokens, args.gap_ms / 1e3, args.requests)
    if not 1 <= args.prompt <= _MOST_PROMPT:
        raise UsageError(f"--prompt is {args.prompt}: expected 1 to {_MOST_PROMPT} tokens")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no directory {args.json.parent}")
    if args.plot is not None:
        check_plot(args.plot)
    subject = _subject(args, levels)
    policies = list(PolicyName) if args.policy == "both" else [PolicyName(args.policy)]
    study = Study(subject.fleet, protocol, args.prompt, subject.reply_wait_s)
    with progress() as tell:
        found = []
        for policy in policies:
            for streams in levels:
                tell(f"{policy.value} policy, {streams} streams")
                found.append(study.level(policy, streams))
        placed = _placed(args, subject, policies, levels, protocol) if args.place else []
    curve = published().curve if subject.is_published else ()
    report = Report(subject.fleet, protocol, args.prompt, found, curve, placed)
    show(report)
    if args.json is not None:
        _write_json(args.json, report)
    if args.plot is not None:
        draw(args.plot, f"{subject.fleet.name}: {len(subject.fleet.stages)} stages", _curves(report))
    return 0


# --- what is asked ------------------------------------------------------------------------------------------


def _subject(args: argparse.Namespace, levels: tuple[int, ...]) -> _Subject:
    is_published = args.fleet == [NAME]
    context = args.prompt + args.tokens
    slots = max(levels) if args.slots is None else args.slots
    if not 1 <= slots <= MOST_STREAMS:
        raise UsageError(f"--slots is {slots}: expected 1 to {MOST_STREAMS}")
    if args.rows is not None and not 1 <= args.rows <= _MOST_ROWS:
        raise UsageError(f"--rows is {args.rows}: expected 1 to {_MOST_ROWS}")
    machines: Machines
    if is_published:
        _refuse_profile_flags(args)
        machines = PublishedMachines(published(), LastRole(args.last_role))
        rows = args.rows or published().fleet().promise.rows
    else:
        rows = args.rows or _ROWS
        machines = profiled_machines(args, Promise(slots, context, rows))
    given = Placement("given", tuple(range(machines.count)), machines.split)
    placement = _placement(args, machines, given)
    as_read = is_published and (placement.order, placement.split) == (given.order, given.split)
    fleet = published().fleet() if as_read else machines.fleet(placement.order, placement.split)
    fleet = fleet.with_promise(Promise(slots, context, rows))
    if args.hop_ms is not None:
        fleet = fleet.with_hops(args.hop_ms / 1e3)
    wait = published().reply_wait_s if is_published else None
    return _Subject(machines, placement, fleet, wait, is_published)


def _refuse_profile_flags(args: argparse.Namespace) -> None:
    for flag, value in (("--model", args.model), ("--nodes", args.nodes)):
        if value is not None:
            raise UsageError(f"{flag} is for fleets of profiles; '{NAME}' has its own model and nodes")


def profiled_machines(args: argparse.Namespace, promise: Promise) -> ProfiledMachines:
    """The machines of profiles, from the flags `fleet`, `model`, `nodes`, `device`, `prompt` and `tokens`.

    Raises:
        UsageError: a flag is missing or wrong, or a file is no profile.
    """
    if args.model is None:
        raise UsageError(
            "profiles say how long layers take, not how many there are: give --model, as 'plan' takes it"
        )
    # Reading models takes a second to import, and the published fleet needs none.
    from cascadia_p2p.cli.plan import read_subject
    from cascadia_p2p.models.sizing import model_sizes

    nodes = _measured(args)
    model = read_subject(Path(args.model))
    forms = model.forms
    footprint = Footprint(
        _DEVICES[args.device], forms["experts"], forms["projections"], forms["head"], forms["embedding"]
    )
    reading = Reading(model_sizes(model.config), footprint, args.prompt + args.tokens // 2)
    if len(nodes) > len(reading.sizes.layers):
        raise UsageError(f"{len(nodes)} nodes for a model of {len(reading.sizes.layers)} layers")
    name = args.fleet[0] if len(args.fleet) == 1 else f"{len(nodes)} nodes"
    return ProfiledMachines(Path(name).name, tuple(nodes), reading, promise, model.split)


def _measured(args: argparse.Namespace) -> list[MeasuredNode]:
    found: list[MeasuredNode] = []
    for name in args.fleet:
        try:
            found += read_measured(Path(name).read_bytes(), name)
        except OSError as error:
            raise UsageError(
                f"{name} is neither '{NAME}' nor a profile that can be read: {error.strerror}"
            ) from None
    if args.nodes is not None:
        if len(found) != 1 or not 1 <= args.nodes <= MOST_STREAMS:
            raise UsageError(
                f"--nodes {args.nodes} with {len(found)} profiles: it multiplies one profile, at most "
                f"{MOST_STREAMS} times"
            )
        found *= args.nodes
    return told_apart(found)


def _placement(args: argparse.Namespace, machines: Machines, given: Placement) -> Placement:
    if _BEST in (args.order, args.split):
        if any(value not in (None, _BEST) for value in (args.order, args.split)):
            raise UsageError(f"--order and --split: give '{_BEST}' for both or for one alone")
        _, of_orders, of_splits, of_both = placements(machines, args.most_layers)
        return of_both if args.order == args.split else of_orders if args.order == _BEST else of_splits
    order, split = given.order, given.split
    if args.order is not None:
        order = check_order("--order", _numbers("--order", args.order), machines.count)
    if args.split is not None:
        split = check_split("--split", _numbers("--split", args.split), machines.count, machines.layers)
    return Placement("given", order, split)


def _numbers(flag: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words):
        raise UsageError(f"{flag} '{text}': expected whole numbers with commas between them, or '{_BEST}'")
    return [int(word) for word in words]


# --- what is run and written --------------------------------------------------------------------------------


def _placed(
    args: argparse.Namespace,
    subject: _Subject,
    policies: list[PolicyName],
    levels: tuple[int, ...],
    protocol: Protocol,
) -> list[PlacedLevel]:
    """A level with each placement: as many streams as fill the ring, if that is among the levels."""
    streams = max((level for level in levels if level <= _PLACED_STREAMS), default=min(levels))
    found = []
    for placement in placements(subject.machines, args.most_layers):
        fleet = subject.machines.fleet(placement.order, placement.split).with_promise(subject.fleet.promise)
        if args.hop_ms is not None:
            fleet = fleet.with_hops(args.hop_ms / 1e3)
        study = Study(fleet, protocol, args.prompt, subject.reply_wait_s)
        found += [PlacedLevel(placement, study.level(policy, streams)) for policy in policies]
    return found


def _curves(report: Report) -> list[Curve]:
    curves = []
    for policy in PolicyName:
        points = [each.result for each in report.levels if each.policy is policy]
        if points:
            curves.append(Curve(f"{_LABELS[policy]}, simulated", points))
    if report.published:
        asked = {each.result.streams for each in report.levels}
        points_given = [point for point in report.published if point.streams in asked]
        if points_given:
            curves.append(Curve("published, measured", points_given, dashed=True))
    return curves


def _write_json(path: Path, report: Report) -> None:
    try:
        write_whole(
            path, orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
    except OSError as error:
        raise CascadiaError(f"--json {path} can not be written: {error.strerror}") from error
    print(f"written: {path}", file=sys.stderr)
