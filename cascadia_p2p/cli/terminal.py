"""What the commands that talk share: printing an answer as it comes, and reading what is typed or piped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Final, TextIO

from pydantic import JsonValue

from cascadia_p2p.client import Client, GenerateReply, StreamPiece, node_keys
from cascadia_p2p.config import Config
from cascadia_p2p.errors import NotAdmittedError, RequestError, UnreachableError
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import ScoredToken

__all__ = [
    "AnswerPrinter",
    "forgive_encodings",
    "open_client",
    "print_scores",
    "read_messages",
    "tell_if_waiting",
    "tell_notice",
    "tell_place",
]

ASK_S: Final = 5.0
"""How long a node has to say whether it is the head, in seconds."""

_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_QUOTES: Final = '"""'


class AnswerPrinter:
    """Prints one answer piece by piece: its text, and on a terminal the reasoning before it, dimmed.

    Args:
        out: where to.
        reasoning: whether a terminal shows the reasoning.
    """

    def __init__(self, out: TextIO, *, reasoning: bool = True) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._reasoning = reasoning and self._terminal
        self._dim = False

    def show(self, piece: StreamPiece) -> None:
        """Print what a piece adds; a notice goes to standard error."""
        if piece.notice is not None:
            print(f"\n{self._harmless(piece.notice)}", file=sys.stderr, flush=True)
        if piece.reasoning and self._reasoning:
            self._write(("" if self._dim else _DIM) + self._harmless(piece.reasoning))
            self._dim = True
        if piece.text:
            self._brighten("\n\n")
            self._write(self._harmless(piece.text))
        elif piece.text is None:
            # A model without a tokenizer.
            self._write("".join(f"{token} " for token in piece.token_ids))

    def end(self) -> None:
        """The answer is over: end its line."""
        self._brighten("")
        self._write("\n")

    def _brighten(self, between: str) -> None:
        if self._dim:
            self._dim = False
            self._write(_RESET + between)

    def _harmless(self, text: str) -> str:
        """What a model writes must not steer a terminal."""
        return harmless(text) if self._terminal else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def harmless(text: str) -> str:
    """The text without what steers a terminal."""
    return _CONTROLS.sub("", text)


def print_scores(reply: GenerateReply, out: TextIO) -> None:
    """Print a line a token, if logprobs were asked for: its own, its text, and the likeliest in its place."""
    for score in reply.logprobs or ():
        named = "".join(f"  {each.logprob:.4f} {_named(each)}" for each in score.top_logprobs or ())
        print(f"{score.logprob:9.4f} {_named(score)}" + (f"  |{named}" if named else ""), file=out)


def _named(token: ScoredToken) -> str:
    # Quoted, so that white space shows and control characters do nothing.
    return str(token.token_id) if token.token is None else repr(token.token)


def forgive_encodings() -> None:
    """Let no character that a terminal or pipe can not carry end a command."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def tell_if_waiting(client: Client) -> None:
    """Say on standard error what the ring waits for, when an answer has to wait for it."""
    status = client.status()
    if status.get("state") != "open":
        missing = status.get("waiting_for") or "its nodes to form it"
        print(
            f"the ring is not open yet: it waits for {missing}; the answer comes when it is", file=sys.stderr
        )


def open_client(config: Config) -> Client:
    """A client of the head: found by mDNS, at the address that was given, or known to the node that is there.

    Raises:
        UnreachableError: nobody is at that address, or a node that knows of no head.
    """
    endpoint, seconds = config.endpoint, min(ASK_S, config.timeout)
    if endpoint is not None:
        try:
            with Client(endpoint, fleet=config.fleet, timeout_s=seconds, key=config.key) as client:
                client.status()
        except (RequestError, NotAdmittedError) as error:
            # So a control port answers what clients ask: in words, or by its lock.
            keys = node_keys(config.fleet, config.key)
            if isinstance(error, NotAdmittedError) and keys is None:
                raise
            endpoint = _head_of(asyncio.run(ask_node(endpoint, seconds, keys)), endpoint)
    return Client(endpoint, fleet=config.fleet, timeout_s=config.timeout, key=config.key)


def _head_of(status: Mapping[str, JsonValue], asked: Endpoint) -> Endpoint:
    nodes = status.get("nodes")
    for node in nodes if isinstance(nodes, list) else []:
        if isinstance(node, dict) and node.get("client"):
            return Endpoint.parse(str(node["client"]))
    raise UnreachableError(
        f"the node at {asked} knows of no head that serves clients: the ring waits for "
        f"{status.get('waiting_for') or 'its nodes to form it'}"
    )


def tell_place(place: int) -> None:
    """Say on standard error how many requests are answered first."""
    before = {1: "it is the next one", 2: "one request is before it"}
    words = before.get(place, f"{place - 1} requests are before it")
    print(f"the ring is busy: the request waits for a free slot, {words}", file=sys.stderr, flush=True)


def tell_notice(words: str) -> None:
    """Say on standard error why the answer pauses."""
    print(harmless(words) if sys.stderr.isatty() else words, file=sys.stderr, flush=True)


def read_messages(prompt: str) -> Iterator[str]:
    """What a person types, or what a pipe holds: a message a line, or several lines between triple quotes.

    Args:
        prompt: shown before each message on a terminal.
    """
    lines = _typed(prompt) if sys.stdin.isatty() else (line.rstrip("\r\n") for line in sys.stdin)
    for line in lines:
        if not line.lstrip().startswith(_QUOTES):
            yield line
            continue
        block = [line.lstrip().removeprefix(_QUOTES)]
        while not block[-1].rstrip().endswith(_QUOTES):
            following = next(lines, None)
            if following is None:
                break
            block.append(following)
        yield "\n".join(block).rstrip().removesuffix(_QUOTES).strip("\n")


def _typed(prompt: str) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        # Its presence alone gives `input` editing and history.
        importlib.import_module("readline")
    with contextlib.suppress(EOFError):
        while True:
            yield input(prompt)
