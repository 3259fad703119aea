"""Which stage or hop is blamed, from counters alone."""

from __future__ import annotations

import pytest

from cascadia_p2p.ring.watch import Blame, HopWatch
from cascadia_p2p.wire.messages import Beat

LIMIT = 5.0


def beat(progress: int = 0, taken: int = 0, sent: int = 0, *, waiting: bool = False, probe: int = 0) -> Beat:
    return Beat(
        node="1" * 16,  # type: ignore[arg-type]
        instance="1" * 16,  # type: ignore[arg-type]
        epoch=1,
        progress=progress,
        frames_in=taken,
        frames_out=sent,
        waiting_send=waiting,
        probe_seen=probe,
    )


class Ring:
    def __init__(self, stages: int = 3) -> None:
        self.now = 0.0
        self.watch = HopWatch(stages, 0.0)

    def run(self, seconds: float, *beats: Beat, ticking: tuple[int, ...] = ()) -> Blame | None:
        """Hand in the same beats for some seconds, with the progress of some stages going on."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            for stage, each in enumerate(beats):
                ticks = each.progress + (round(self.now * 10) if stage in ticking else 0)
                self.watch.update(stage, each.model_copy(update={"progress": ticks}), self.now)
            blame = self.watch.blame(lambda since: self.now - since, LIMIT)
            if blame is not None:
                return blame
        return None


def test_an_idle_ring_is_not_stuck() -> None:
    assert Ring().run(60, beat(), beat(), beat()) is None
    assert Ring().run(60, beat(9, 4, 4), beat(9, 4, 4), beat(9, 4, 4)) is None


def test_a_stage_that_took_a_frame_and_does_not_tick_is_stuck() -> None:
    blame = Ring().run(60, beat(1, 0, 1), beat(1, 1, 0), beat())
    assert blame is not None
    assert (blame.stage, blame.hop) == (1, False)
    assert blame.seconds == pytest.approx(LIMIT, abs=0.15)


def test_slow_is_not_stuck() -> None:
    assert Ring().run(60, beat(1, 0, 4), beat(1, 1, 0), beat(), ticking=(1,)) is None


def test_a_frame_that_does_not_arrive_names_the_hop() -> None:
    blame = Ring().run(60, beat(5, 2, 3), beat(5, 3, 3), beat(5, 2, 2))
    assert blame is not None
    assert (blame.stage, blame.hop) == (2, True)


def test_a_token_frame_that_does_not_arrive_names_the_hop_to_the_head() -> None:
    blame = Ring().run(60, beat(5, 2, 3), beat(5, 3, 3), beat(5, 3, 3))
    assert blame is not None
    assert (blame.stage, blame.hop) == (0, True)


def test_a_sender_that_can_not_send_blames_the_far_end() -> None:
    blame = Ring().run(60, beat(5, 2, 3), beat(5, 3, 2, waiting=True), beat(5, 2, 2))
    assert blame is not None
    assert (blame.stage, blame.hop) == (2, True)


def test_time_that_does_not_count_blames_nobody() -> None:
    ring = Ring()
    assert ring.run(LIMIT - 0.2, beat(1, 0, 1), beat(1, 1, 0), beat()) is None
    assert ring.watch.blame(lambda since: 0.0, LIMIT) is None


def test_a_ring_of_one_has_no_hop() -> None:
    assert Ring(1).run(60, beat(5, 0, 3)) is None


def test_the_first_stage_that_did_not_see_the_probe_is_named() -> None:
    ring = Ring()
    assert ring.watch.unseen(7) == 1
    ring.run(0.1, beat(probe=7), beat(probe=7), beat(probe=6))
    assert ring.watch.unseen(7) == 2
    ring.run(0.1, beat(probe=7), beat(probe=8), beat(probe=7))
    assert ring.watch.unseen(7) == 0
