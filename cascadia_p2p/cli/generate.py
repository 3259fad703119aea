"""`generate`: send one prompt to the ring and print the answer."""

from __future__ import annotations

import argparse
import sys
from typing import cast

from cascadia_p2p.cli.terminal import (
    AnswerPrinter,
    forgive_encodings,
    open_client,
    print_scores,
    tell_if_waiting,
    tell_notice,
    tell_place,
)
from cascadia_p2p.client import ChatOptions, Options, Prompt, Stream
from cascadia_p2p.config import add_flags, flags_of, load_config
from cascadia_p2p.errors import CascadiaError, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads it from stdin"
    )
    parser.add_argument("--token-ids", metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is what a user says: print the model's answer to it"
    )
    add_answer_flags(parser, max_tokens=128)
    parser.add_argument(
        "--stop-token-ids", metavar="1,2,3", help="ids that end the answer, besides the model's own"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the model's end of sequence")
    parser.add_argument("--stream", action="store_true", help="print the answer as it comes")
    parser.add_argument(
        "--json", action="store_true", help="print the whole reply as JSON; with --stream a line a piece"
    )
    add_flags(parser, "endpoint", "fleet", "key", "timeout")


def add_answer_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Give a command the flags of answers."""
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        default=max_tokens,
        metavar="N",
        help=f"new tokens, at most (default: {max_tokens})",
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument(
        "--reasoning-effort",
        metavar="X",
        help="how much to reason: 0.0 to 0.99, or none, low, medium, high, max",
    )
    parser.add_argument(
        "--temperature",
        type=_real,
        metavar="X",
        help="draw tokens by chance; 0 takes the likeliest (default)",
    )
    parser.add_argument(
        "--top-k", type=_whole, metavar="N", help="draw among the N likeliest tokens only; 0 for all"
    )
    parser.add_argument(
        "--top-p", type=_real, metavar="X", help="draw among the likeliest tokens of this share only: 0.9"
    )
    parser.add_argument(
        "--seed", type=_whole, metavar="N", help="with the same seed the same tokens are drawn"
    )
    parser.add_argument(
        "--logprobs",
        type=_whole,
        metavar="N",
        help="print each token's log probability to stderr, and the N likeliest tokens: 0 to 20",
    )


def answer_options(args: argparse.Namespace) -> ChatOptions:
    """What the flags of `add_answer_flags` ask for."""
    options: ChatOptions = {"max_tokens": args.max_tokens}
    if args.stop:
        options["stop"] = args.stop
    if args.reasoning_effort is not None:
        try:
            options["reasoning_effort"] = float(args.reasoning_effort)
        except ValueError:
            options["reasoning_effort"] = args.reasoning_effort
    for name in ("temperature", "top_k", "top_p", "seed", "logprobs"):
        if (value := getattr(args, name)) is not None:
            options[name] = value
    return options


def run(args: argparse.Namespace) -> int:
    """Ask, and print the text (token ids when the model has no tokenizer)."""
    config = load_config(flags_of(args), file=args.config)
    forgive_encodings()
    prompt, options = _prompt(args), answer_options(args)
    if args.stop_token_ids:
        options["stop_token_ids"] = _ids(args.stop_token_ids, "--stop-token-ids")
    if args.ignore_eos:
        options["ignore_eos"] = True
    messages = _messages(args, prompt)
    with open_client(config) as client:
        tell_if_waiting(client)
        if args.stream:
            _print_pieces(
                client.stream(
                    None if messages else prompt, messages=messages, on_queued=tell_place, **options
                ),
                args.json,
            )
            return 0
        reply = (
            client.chat(messages, on_queued=tell_place, on_notice=tell_notice, **options)
            if messages is not None
            else client.generate(
                prompt, on_queued=tell_place, on_notice=tell_notice, **cast(Options, options)
            )
        )
    if args.json:
        print(reply.model_dump_json(exclude_none=True))
    else:
        print(reply.text if reply.text is not None else ",".join(map(str, reply.token_ids)), flush=True)
        print_scores(reply, sys.stderr)
    return 0


def _print_pieces(answer: Stream, as_json: bool) -> None:
    printer = AnswerPrinter(sys.stdout)
    shown = False
    try:
        with answer:
            for piece in answer:
                shown = not as_json
                if as_json:
                    print(piece.model_dump_json(exclude_none=True), flush=True)
                else:
                    printer.show(piece)
    except CascadiaError:
        if shown:
            printer.end()
        raise
    if as_json:
        print(answer.reply.model_dump_json(exclude_none=True))
    else:
        printer.end()
        print_scores(answer.reply, sys.stderr)


def _messages(args: argparse.Namespace, prompt: Prompt) -> list[dict[str, object]] | None:
    """The conversation, when flags make the prompt one."""
    if not args.chat and args.system is None and args.reasoning_effort is None:
        return None
    if not isinstance(prompt, str):
        raise UsageError(
            "--token-ids is a prompt as it is: leave out --chat, --system and --reasoning-effort"
        )
    said: list[dict[str, object]] = [{"role": "user", "content": prompt}]
    return said if args.system is None else [{"role": "system", "content": args.system}, *said]


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if (args.prompt is None) == (args.token_ids is None):
        raise UsageError("give either PROMPT or --token-ids 1,2,3")
    if args.token_ids is not None:
        return _ids(args.token_ids, "--token-ids")
    return sys.stdin.read() if args.prompt == "-" else str(args.prompt)


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} '{text}': expected numbers with commas between them, as in 1,2,3") from None


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 1 or more")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
