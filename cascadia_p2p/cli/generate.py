"""`generate`: send one prompt to the ring and print the answer."""

from __future__ import annotations

import argparse
import sys

from cascadia_p2p.client import Client
from cascadia_p2p.config import add_flags, flags_of, load_config
from cascadia_p2p.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads it from stdin"
    )
    parser.add_argument("--token-ids", metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument(
        "--max-tokens", type=_positive, default=128, metavar="N", help="new tokens, at most (default: 128)"
    )
    parser.add_argument(
        "--stop-token-ids", metavar="1,2,3", help="ids that end the answer, besides the model's own"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the model's end of sequence")
    parser.add_argument("--json", action="store_true", help="print the whole reply as JSON")
    add_flags(parser, "endpoint", "fleet", "timeout")


def run(args: argparse.Namespace) -> int:
    """Ask, and print the text (token ids when the model has no tokenizer)."""
    config = load_config(flags_of(args), file=args.config)
    prompt = _prompt(args)
    with Client(config.endpoint, fleet=config.fleet, timeout_s=config.timeout) as client:
        reply = client.generate(
            prompt,
            max_tokens=args.max_tokens,
            stop_token_ids=_ids(args.stop_token_ids, "--stop-token-ids") if args.stop_token_ids else (),
            ignore_eos=args.ignore_eos,
        )
    if args.json:
        print(reply.model_dump_json(exclude_none=True))
    else:
        print(reply.text if reply.text is not None else ",".join(map(str, reply.token_ids)))
    return 0


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
