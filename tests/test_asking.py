"""When a client asks again after its head was lost, and when it gives a request up."""

from __future__ import annotations

import pytest

from cascadia_p2p.asking import HOLD_BACK_S, QUEUED, Flow, Patience, make_request, unnumbered
from cascadia_p2p.errors import ErrorCode, HeadLostError, RequestError, UnreachableError
from cascadia_p2p.wire.client import FinishReason, GenerateReply, QueueNotice, StreamPiece, Timings, Usage
from cascadia_p2p.wire.model import encode

LOST = HeadLostError("the head was lost")
TOKEN = StreamPiece(id="a", seq=1, text="a", token_ids=(5,))
NOTICE = StreamPiece(id="a", seq=2, text="", token_ids=(), notice="a pause")


def patience() -> Patience:
    return Patience(None, retry=True, whole=False)


def test_a_request_with_which_two_heads_were_lost_is_given_up() -> None:
    each = patience()
    assert each.hold_back_s == 0.0
    each.asked()
    assert each.return_s(LOST) > 0
    assert HOLD_BACK_S <= each.hold_back_s <= 3 * HOLD_BACK_S
    # Nobody is there for a while, and a connection ends before the request was sent.
    assert each.return_s(UnreachableError("nobody there")) > 0
    assert each.return_s(LOST) > 0
    each.asked()
    # A place in the queue and a notice are no tokens.
    each.heard(None)
    each.heard(NOTICE)
    with pytest.raises(RequestError, match="2 heads were lost while they had this request") as ended:
        each.return_s(LOST)
    assert ended.value.code is ErrorCode.INTERNAL


def test_a_request_behind_others_in_the_queue_is_in_no_doubt_a_few_times() -> None:
    each = patience()
    for _ in range(QUEUED):
        each.asked()
        each.heard(None)
        assert each.return_s(LOST, 2) > 0
        assert each.hold_back_s == 0.0
    # After so many that may be an old word. Nor is who was next in no doubt.
    each.asked()
    assert each.return_s(LOST, 2) > 0
    assert each.hold_back_s > 0.0
    each.asked()
    with pytest.raises(RequestError, match="2 heads were lost"):
        each.return_s(LOST, 1)


def test_the_place_in_the_queue_holds_until_the_answer_begins() -> None:
    flow = Flow(make_request([1], None, {}), None)
    assert flow.place == 0
    assert flow.take(encode(QueueNotice(id=flow.request.id, queued=3))) is None
    assert flow.place == 3
    flow.take(encode(StreamPiece(id=flow.request.id, seq=1, text="", token_ids=(5,))))
    assert flow.place == 0


def test_a_token_clears_a_request() -> None:
    each = patience()
    for _ in range(5):
        each.asked()
        each.heard(TOKEN)
        assert each.return_s(LOST) > 0
        assert each.hold_back_s == 0.0
        each.asked()
        assert each.return_s(LOST) > 0
        assert each.hold_back_s > 0.0
    each.asked()
    with pytest.raises(RequestError):
        each.return_s(LOST)


def test_a_connection_that_this_side_ends_is_no_fault_of_the_request() -> None:
    each = patience()
    for _ in range(5):
        each.asked()
        assert each.return_s(HeadLostError("another call hung up", hung_up=True)) > 0
        assert each.hold_back_s == 0.0
        # Nor is a loss before it is asked again.
        assert each.return_s(LOST) > 0
        assert each.hold_back_s == 0.0


@pytest.mark.parametrize(
    ("options", "pieces"), [({}, True), ({"logprobs": False}, True), ({"logprobs": 0}, False)]
)
def test_a_whole_answer_is_taken_in_pieces_where_it_can_be_taken_up_again(
    options: dict[str, int], pieces: bool
) -> None:
    request = make_request([1], None, options)  # type: ignore[arg-type]
    assert (request.stream, request.acks) == (pieces, pieces)
    assert request.key is not None


def test_a_reader_of_the_whole_sees_no_numbers() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    timings = Timings(queue_s=0.0, ttft_s=0.1, decode_tok_s=None)
    reply = GenerateReply(
        id="a",
        token_ids=(5,),
        finish_reason=FinishReason.LENGTH,
        usage=usage,
        timings=timings,
        seq=3,
        final=True,
    )
    assert unnumbered(reply).model_dump(exclude_none=True).keys() & {"seq", "final"} == set()
