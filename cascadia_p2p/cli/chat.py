"""`chat`: talk with the model, turn by turn, in a terminal or through a pipe."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field

from pydantic import JsonValue

from cascadia_p2p.cli.generate import add_answer_flags, answer_options
from cascadia_p2p.cli.terminal import (
    AnswerPrinter,
    forgive_encodings,
    open_client,
    print_scores,
    read_messages,
    tell_if_waiting,
    tell_place,
)
from cascadia_p2p.client import ChatOptions, Client, GenerateReply
from cascadia_p2p.config import add_flags, flags_of, load_config
from cascadia_p2p.errors import CascadiaError, ErrorCode, RequestError

PROMPT = "> "
COMMANDS = ("/reset", "/help")
HELP = (
    "/reset forgets the conversation, /quit ends (as Ctrl-D does); Ctrl-C stops an answer, and ends between "
    'them; """ begins and ends a message of several lines'
)

_COMMAND = re.compile(r"/\w*")


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    add_answer_flags(parser, max_tokens=1024)
    parser.add_argument("--hide-reasoning", action="store_true", help="print answers only")
    add_flags(parser, "endpoint", "fleet", "key", "timeout")


def run(args: argparse.Namespace) -> int:
    """Ask each message that is typed or piped, until there is none; 130 when Ctrl-C ended it."""
    config = load_config(flags_of(args), file=args.config)
    forgive_encodings()
    with open_client(config) as client:
        converse(Talk(client, History(args.system), answer_options(args), reasoning=not args.hide_reasoning))
    return 0


def converse(talk: Talk) -> None:
    """Ask each message that is typed or piped, until there is none or /quit."""
    interactive = sys.stdin.isatty()
    talk.begin(greet=interactive)
    for message in read_messages(PROMPT):
        if not message.strip():
            continue
        word = message.strip()
        if word == "/quit":
            break
        if word in COMMANDS or (interactive and _COMMAND.fullmatch(word)):
            talk.command(word)
            continue
        try:
            talk.turn(message)
        except CascadiaError as error:
            if not interactive:
                raise
            _note(str(error))
        except KeyboardInterrupt:
            if not interactive:
                raise
            _note("(stopped)")


@dataclass
class _Turn:
    """A question with its answer, and about how many tokens they add to the conversation."""

    question: str
    answer: str
    tokens: int


@dataclass
class History:
    """The conversation so far, cut at its beginning when the context can not hold all of it.

    Args:
        system: what always stands in front.
    """

    system: str | None = None
    turns: list[_Turn] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, object]]:
        """The conversation with one more question."""
        said: list[dict[str, object]] = []
        if self.system:
            said.append({"role": "system", "content": self.system})
        for turn in self.turns:
            said += [
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            ]
        return [*said, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, total: int | None) -> None:
        """Remember a turn; `total` is the tokens of the whole conversation, if they are known."""
        before = sum(turn.tokens for turn in self.turns)
        tokens = _guess(question) + _guess(answer) if total is None else max(1, total - before)
        self.turns.append(_Turn(question, answer, tokens))

    def cut(self, question: str, room: int) -> int:
        """Forget the oldest turns until the rest and the question take about `room` tokens; how many went."""
        count = 0
        need = _guess(question) + sum(turn.tokens for turn in self.turns)
        while self.turns and need > room:
            need -= self.turns.pop(0).tokens
            count += 1
        return count


class Talk:
    """One conversation with the head.

    Args:
        client: asks it.
        history: what was said.
        options: of every question.
        reasoning: whether a terminal shows it.
    """

    def __init__(
        self, client: Client, history: History, options: ChatOptions, *, reasoning: bool = True
    ) -> None:
        self._client = client
        self._history = history
        self._options = options
        self._reasoning = reasoning
        self._context: int | None = None

    def begin(self, *, greet: bool) -> None:
        """Learn what the ring holds."""
        status = self._client.status()
        self._context = _context_of(status)
        if greet:
            held = f", {self._context} tokens a conversation" if self._context else ""
            _note(f"fleet '{status.get('fleet')}': {status.get('model')}{held}\n{HELP}")

    def command(self, line: str) -> None:
        """Do what a line that begins with a slash asks for."""
        if line == "/reset":
            self._history.turns.clear()
            _note("(the conversation begins anew)")
        else:
            _note(HELP if line == "/help" else f"{line} is not known; {HELP}")

    def turn(self, question: str) -> None:
        """Ask one question and print the answer.

        Raises:
            CascadiaError: there is no answer; the question is forgotten.
            KeyboardInterrupt: it was stopped; what came of the answer is remembered.
        """
        tell_if_waiting(self._client)
        if self._context is not None:
            # An answer needs room too.
            reserve = min(self._options.get("max_tokens", 128), self._context // 4)
            self._tell_cut(self._history.cut(question, self._context - reserve))
        while True:
            try:
                self._ask(question)
                return
            except RequestError as error:
                if error.code is not ErrorCode.CONTEXT_OVERFLOW or not self._history.turns:
                    raise
                self._history.turns.pop(0)
                self._tell_cut(1)

    def _ask(self, question: str) -> None:
        printer = AnswerPrinter(sys.stdout, reasoning=self._reasoning)
        text = ""
        try:
            with self._client.stream(
                messages=self._history.messages(question), on_queued=tell_place, **self._options
            ) as answer:
                for piece in answer:
                    text += piece.text or ""
                    printer.show(piece)
        except KeyboardInterrupt:
            printer.end()
            self._history.add(question, text, None)
            raise
        except CascadiaError:
            if text:
                printer.end()
            raise
        printer.end()
        print_scores(answer.reply, sys.stderr)
        usage = answer.reply.usage
        self._history.add(question, text, usage.prompt_tokens + usage.completion_tokens)
        self._tell_end(answer.reply)

    def _tell_end(self, reply: GenerateReply) -> None:
        """Say why an answer is not complete."""
        if reply.finish_reason != "length":
            return
        if reply.usage.completion_tokens < self._options.get("max_tokens", 128):
            _note(
                "(the answer ends here because the context is full: the next question leaves out old turns)"
            )
        else:
            _note(f"(the answer ends after {reply.usage.completion_tokens} tokens: --max-tokens allows more)")

    def _tell_cut(self, count: int) -> None:
        if count:
            turns = "turn is" if count == 1 else f"{count} turns are"
            size = f" of {self._context} tokens" if self._context else ""
            _note(f"(the context{size} is full: the oldest {turns} left out from here on)")


def _context_of(status: dict[str, JsonValue]) -> int | None:
    """Positions a stream, by the status of a head."""
    promise = status.get("promise")
    context = promise.get("context") if isinstance(promise, dict) else None
    return context if isinstance(context, int) else None


def _guess(text: str) -> int:
    """About how many tokens a text is, before the head has counted."""
    return len(text.encode()) // 3 + 8


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
