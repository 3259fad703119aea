"""The loop of the head's data thread under a virtual clock: first requests, then an answer, then a frame."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from cascadia_p2p.ring.scheduler import StreamRequest
from cascadia_p2p.simulate.drivers import Driver, token_of
from cascadia_p2p.simulate.ring import Journey, VirtualRing
from cascadia_p2p.types import StreamId
from cascadia_p2p.workload import Protocol, Timeline


@dataclass(slots=True)
class _Request:
    start: float
    prompt_tokens: int
    tokens: list[float] = field(default_factory=list)
    ended: bool = False


class Simulation:
    """One level after another on one ring; the clock goes on from each to the next.

    Args:
        driver: decides what goes into the ring.
        ring: at rest.
    """

    def __init__(self, driver: Driver, ring: VirtualRing) -> None:
        self._driver, self._ring = driver, ring
        self._answers: deque[Journey] = deque()
        self._requests: dict[StreamId, _Request] = {}
        self._next_stream = 1
        self.now = 0.0
        self.journeys: list[Journey] = []

    def cohorts(self, streams: int, protocol: Protocol, prompt: int) -> list[list[Timeline]]:
        """Run a level: the times of its requests, cohort by cohort.

        Args:
            streams: at once.
            protocol: how many cohorts, when requests start, how many tokens they ask for.
            prompt: tokens of each prompt.

        Raises:
            RequestError: the ring does not take a request.
            RuntimeError: nothing more would happen, and requests have not ended.
        """
        return [self._cohort(streams, protocol, prompt) for _ in range(protocol.cohorts(streams))]

    def _cohort(self, streams: int, protocol: Protocol, prompt: int) -> list[Timeline]:
        arrivals: deque[tuple[float, StreamRequest]] = deque()
        for place in range(streams):
            stream = StreamId(self._next_stream)
            self._next_stream += 1
            ids = tuple(token_of(stream, position) for position in range(prompt))
            arrivals.append(
                (self.now + protocol.offset_s(place), StreamRequest(stream, ids, protocol.tokens))
            )
        mine = [request.stream for _, request in arrivals]
        self._run(arrivals)
        done = [self._requests.pop(stream) for stream in mine]
        return [Timeline(each.start, tuple(each.tokens), each.prompt_tokens) for each in done]

    def _run(self, arrivals: deque[tuple[float, StreamRequest]]) -> None:
        while True:
            while arrivals and arrivals[0][0] <= self.now:
                start, request = arrivals.popleft()
                self._requests[request.stream] = _Request(start, len(request.prompt))
                self._driver.submit(request, self.now)
            if self._answers and self._answers[0].back <= self.now:
                self._answer()
            elif (load := self._driver.next_frame(self.now)) is not None:
                journey = self._ring.send(load, self.now)
                self.journeys.append(journey)
                self._answers.append(journey)
                self.now = journey.ends[0]
            else:
                coming = min(
                    arrivals[0][0] if arrivals else inf, self._answers[0].back if self._answers else inf
                )
                if coming == inf:
                    break
                self.now = coming
        if open_requests := [stream for stream, each in self._requests.items() if not each.ended]:
            raise RuntimeError(f"nothing happens any more, but {len(open_requests)} requests have not ended")

    def _answer(self) -> None:
        self._answers.popleft()
        for came in self._driver.on_answer(self.now):
            request = self._requests[came.stream]
            if request.ended:
                raise RuntimeError(f"stream {came.stream} got a token behind its last one")
            request.tokens.append(self.now)
            request.ended = came.last
