"""`chat`, and the flags of `generate` that talk: what is printed where, for people and pipes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import ROOT, Run
from cluster.conftest import Shards
from cluster.fleet import slowed
from cluster.standing import StandingRing, standing_ring
from fixtures.reference import load_case

from cascadia_p2p.cli.chat import History
from cascadia_p2p.cli.terminal import AnswerPrinter, read_messages
from cascadia_p2p.client import Client, StreamPiece

CASE = load_case("tiny12-noeos")
CONTEXT = 600

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def ring(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    model = shards(CASE, (6, 6))
    with standing_ring(tmp_path_factory.mktemp("chat"), model, 2, context=CONTEXT, slots=2) as made:
        yield made


@pytest.fixture
def at(ring: StandingRing) -> tuple[str, str]:
    return "--endpoint", ring.endpoint.tcp


def expected(ring: StandingRing, *said: tuple[str, str], **options: Any) -> str:
    """The answer to a conversation, by the library."""
    with Client(ring.endpoint) as client:
        text = client.chat([{"role": role, "content": text} for role, text in said], **options).text
    assert text is not None
    return text


# --- generate -----------------------------------------------------------------------------------------------


def test_generate_streams_what_it_would_print_at_once(run: Run, at: tuple[str, str]) -> None:
    whole = run("generate", "Grüße", "--max-tokens", 30, *at)
    stream = run("generate", "Grüße", "--max-tokens", 30, "--stream", *at)
    assert (stream.code, stream.out, stream.err) == (0, whole.out, "")
    lines = [
        json.loads(line)
        for line in run("generate", "Grüße", "--max-tokens", 30, "--stream", "--json", *at).out.splitlines()
    ]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["final"] is True
    assert "".join(line["text"] for line in lines[:-1]) == lines[-1]["text"] == whole.out[:-1]


def test_generate_stops_at_text(run: Run, at: tuple[str, str]) -> None:
    text = run("generate", "Grüße", "--max-tokens", 30, *at).out[:-1]
    stop = text[10:13]
    for flags in ((), ("--stream",)):
        done = run("generate", "Grüße", "--max-tokens", 30, "--stop", "never", "--stop", stop, *flags, *at)
        assert (done.code, done.out) == (0, text[: text.index(stop)] + "\n")


def test_generate_chats(run: Run, ring: StandingRing, at: tuple[str, str]) -> None:
    told = run("generate", "hi", "--chat", "--max-tokens", 12, *at)
    assert told.out == expected(ring, ("user", "hi"), max_tokens=12) + "\n"
    flags = ("--system", "Be ü.", "--reasoning-effort", "low", "--stream")
    told = run("generate", "hi", *flags, "--max-tokens", 12, *at)
    answer = expected(ring, ("system", "Be ü."), ("user", "hi"), max_tokens=12, reasoning_effort="low")
    assert told.out == answer + "\n"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--token-ids", "1", "--chat"), 2, "leave out --chat"),
        (("hi", "--reasoning-effort", "wild"), 2, "'reasoning_effort': expected a number from 0.0 to 0.99"),
        (("hi", "--chat", "--reasoning-effort", "1.5"), 2, "expected a number from 0.0 to 0.99"),
        (("hi", "--stop", ""), 2, "'stop[0]': expected 1 to 256 characters"),
        (("hi", "--stream", "--max-tokens", "x"), 2, "not a number of 1 or more"),
        (("a" * 700, "--stream"), 1, "prompt is 700 tokens; this ring holds 600 a stream"),
    ],
)
def test_generate_refuses_in_one_sentence(
    run: Run, at: tuple[str, str], flags: tuple[str, ...], code: int, words: str
) -> None:
    done = run("generate", *flags, *at)
    assert (done.code, done.out) == (code, "")
    assert words in done.err.strip().splitlines()[-1]
    assert "Traceback" not in done.err


# --- chat through a pipe ------------------------------------------------------------------------------------


def test_a_piped_chat_remembers_what_was_said(
    run: Run, ring: StandingRing, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["Grüß Gott 🙂", "你好", "```py\nx = 1\n```"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f'{said[0]}\n\n{said[1]}\n"""\n{said[2]}\n"""\n'))
    done = run("chat", "--system", "Kurz.", "--max-tokens", 9, *at)
    history = [("system", "Kurz.")]
    answers = []
    for question in said:
        history.append(("user", question))
        answers.append(expected(ring, *history, max_tokens=9))
        history.append(("assistant", answers[-1]))
    assert (done.code, done.out) == (0, "".join(answer + "\n" for answer in answers))
    # On a pipe only what concerns the answers is said.
    assert set(done.err.splitlines()) <= {"(the answer ends after 9 tokens: --max-tokens allows more)"}


def test_reset_and_quit_work_in_a_pipe_and_other_slashes_are_sent(
    run: Run, ring: StandingRing, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/reset\n/usr/bin/env\n/quit\nnever\n"))
    done = run("chat", "--max-tokens", 5, *at)
    answers = [expected(ring, ("user", question), max_tokens=5) for question in ("one", "/usr/bin/env")]
    assert done.out == "".join(answer + "\n" for answer in answers)
    assert "begins anew" in done.err


def test_a_chat_draws_by_its_seed_and_prints_scores(
    run: Run, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-tokens", 6, "--temperature", "3", "--seed", "8", "--logprobs", "1")
    said = []
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
        said.append(run("chat", *flags, *at))
    assert said[0] == said[1]
    scores = [line for line in said[0].err.splitlines() if "  |  " in line]
    assert len(scores) == 6
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert run("chat", "--max-tokens", 6, *at).out != said[0].out


def test_dll_04_a_chat_goes_on_beyond_the_context(
    run: Run, ring: StandingRing, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old turns are left out with a note; no turn fails."""
    turns = 7
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("".join(f"{number}{'x' * 100}\n" for number in range(turns)))
    )
    done = run("chat", "--max-tokens", 40, *at)
    assert done.code == 0
    assert len(done.out.encode()) >= turns * 20
    assert re.search(
        r"\(the context of 600 tokens is full: the oldest (turn is|\d turns are) left out", done.err
    )
    # One question that no context can hold is an error, and says so.
    monkeypatch.setattr("sys.stdin", io.StringIO("y" * 700))
    done = run("chat", *at)
    assert done.code == 1
    assert "this ring holds 600 a stream" in done.err
    # And an answer that fills the context ends with a note.
    monkeypatch.setattr("sys.stdin", io.StringIO("z" * 560 + "\nand now?\n"))
    done = run("chat", "--max-tokens", 560, *at)
    assert done.code == 0
    assert "because the context is full" in done.err
    assert "the oldest turn is left out" in done.err


def test_the_history_is_cut_at_its_beginning() -> None:
    history = History("sys")
    history.add("q1" * 50, "a1", 100)
    history.add("q2", "a2", 160)
    history.add("q3", "", None)
    assert [turn.tokens for turn in history.turns] == [100, 60, 16]
    assert history.cut("q4", 300) == 0
    assert history.cut("q4", 100) == 1
    assert [message["content"] for message in history.messages("q4")] == ["sys", "q2", "a2", "q3", "", "q4"]
    assert history.cut("q" * 3000, 100) == 2
    assert [message["content"] for message in history.messages("q")] == ["sys", "q"]


# --- chat in a terminal -------------------------------------------------------------------------------------


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = os.openpty()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CASCADIA_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cascadia_p2p", *map(str, arguments)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUTF8": "1"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            close_fds=True,
        )
        os.close(slave)
        os.set_blocking(self.master, False)
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def wait(self, words: str, timeout_s: float = 90.0) -> str:
        """What was printed up to these words, since the last call."""
        deadline = time.monotonic() + timeout_s
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except (BlockingIOError, OSError):
                time.sleep(0.01)
        before, _, self.text = self.text.partition(words)
        return before

    def end(self) -> int:
        return self.process.wait(90)


@pytest.fixture
def terminal(at: tuple[str, str]) -> Iterator[Terminal]:
    made = Terminal("chat", "--max-tokens", CONTEXT, *at)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    os.close(made.master)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_ctrl_c_stops_the_answer_and_then_the_command(terminal: Terminal, ring: StandingRing) -> None:
    hello = terminal.wait("> ")
    assert f"fleet '{ring.name}'" in hello
    assert "600 tokens a conversation" in hello
    terminal.type("/what")
    assert "is not known" in terminal.wait("> ")
    with slowed(ring.head):
        terminal.type("go on")
        terminal.wait("go on")
        # Some of the answer must be there.
        ring.until(lambda: ring.head.node.status()["requests"]["pending"] == 1, "the answer is under way")
        time.sleep(0.1)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait("(stopped)")
    ring.until(lambda: ring.head.node.status()["requests"]["pending"] == 0, "the answer is cancelled")
    terminal.wait("> ")
    terminal.type("/reset")
    terminal.wait("begins anew")
    terminal.wait("> ")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_end_of_input_ends_a_chat_well(terminal: Terminal) -> None:
    terminal.wait("> ")
    os.write(terminal.master, b"\x04")
    assert terminal.end() == 0


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_reasoning_apart_and_no_model_steers_it() -> None:
    pieces = [
        StreamPiece(seq=1, text="", reasoning="h\x1b[2Jm", token_ids=(1,)),
        StreamPiece(seq=2, text="", reasoning="!", token_ids=(1,)),
        StreamPiece(seq=3, text="a\x07b\tc\n", token_ids=(1,)),
    ]
    for out, reasoning, shown in (
        (Screen(), True, "\x1b[2mh[2Jm!\x1b[0m\n\nab\tc\n\n"),
        (Screen(), False, "ab\tc\n\n"),
        (io.StringIO(), True, "a\x07b\tc\n\n"),
    ):
        printer = AnswerPrinter(out, reasoning=reasoning)
        for piece in pieces:
            printer.show(piece)
        printer.end()
        assert out.getvalue() == shown


def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'one\n"""two\nthree"""\n"""\n\nfour\n"""\n"""five"""\r\n"""open\nend'
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert list(read_messages("> ")) == ["one", "two\nthree", "four", "five", "open\nend"]


def test_a_chat_with_nobody_is_an_error(run: Run, tmp_path: Path) -> None:
    done = run("chat", "--endpoint", "127.0.0.1:9")
    assert (done.code, done.out) == (6, "")
    assert "answers at 127.0.0.1:9" in done.err
