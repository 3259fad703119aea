"""What the head's scheduler costs a token, alone: no socket, no stage.

For each number of running streams every frame that can go is composed and answered at once, oldest first,
until each stream has its tokens. Prints, and writes as JSON, CPU microseconds of `schedule` and `on_tokens` a
token; the best of several runs counts, levels take turns. The last column is the ratio to the first level.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest
from cascadia_p2p.ring.stagetime import StageTime
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.frames import RECORD, SegmentFlag, Table

FLEET = StageTime(points=((1, 0.040), (2, 0.058), (4, 0.088), (8, 0.134), (9, 0.187), (16, 0.278)))
"""The slowest stage of the published fleet, in seconds."""

PROMPT, STAGES = 33, 11


def answer(plan: Plan) -> Table:
    """The records that a tail would send."""
    asked = plan.segments[plan.segments["flags"] == SegmentFlag.WANT_TOKEN]
    records = np.zeros(len(asked), RECORD)
    records["stream"], records["slot"] = asked["stream"], asked["slot"]
    records["position"] = asked["start"] + asked["rows"]
    records["token"] = 5
    return records


def run(streams: int, tokens: int, kept: int) -> dict[str, float]:
    """Microseconds a token of both calls, and frames, for so many streams of so many tokens."""
    scheduler = Scheduler(Policy(stage_time=FLEET))
    scheduler.open(STAGES, Promise(streams, 4096, 64, kept))
    for number in range(streams):
        prompt = tuple((number * 7 + i) % 1000 for i in range(PROMPT))
        scheduler.submit(StreamRequest(StreamId(number), prompt, tokens), 0.0)
    composing = taking = frames = given = 0
    flight: deque[tuple[int, Table]] = deque()
    while scheduler.running or scheduler.waiting:
        begin = time.thread_time_ns()
        plan = scheduler.schedule(0.0)
        composing += time.thread_time_ns() - begin
        if plan is not None:
            frames += 1
            flight.append((plan.number, answer(plan)))
            continue
        number, records = flight.popleft()
        begin = time.thread_time_ns()
        updates = scheduler.on_tokens(number, records, 0.0)
        taking += time.thread_time_ns() - begin
        given += sum(len(update.tokens) for update in updates)
    assert given == streams * tokens
    return {
        "schedule_us": composing / given / 1e3,
        "on_tokens_us": taking / given / 1e3,
        "frames_a_token": frames / given,
    }


def measure(levels: Sequence[int], tokens: int, kept: int, repeats: int) -> list[dict[str, float]]:
    """The best of `repeats` runs of every level."""
    runs = [[run(level, tokens, kept) for level in levels] for _ in range(repeats)]
    return [
        {"streams": level, "kept": kept, **{name: min(each[i][name] for each in runs) for name in runs[0][i]}}
        for i, level in enumerate(levels)
    ]


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", default="1,8,11,88,176", help="levels, apart by commas")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    wanted = parser.parse_args()
    levels = [int(each) for each in wanted.streams.split(",")]
    found = [row for kept in (0, 64) for row in measure(levels, wanted.tokens, kept, wanted.repeats)]
    first = found[0]["schedule_us"] + found[0]["on_tokens_us"]
    print(f"{'kept':>5} {'streams':>8} {'schedule':>9} {'on_tokens':>10} {'us a token':>11} {'ratio':>6}")
    for row in found:
        both = row["schedule_us"] + row["on_tokens_us"]
        print(
            f"{row['kept']:5.0f} {row['streams']:8.0f} {row['schedule_us']:9.2f} {row['on_tokens_us']:10.2f} "
            f"{both:11.2f} {both / first:6.2f}"
        )
    if wanted.json:
        about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        wanted.json.write_text(
            json.dumps({**about, "tokens": wanted.tokens, "levels": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
