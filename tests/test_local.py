"""A ring of processes on this machine, as whoever started it hears of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from cascadia_p2p.local import LocalNode, LocalRing

SAYS = 'import sys; sys.stderr.write(\'{"event": "said"}\\n\')'


def test_the_last_words_of_a_process_are_heard_though_they_are_read_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = LocalRing._read

    def late(ring: LocalRing, node: LocalNode) -> None:
        node.process.wait()
        time.sleep(1.0)
        read(ring, node)

    monkeypatch.setattr(LocalRing, "_read", late)
    with LocalRing(tmp_path, tmp_path) as ring:
        ring.start_node(program=[sys.executable, "-c", SAYS])
        assert ring.wait_for("said", 60.0).node == 0
        assert ring.ended() == "node 0 ended with exit code 0: said"
