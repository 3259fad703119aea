"""What a ring does when its network breaks: runs with real nodes, each on a host of the lab.

    python scripts/lab_runs.py [--only NAME,NAME...] [--streams 4] [--out FILE] [--check]

A closed fleet of three shards with a small model from a seed: hosts 0 to 2 hold the shards, 3 and 4 are the
standbys of shards 1 and 0 in the runs that need them, and a client asks from host 5. Each run starts streams,
breaks the network, mends it, and compares every answer with that of an undisturbed run; a lost or repeated
token, a reader that hangs, or a ring that is not whole again is a fault. Times are from the break, by logs
and reader. JSON goes to stdout or FILE, a table to stderr. Needs root (see netlab.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab_reader import Reader
from netlab import ALL, Lab, LabError, missing

from cascadia_p2p.logs import configure_logs
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe

RECIPE = "tiny12"
SHARDS = 3
STANDBYS = {3: 1, 4: 0}
"""Which shard a host waits for."""

CLIENT_HOST = 5
HOSTS = 6
FLEET = "lab-runs"
TOKENS = 800
BEGUN = 20
"""Tokens that a reader has when the network breaks."""

PATIENCE_S = 90.0
GONE_S = 2.5
"""Silence is noticed within this."""

BROKEN_S = 3.0
"""For how long a one-way cut lasts after it was noticed."""

CLIENT_S = 30.0
"""A client that has gone without a word gives its slot back within this."""

FLOOD_S = 30.0
FLOOD_RATE = 1000
FLOOD_MIB, FLOOD_FILES, FLOOD_LINES = 64, 1200, 200
"""What a flood may cost a node: memory, open files at its end, lines of log."""


@dataclass
class Run:
    """What one run showed; times in seconds from the break.

    Args:
        name: of the run.
        what: the break, in words.
        answers: streams that ran.
        right: those whose tokens are those of an undisturbed run.
        detect: when the head said that the ring is lost.
        back: when a ring was open again.
        token: when the next token came at the reader of the first stream, once a ring was back.
        pause: the longest time without a token there, from the break on.
        epochs: rings that were opened.
        said: what nodes said of it.
        faults: what was not as it must be.
    """

    name: str
    what: str
    answers: int = 0
    right: int = 0
    detect: float | None = None
    back: float | None = None
    token: float | None = None
    pause: float | None = None
    epochs: int = 0
    said: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def expect(self, true: bool, fault: str) -> None:
        """Note a fault unless it is true."""
        if not true:
            self.faults.append(fault)


class LabNode:
    """A node on a host, and what it logs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def said(self, since: float, *events: str) -> list[tuple[float, dict[str, Any]]]:
        """Lines of these events after a time (Unix), with their own time."""
        found = [(_at(line), line) for line in list(self.lines) if line.get("event") in events]
        return [(at, line) for at, line in found if at >= since]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            try:
                self.lines.append(json.loads(text))
            except ValueError:
                self.lines.append({"event": "text", "message": text})


def _at(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(str(line["timestamp"]).replace("Z", "+00:00")).timestamp()


class LabRing:
    """A closed fleet in a lab; use it as a context manager, with a lab that is up.

    Args:
        lab: at least `HOSTS` hosts.
        scratch: directory for the model, keys and states.
        streams: readers of a run.
        tokens: of each answer.
    """

    def __init__(self, lab: Lab, scratch: Path, streams: int, tokens: int = TOKENS) -> None:
        self.lab, self.scratch, self.streams, self.tokens = lab, scratch, streams, tokens
        self.nodes: dict[int, LabNode] = {}
        self.client: Reader
        self.expected: dict[int, list[int]] = {}
        self._model = scratch / "out"
        self.key = self._model / "fleet.key"

    def prepare(self) -> None:
        """Make the model and the key, start the shards' nodes, and learn the undisturbed answers."""
        checkpoint = make_checkpoint(self.scratch / "checkpoint", find_recipe(RECIPE))
        exact = [f"--{part}=f32" for part in ("experts", "projections", "head", "embedding")]
        arguments = ["export", checkpoint, self._model, "--shards", SHARDS, "--fleet", FLEET, *exact]
        command = [sys.executable, "-m", "cascadia_p2p", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, env=self._env())
        for host in range(SHARDS):
            self.start(host, host)
        self.client = self.reader(CLIENT_HOST)
        self.whole()
        answers = self.client.ask(range(self.streams), self.tokens)
        for number, answer in enumerate(answers.wait(PATIENCE_S)):
            if "ids" not in answer:
                raise LabError(
                    f"the undisturbed ring did not answer: {answer['error']}\n{self._last_words()}"
                )
            self.expected[number] = answer["ids"]

    def start(self, host: int, shard: int, *flags: str) -> None:
        """Start a node."""
        arguments = [
            "join",
            "--model",
            self._model,
            "--fleet",
            FLEET,
            "--shard",
            str(shard),
            "--threads",
            "1",
        ]
        arguments += ["--slots", str(2 * self.streams), "--context", "2048", "--log-format", "json", *flags]
        arguments += ["--state-dir", self.scratch / f"state-{host}"]
        command = [sys.executable, "-m", "cascadia_p2p", *map(str, arguments)]
        home = f"XDG_CONFIG_HOME={self.scratch / 'user'}"
        self.nodes[host] = LabNode(
            self.lab.start(host, ["sh", "-c", 'exec env "$@" 2>&1', "sh", home, *command])
        )

    def reader(self, host: int) -> Reader:
        """A program that asks from a host."""
        return Reader(self.lab, host, FLEET, self.key)

    def whole(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until all nodes serve or stand by, in one ring; the head's status."""
        deadline = time.monotonic() + patience_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            status = self.client.status()
            ready = [each for each in status.get("nodes", ()) if each["claim"] in ("serving", "loaded")]
            if status.get("state") == "open" and len(ready) == len(self.nodes):
                return status
            time.sleep(0.2)
        words = f"the ring is not whole after {patience_s:g} s: {status.get('state')}"
        raise LabError(f"{words}\n{self._last_words()}")

    def serving(self, shard: int) -> int:
        """The host that serves a shard."""
        control = str(self.whole()["stages"][shard]["control"])
        return next(host for host in self.nodes if control.startswith(f"{self.lab.ip(host)}:"))

    def said(self, since: float, *events: str) -> list[tuple[float, dict[str, Any]]]:
        """What any node said, by time."""
        found = [each for node in self.nodes.values() for each in node.said(since, *events)]
        return sorted(found, key=lambda each: each[0])

    def _last_words(self) -> dict[int, list[dict[str, Any]]]:
        return {host: node.lines[-3:] for host, node in self.nodes.items()}

    def _env(self) -> dict[str, str]:
        root = Path(__file__).resolve().parent.parent
        return os.environ | {"XDG_CONFIG_HOME": str(self.scratch / "user"), "PYTHONPATH": str(root)}


class Breaking:
    """One run: streams, a break, and what is judged of them.

    Args:
        ring: whole.
        run: taken down here.
        part: of the ring's tokens, that each stream asks for.
    """

    def __init__(self, ring: LabRing, run: Run, part: float = 1.0) -> None:
        self.ring, self.run, self.tokens = ring, run, int(part * ring.tokens)
        self.started = time.time()
        self.answers = ring.client.ask(range(ring.streams), self.tokens)
        self.answers.begun(BEGUN, PATIENCE_S)
        self.at = time.time()

    def settle(self, *, same_epoch: bool = False) -> None:
        """Wait for the answers and a whole ring; take down the times.

        Args:
            same_epoch: the ring must not have been lost.
        """
        ring, run = self.ring, self.run
        done = self.answers.wait(PATIENCE_S)
        right = sum(
            each.get("ids") == ring.expected[number][: self.tokens] for number, each in enumerate(done)
        )
        errors = [str(each["error"]) for each in done if each.get("error")]
        run.expect(right == len(done), f"{len(done) - right} answers are wrong: {errors[:1]}")
        run.answers += len(done)
        run.right += right
        try:
            ring.whole()
        except LabError as error:
            run.faults.append(str(error)[:400])
        early = [line["message"] for at, line in ring.said(self.started, "ring_closed") if at < self.at]
        run.expect(not early, f"the ring was lost before the break: {early[:1]}")
        closed = ring.said(self.at, "ring_closed")
        opened = ring.said(self.at, "ring_open")
        run.epochs = len({line["epoch"] for _, line in opened})
        run.detect = round(closed[0][0] - self.at, 2) if closed else None
        run.back = round(opened[0][0] - self.at, 2) if opened else None
        times = [at - self.at for at in self.answers.arrivals if at > self.at]
        after = [at for at in times if run.back is not None and at > run.back]
        run.token = round(after[0], 2) if after else None
        pauses = [later - earlier for earlier, later in pairwise([0.0, *times])]
        run.pause = round(max(pauses), 2) if times else None
        words = (str(line["message"]) for _, line in closed)
        run.said += dict.fromkeys(each for each in words if not each.endswith("waits for a ring"))
        if same_epoch:
            run.expect(not closed, f"the ring was lost: {run.said[:1]}")
        run.expect(_free(ring), "a slot is still taken after the last answer")

    def until_lost(self) -> None:
        """Wait until the ring is lost, and a little longer."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.ring.said(self.at, "ring_closed") and time.monotonic() < deadline:
            time.sleep(0.1)
        self.run.expect(time.monotonic() < deadline, "nobody noticed")
        time.sleep(BROKEN_S)

    def closed_within(self, limit: float) -> None:
        """The loss must be known this soon."""
        detect = self.run.detect
        self.run.expect(detect is not None and detect <= limit, f"the loss was known after {detect} s")


def _free(ring: LabRing, patience_s: float = 10.0) -> bool:
    """Whether no slot is taken, now or soon."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        requests = ring.client.status().get("requests", {})
        if requests and not requests["running"] and not requests["queued"]:
            return True
        time.sleep(0.2)
    return False


def _cut_and_heal_at_once(ring: LabRing, run: Run) -> None:
    """Once is enough: behind a cut that a busy machine made longer, TCP's next attempt may come too late."""
    for last in (False, False, False, True):
        victim = ring.serving(1)
        broken = Breaking(ring, run)
        ring.lab.cut(victim, silent=True)
        time.sleep(1.0)
        ring.lab.heal(victim)
        broken.settle(same_epoch=last)
        if run.detect is None:
            return


def _cut_long(ring: LabRing, run: Run, *victims: int) -> None:
    hosts = [ring.serving(shard) for shard in victims or (1,)]
    broken = Breaking(ring, run)
    for host in hosts:
        ring.lab.cut(host, silent=True)
    time.sleep(20.0)
    for host in hosts:
        ring.lab.heal(host)
    broken.settle()
    broken.closed_within(GONE_S)
    run.expect(run.back is not None and run.back > 20.0, "a ring was open without the shard")


def _cut_with_standby(ring: LabRing, run: Run) -> None:
    victim = ring.serving(1)
    broken = Breaking(ring, run)
    ring.lab.cut(victim, silent=True)
    time.sleep(20.0)
    healed = time.time()
    ring.lab.heal(victim)
    broken.settle()
    broken.closed_within(GONE_S)
    run.expect(
        run.token is not None and run.token < 10.0, f"the standby's first token came after {run.token} s"
    )
    run.expect(ring.serving(1) != victim, "the healed node took its place back")
    late = [line for at, line in ring.said(healed, "ring_closed") if "stood" not in line["message"]]
    rings = {line["epoch"] for line in late if _at(line) > healed + 1.0}
    run.expect(len(rings) <= 1, f"the healed node closed a ring: {sorted(map(str, rings))}")


def _one_way(direction: str) -> Callable[[LabRing, Run], None]:
    def act(ring: LabRing, run: Run) -> None:
        victim = ring.serving(1)
        broken = Breaking(ring, run)
        ring.lab.cut(victim, silent=True, direction=direction)  # type: ignore[arg-type]
        broken.until_lost()
        ring.lab.heal(victim)
        broken.settle()
        run.expect(any("shard 1 is missing" in each for each in run.said), f"it was not named: {run.said}")

    return act


def _hop(backwards: bool) -> Callable[[LabRing, Run], None]:
    """Cut only between the nodes of shards 1 and 2, which the head both hears, one way."""

    def act(ring: LabRing, run: Run) -> None:
        sender, receiver = ring.serving(1), ring.serving(2)
        broken = Breaking(ring, run)
        ring.lab.cut(sender, silent=True, direction="in" if backwards else "out", toward=receiver)
        broken.until_lost()
        ring.lab.heal(sender)
        broken.settle()
        named = any("the hop between them is broken" in each for each in run.said)
        run.expect(named, f"the hop was not named: {run.said}")

    return act


def _worse(change: Callable[[Lab], None], seconds: float, part: float) -> Callable[[LabRing, Run], None]:
    """A network that is worse for a while, from before the streams until after them."""

    def act(ring: LabRing, run: Run) -> None:
        ring.whole()
        before = time.time()
        change(ring.lab)
        try:
            while True:
                broken = Breaking(ring, run, part)
                broken.settle(same_epoch=True)
                if time.time() - before > seconds:
                    break
            run.expect(not ring.said(before, "ring_closed"), "the ring was lost")
        finally:
            ring.lab.heal(ALL)

    return act


def _flap(ring: LabRing, run: Run) -> None:
    victim = ring.serving(1)
    broken = Breaking(ring, run)
    for _ in range(4):
        ring.lab.cut(victim, silent=True)
        time.sleep(3.0)
        ring.lab.heal(victim)
        time.sleep(3.0)
    broken.settle()
    run.expect(any("shard 1" in said or f"{ring.lab.ip(victim)}" in said for said in run.said), "not named")


def _head_cut_off(ring: LabRing, run: Run) -> None:
    """The head goes on on its side of the cut, where it has a client; its standby takes over on the other."""
    old = ring.serving(0)
    beside = ring.reader(old)
    broken = Breaking(ring, run)
    theirs = beside.ask([0], ring.tokens)
    theirs.begun(1, PATIENCE_S)
    broken.at = time.time()
    ring.lab.cut(old, silent=True)
    time.sleep(4.0)
    cut_off = len(theirs.arrivals)
    time.sleep(11.0)
    run.expect(len(theirs.arrivals) == cut_off, "the old head went on serving without the others")
    run.expect(bool(theirs.notices), "the client beside the old head was told nothing")
    healed = time.time()
    ring.lab.heal(old)
    broken.settle()
    broken.closed_within(GONE_S)
    run.expect(
        run.token is not None and run.token < 15.0, f"the standby's first token came after {run.token} s"
    )
    answer = theirs.wait(PATIENCE_S)[0]
    run.answers += 1
    run.right += answer.get("ids") == ring.expected[0]
    run.expect(answer.get("ids") == ring.expected[0], f"beside the old head: {answer.get('error')}")
    run.said.append(f"beside the old head: {theirs.notices[:1]}")
    heads = {line["node"] for at, line in ring.said(healed + 5.0, "head_serving") if at}
    run.expect(len(heads) <= 1 and ring.serving(0) != old, f"not one head after healing: {heads}")


def _client_cut(ring: LabRing, run: Run) -> None:
    """A client vanishes without a FIN: what it asked for must end, and its slots be free."""
    gone = ring.reader(CLIENT_HOST + 1)
    theirs = gone.ask(range(ring.streams, 2 * ring.streams), 1900)
    theirs.begun(BEGUN, PATIENCE_S)
    at = time.time()
    ring.lab.cut(CLIENT_HOST + 1, silent=True)
    freed = _free(ring, CLIENT_S)
    run.detect = round(time.time() - at, 2)
    run.expect(freed and run.detect < CLIENT_S, f"its slots were not free after {run.detect} s")
    gone.process.kill()
    ring.lab.heal(CLIENT_HOST + 1)
    broken = Breaking(ring, run)
    freed_after = run.detect
    broken.settle(same_epoch=True)
    run.detect = freed_after


def _flood(ring: LabRing, run: Run) -> None:
    """Forged announcements while streams run and a node starts anew: it must find the ring all the same."""
    victim = ring.serving(1)
    before = {host: _use(node) for host, node in ring.nodes.items()}
    source = CLIENT_HOST + 1
    program = Path(__file__).with_name("mdns_flood.py")
    command = [sys.executable, str(program), "--fleet", FLEET, "--address", ring.lab.ip(source)]
    command += ["--seconds", f"{FLOOD_S:g}", "--rate", f"{FLOOD_RATE}"]
    for host in ring.nodes:
        command += ["--victim", ring.lab.ip(host)]
    flooder = ring.lab.start(source, command)
    assert flooder.stdout is not None
    run.said.append(flooder.stdout.readline().strip())
    time.sleep(FLOOD_S / 3)
    broken = Breaking(ring, run)
    ring.nodes[victim].process.kill()
    ring.nodes[victim].process.wait()
    ring.start(victim, 1)
    broken.settle()
    run.said.append(flooder.stdout.readline().strip())
    for host, node in ring.nodes.items():
        now, then = _use(node), before[host] if host != victim else {"mib": 0.0, "lines": 0}
        run.said.append(f"host {host}: {then} before, {now} after")
        grown = now["mib"] - then["mib"]
        run.expect(host == victim or grown < FLOOD_MIB, f"host {host} has grown by {grown:.0f} MiB")
        run.expect(now["files"] < FLOOD_FILES, f"host {host} has {now['files']:.0f} files open")
        lines = now["lines"] - then["lines"]
        run.expect(lines < FLOOD_LINES, f"host {host} has logged {lines:.0f} lines")


def _use(node: LabNode) -> dict[str, float]:
    """What a node's process takes: memory in MiB, open files, lines of its log so far."""
    proc = Path(f"/proc/{node.process.pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return {
        "mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "files": len(list((proc / "fd").iterdir())),
        "lines": len(node.lines),
    }


RUNS: dict[str, tuple[str, Callable[[LabRing, Run], None]]] = {
    "cut_1s": ("shard 1 cut off without a FIN for 1 s", _cut_and_heal_at_once),
    "cut_20s": ("shard 1 cut off for 20 s, no standby", _cut_long),
    "two_nodes": ("shards 1 and 2 cut off for 20 s", lambda ring, run: _cut_long(ring, run, 1, 2)),
    "deaf": ("shard 1 gets nothing, what it sends arrives", _one_way("in")),
    "mute": ("shard 1 gets all, what it sends vanishes", _one_way("out")),
    "hop": ("nothing gets from shard 1 to 2, all else does", _hop(False)),
    "hop_back": ("nothing gets from shard 2 to 1, all else does", _hop(True)),
    "loss_5": ("5 % of all frames lost", _worse(lambda lab: lab.lose(5.0), 20.0, 0.25)),
    "delay_50": ("50 ms longer on every way", _worse(lambda lab: lab.delay(50.0), 20.0, 0.1)),
    "throttle": ("cables of 2 Mbit/s", _worse(lambda lab: lab.throttle(2.0), 10.0, 0.1)),
    "flap": ("shard 1 cut off and healed each 3 s, four times", _flap),
    "client_cut": ("a client cut off without a FIN", _client_cut),
    "flood": (
        f"{FLOOD_RATE} forged mDNS packets a second for {FLOOD_S:g} s; shard 1 killed meanwhile",
        _flood,
    ),
    "standby": ("shard 1 cut off for 20 s, a standby waits", _cut_with_standby),
    "head": ("the head cut off for 15 s while its standby takes over", _head_cut_off),
}
NEED_STANDBYS = ("standby", "head")


def runs(ring: LabRing, names: Sequence[str]) -> Iterator[Run]:
    """The runs of these names, one after the other; standbys start before the first that needs them."""
    for name in names:
        if name in NEED_STANDBYS and len(ring.nodes) == SHARDS:
            for host, shard in STANDBYS.items():
                ring.start(host, shard)
        what, act = RUNS[name]
        run = Run(name, what)
        try:
            act(ring, run)
        except LabError as error:
            run.faults.append(str(error)[:600])
        finally:
            ring.lab.heal(ALL)
        yield run


def table(found: Sequence[Run]) -> str:
    """One line a run."""
    lines = [
        "| run | answers right | lost after s | ring back s | next token s | longest pause s | new rings |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in found:
        cells = [run.what, f"{run.right} of {run.answers}"]
        cells += [
            "" if value is None else f"{value:.1f}" for value in (run.detect, run.back, run.token, run.pause)
        ]
        lines.append(f"| {' | '.join(cells)} | {run.epochs} |")
    return "\n".join(lines)


def report(found: Sequence[Run]) -> str:
    """All runs so far, as JSON."""
    result = {
        "model": RECIPE,
        "shards": SHARDS,
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "faults": {run.name: run.faults for run in found if run.faults},
        "runs": [asdict(run) for run in found],
    }
    return json.dumps(result, indent=1) + "\n"


def main() -> int:
    """Run, print, and judge with `--check`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(RUNS), help="names of runs")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="end with 1 when a run shows a fault")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(RUNS)):
        parser.error(f"no run is named {', '.join(unknown)}: there are {', '.join(RUNS)}")
    if (reason := missing()) is not None:
        parser.error(reason)
    configure_logs("console", "error")
    found: list[Run] = []
    with (
        tempfile.TemporaryDirectory(prefix="lab-runs-") as scratch,
        Lab(HOSTS + 1, f"r{os.getpid()}") as lab,
    ):
        ring = LabRing(lab, Path(scratch), args.streams)
        ring.prepare()
        for run in runs(ring, [name for name in RUNS if name in names]):
            found.append(run)
            print(json.dumps(asdict(run)), file=sys.stderr, flush=True)
            if args.out is not None:
                args.out.write_text(report(found))
    if args.out is None:
        print(report(found), end="")
    print(table(found), file=sys.stderr)
    return int(args.check and any(run.faults for run in found))


if __name__ == "__main__":
    sys.exit(main())
