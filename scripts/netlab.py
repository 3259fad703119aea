"""A small network of namespaces on one Linux machine, for tests: each host is a namespace on one switch.

    netlab.py [--name lab] up -n 11     make the switch and the hosts
    netlab.py exec HOST -- COMMAND...   run a command in one host
    netlab.py each -- COMMAND...        run it in every host, {i} and {ip} replaced; wait for all
    netlab.py cut HOST                  pull the cable; with --silent, --direction or --toward frames vanish
    netlab.py heal [HOST]               undo cuts, loss, delay and throttling
    netlab.py flap HOST                 cut silently and heal, again and again
    netlab.py lose PERCENT              of the frames; delay MS and throttle MBIT likewise
    netlab.py multicast HOST on|off     let the switch deliver multicast to that host, or not
    netlab.py capture FILE|--stop       write what passes the switch, as pcap
    netlab.py status                    hosts, addresses, processes; what the switch has counted
    netlab.py down                      end what runs inside, and remove all

Each command has --help. Needs root, iproute2 and a C compiler. The switch (netlab_switch.c) is
a process in a namespace of its own, so the machine's own network is never touched. Host i has the device eth0
with 10.77.0.(i+1)/24 and fd77::(i+1)/64.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(__file__).with_name("netlab_switch.c")
RUNTIME = Path("/run/netlab")
MAX_HOSTS = 250
ALL = -1
MILLION = 1_000_000

Direction = Literal["both", "in", "out"]
"""Of a host's frames: those that it gets, those that it sends."""


class LabError(Exception):
    """The lab can not do what was asked; `str()` is a sentence."""


def missing(*, thorough: bool = True) -> str | None:
    """Why a lab can not be made here, or None when it can; `thorough` tries it."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 (the command 'ip') is not installed"
    if _compiler() is None:
        return "no C compiler ('cc' or 'gcc') is installed: the lab's switch is compiled at first use"
    if not thorough:
        return None
    probe = f"netlab-probe-{os.getpid()}"
    try:
        _run(["ip", "netns", "add", probe])
    except LabError as error:
        return f"this machine does not allow network namespaces ({error})"
    try:
        _batch(probe, ["link add v0 type veth peer name v1"])
    except LabError as error:
        return f"this machine's kernel has no veth devices ({error})"
    finally:
        _run(["ip", "netns", "del", probe])
    return None


class Lab:
    """Hosts on one switch; a context manager that removes all at the end.

    Args:
        hosts: how many.
        name: prefix of the namespaces; one that no other lab on the machine uses.
    """

    def __init__(self, hosts: int, name: str = "lab") -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"{hosts} hosts: expected 1 to {MAX_HOSTS}")
        self.hosts = hosts
        self.name = name
        self._started: list[subprocess.Popen[str]] = []

    @classmethod
    def existing(cls, name: str) -> Self:
        """The lab that was brought up under this name before."""
        hosts = sum(each.startswith(f"{name}-h") for each in _namespaces())
        if hosts == 0:
            raise LabError(f"there is no lab '{name}': 'netlab.py up' makes one")
        return cls(hosts, name)

    @property
    def switch(self) -> str:
        """The switch's namespace."""
        return f"{self.name}-sw"

    def namespace(self, host: int) -> str:
        """A host's namespace."""
        if not 0 <= host < self.hosts:
            raise LabError(f"host {host} does not exist: there are 0 to {self.hosts - 1}")
        return f"{self.name}-h{host}"

    def ip(self, host: int) -> str:
        """A host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def ip6(self, host: int) -> str:
        """A host's IPv6 address."""
        return f"fd77::{host + 1:x}"

    def up(self) -> None:
        """Make the namespaces, the switch and the cables."""
        if self.switch in _namespaces():
            raise LabError(f"lab '{self.name}' is up already: 'netlab.py down' removes it")
        try:
            self._build()
        except LabError:
            self.down()
            raise

    def down(self) -> None:
        """End what runs inside the hosts, and remove them; harmless when there is nothing."""
        there = _namespaces()
        ours = [each for each in there if each == self.switch or each.startswith(f"{self.name}-h")]
        for namespace in ours:
            _kill_inside(namespace)
        for process in self._started:
            process.wait(timeout=60)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()
        for namespace in ours:
            _run(["ip", "netns", "del", namespace])
        self._door.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def command(self, host: int, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs a command in a host; signals reach the command itself."""
        return ["ip", "netns", "exec", self.namespace(host), *map(str, command)]

    def run(self, host: int, command: Sequence[str | Path], timeout: float = 60.0) -> str:
        """Run a command in a host and return what it prints.

        Raises:
            LabError: it fails or takes longer than `timeout` seconds.
        """
        return _run(self.command(host, command), timeout=timeout)

    def start(
        self, host: int, command: Sequence[str | Path], stderr: IO[str] | int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command in a host with its output in a pipe; `down` ends it."""
        process = subprocess.Popen(
            self.command(host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._started.append(process)
        return process

    def cascadia(
        self, host: int, *arguments: str, stderr: IO[str] | int | None = None
    ) -> subprocess.Popen[str]:
        """Start `cascadia-p2p ARGUMENTS` in a host, as in `lab.cascadia(0, "join", "--model", "OUT")`."""
        return self.start(host, [sys.executable, "-m", "cascadia_p2p", *arguments], stderr)

    def configure(self, host: int, *lines: str) -> None:
        """Run lines of `ip` in a host, as in `link add docker0 type bridge`."""
        _batch(self.namespace(host), lines)

    def cut(
        self, host: int, *, silent: bool = False, direction: Direction = "both", toward: int = ALL
    ) -> None:
        """Pull a host's cable, or let frames vanish while the link stays up, as a broken switch does.

        Args:
            host: whose.
            silent: frames vanish: nobody gets a FIN or loses the carrier.
            direction: vanish only what the host gets ("in") or sends ("out").
            toward: vanish only what passes between it and this other host.
        """
        self.namespace(host)
        if silent or direction != "both" or toward != ALL:
            self.lose(100.0, host, direction=direction, toward=toward)
        else:
            _batch(self.switch, [f"link set v{host} down"])

    def heal(self, host: int = ALL) -> None:
        """Undo `cut`, `lose`, `delay` and `throttle` for a host, or for all."""
        for each in range(self.hosts) if host == ALL else [host]:
            self.namespace(each)
            _batch(self.switch, [f"link set v{each} up"])
            self._tell(f"rate {each} 0")
        for what in ("lose", "delay"):
            self._links(what, host, "both", ALL, 0)

    def lose(
        self, percent: float, host: int = ALL, *, direction: Direction = "both", toward: int = ALL
    ) -> None:
        """Drop so many percent of the frames of a host, or of all: each frame by itself, once on its way."""
        if not 0 <= percent <= 100:
            raise LabError(f"{percent:g} percent: expected 0 to 100")
        self._links("lose", host, direction, toward, round(percent * MILLION / 100))

    def delay(self, ms: float, host: int = ALL, *, direction: Direction = "both", toward: int = ALL) -> None:
        """Let frames take so many milliseconds longer, in each direction."""
        if not 0 <= ms <= 60_000:
            raise LabError(f"{ms:g} ms: expected 0 to 60000")
        self._links("delay", host, direction, toward, round(ms * 1000))

    def throttle(self, mbit: float, host: int = ALL) -> None:
        """Let a host's cable carry so many Mbit/s in each direction; 0 for as many as it can."""
        if mbit < 0:
            raise LabError(f"{mbit:g} Mbit/s: expected 0 or more")
        for each in range(self.hosts) if host == ALL else [host]:
            self.namespace(each)
            self._tell(f"rate {each} {mbit:g}")

    def multicast(self, host: int, allowed: bool) -> None:
        """Whether the switch delivers multicast to a host; off is what Wi-Fi isolation does."""
        self.namespace(host)
        self._tell(f"multicast {host} {int(allowed)}")

    def capture(self, path: Path | None) -> None:
        """Write every frame that a host sends to a pcap file from now on; None stops it."""
        self._tell("capture" if path is None else f"capture {path.resolve()}")

    def counts(self) -> dict[str, int]:
        """Frames that the switch took ("sent"), "lost" on links, and dropped by a full queue ("late")."""
        words = self._tell("counts").split()
        return dict(zip(words[::2], map(int, words[1::2]), strict=True))

    def status(self) -> str:
        """One line a host: addresses and processes."""
        lines = []
        for host in range(self.hosts):
            namespace = self.namespace(host)
            addresses = " ".join(_run(["ip", "-n", namespace, "-br", "addr", "show", "dev", "eth0"]).split())
            lines.append(f"{host:3} {namespace} {addresses} processes: {_pids(namespace) or 'none'}")
        return "\n".join(lines)

    def _build(self) -> None:
        program = _switch_program()
        namespaces = [self.namespace(host) for host in range(self.hosts)]
        for namespace in (self.switch, *namespaces):
            _run(["ip", "netns", "add", namespace])
        cables = (
            f"link add v{host} type veth peer name eth0 netns {namespace}"
            for host, namespace in enumerate(namespaces)
        )
        # No automatic link-local addresses: their duplicate check makes a link useless for seconds.
        silent = (f"link set v{host} addrgenmode none" for host in range(self.hosts))
        plugged = (f"link set v{host} up" for host in range(self.hosts))
        _batch(self.switch, [*cables, *silent, *plugged])
        command = ["ip", "netns", "exec", self.switch, str(program), str(self._door), *namespaces]
        log = program.with_name(f"{self.name}.log")
        with log.open("w") as errors:
            switch = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert switch.stdout is not None
        self._started.append(switch)
        if switch.stdout.readline() != "ready\n":
            raise LabError(f"the switch did not start: {log.read_text().strip()}")
        log.unlink()
        for host in range(self.hosts):
            self.configure(
                host,
                "link set lo up",
                "link set dev eth0 addrgenmode none",
                "link set eth0 up",
                f"addr add {self.ip(host)}/24 brd + dev eth0",
                f"addr add {self.ip6(host)}/64 dev eth0 nodad",
            )

    @property
    def _door(self) -> Path:
        return RUNTIME / f"{self.name}.sock"

    def _links(self, what: str, host: int, direction: Direction, toward: int, value: int) -> None:
        for each in (host, toward):
            if each != ALL:
                self.namespace(each)
        if direction in ("both", "out"):
            self._tell(f"{what} {host} {toward} {value}")
        if direction in ("both", "in"):
            self._tell(f"{what} {toward} {host} {value}")

    def _tell(self, command: str) -> str:
        """What the switch answers; it has obeyed by then."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.settimeout(60)
            try:
                caller.connect(str(self._door))
                caller.send(command.encode())
                answer = caller.recv(4096).decode()
            except OSError as error:
                raise LabError(f"the switch of lab '{self.name}' does not answer ({error})") from error
        if answer != "ok" and not command.startswith("counts"):
            raise LabError(f"the switch can not do '{command}': {answer}")
        return answer


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _switch_program() -> Path:
    """The compiled switch; made when it is not there yet."""
    program = RUNTIME / f"switch-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        RUNTIME.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        _run([_compiler() or "cc", "-O2", "-o", str(fresh), str(SOURCE)])
        fresh.replace(program)
    return program


def _run(command: Sequence[str], *, timeout: float = 60.0, text: str | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, input=text)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"'{' '.join(command)}' took longer than {timeout:g} s") from error
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LabError(f"'{' '.join(command)}': {reason}")
    return done.stdout


def _batch(namespace: str, lines: Iterable[str]) -> None:
    _run(["ip", "-n", namespace, "-batch", "-"], text="\n".join(lines) + "\n")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split()]


def _kill_inside(namespace: str) -> None:
    deadline = time.monotonic() + 5
    while (pids := [pid for pid in _pids(namespace) if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _each(lab: Lab, command: Sequence[str]) -> int:
    processes = [
        subprocess.Popen(
            lab.command(
                host, [part.replace("{i}", str(host)).replace("{ip}", lab.ip(host)) for part in command]
            )
        )
        for host in range(lab.hosts)
    ]
    return max(abs(process.wait()) for process in processes)


def _flap(lab: Lab, host: int, period_s: float, seconds: float) -> None:
    """Cut a host silently for a period, heal it for a period, and so on; it is healed at the end."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            lab.cut(host, silent=True)
            time.sleep(period_s)
            lab.heal(host)
            time.sleep(period_s)
    finally:
        lab.heal(host)


def _where(command: argparse.ArgumentParser, *, directed: bool = True) -> None:
    command.add_argument("--host", type=int, default=ALL, help="only this host's frames (default: all)")
    if directed:
        _directed(command)


def _directed(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--direction", choices=["both", "in", "out"], default="both", help="only what the host gets, or sends"
    )
    command.add_argument(
        "--toward", type=int, default=ALL, metavar="HOST", help="only between it and this other host"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="lab", help="prefix of the namespaces (default: lab)")
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def add(action: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(action, help=about, description=about)

    add("up", "make the switch and the hosts").add_argument("-n", "--hosts", type=int, default=11)
    add("down", "end what runs inside, and remove all")
    add("status", "hosts, addresses, processes; what the switch has counted")
    run = add("exec", "run a command in one host")
    run.add_argument("host", type=int)
    for command in (run, add("each", "run a command in every host, {i} and {ip} replaced")):
        command.add_argument("command", nargs=argparse.REMAINDER)
    cut = add("cut", "pull a host's cable, or let its frames vanish")
    cut.add_argument("host", type=int)
    cut.add_argument("--silent", action="store_true", help="frames vanish while the link stays up: no FIN")
    _directed(cut)
    heal = add("heal", "undo cuts, loss, delay and throttling")
    heal.add_argument("host", type=int, nargs="?", default=ALL, help="default: all")
    flap = add("flap", "cut a host silently and heal it, again and again")
    flap.add_argument("host", type=int)
    flap.add_argument("--each", type=float, default=3.0, help="seconds cut, and seconds healed (default: 3)")
    flap.add_argument("--seconds", type=float, default=30.0, help="until it ends, healed (default: 30)")
    lose = add("lose", "drop a share of the frames")
    lose.add_argument("percent", type=float)
    delay = add("delay", "let frames take longer")
    delay.add_argument("ms", type=float, help="milliseconds, in each direction")
    throttle = add("throttle", "let cables carry less")
    throttle.add_argument("mbit", type=float, help="Mbit/s in each direction; 0 for no limit")
    _where(lose)
    _where(delay)
    _where(throttle, directed=False)
    multicast = add("multicast", "let the switch deliver multicast to a host, or not")
    multicast.add_argument("host", type=int)
    multicast.add_argument("switch", choices=["on", "off"])
    capture = add("capture", "write what passes the switch, as pcap")
    which = capture.add_mutually_exclusive_group(required=True)
    which.add_argument("file", type=Path, nargs="?")
    which.add_argument("--stop", action="store_true")
    return parser


def _act(arguments: argparse.Namespace) -> int:
    if arguments.action == "up":
        lab = Lab(arguments.hosts, arguments.name)
        lab.up()
        print(lab.status())
        return 0
    lab = Lab.existing(arguments.name)
    command = [part for index, part in enumerate(getattr(arguments, "command", [])) if index or part != "--"]
    match arguments.action:
        case "down":
            lab.down()
        case "status":
            print(lab.status())
            print("switch: " + ", ".join(f"{value} {name}" for name, value in lab.counts().items()))
        case "exec":
            line = lab.command(arguments.host, command)
            os.execvp(line[0], line)
        case "each":
            return _each(lab, command)
        case _:
            _change(lab, arguments)
    return 0


def _change(lab: Lab, arguments: argparse.Namespace) -> None:
    """A command that changes what the switch does."""
    where = {name: getattr(arguments, name) for name in ("direction", "toward") if name in arguments}
    match arguments.action:
        case "cut":
            lab.cut(arguments.host, silent=arguments.silent, **where)
        case "heal":
            lab.heal(arguments.host)
        case "flap":
            _flap(lab, arguments.host, arguments.each, arguments.seconds)
        case "lose":
            lab.lose(arguments.percent, arguments.host, **where)
        case "delay":
            lab.delay(arguments.ms, arguments.host, **where)
        case "throttle":
            lab.throttle(arguments.mbit, arguments.host)
        case "multicast":
            lab.multicast(arguments.host, arguments.switch == "on")
        case "capture":
            lab.capture(arguments.file)


def main() -> int:
    """Run one command; the exit code is 1 for a failure."""
    arguments = _parser().parse_args()
    reason = missing(thorough=arguments.action == "up")
    if reason is not None:
        print(f"netlab: {reason}", file=sys.stderr)
        return 1
    try:
        return _act(arguments)
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
