"""One message of every kind, to start from."""

from __future__ import annotations

from typing import Any

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire import messages as m

NODE, RUN = NodeId("00112233445566aa"), Instance("ffeeddccbbaa9988")
EPOCH = Epoch(7, RUN)
PROMISE = Promise(slots=4, context=1024, rows=64)
ADDRESS = Endpoint("192.168.1.20", 7600)
WHO = {"node": NODE, "instance": RUN}


def introduction(**changes: Any) -> dict[str, Any]:
    """The fields of a greeting."""
    return WHO | {
        "software": "0.1.0", "fleet": "office", "host": "desk-3", "fingerprint": "ab" * 32, "model": "tiny",
        "sources": ("", "0123456789abcdef"), "shards": 3, "layers": 6, "hidden": 64,
        "holds": (0, 1, 2), "device": "CPU", "precision": "fine", "cache": "bf16", "pid": 4711,
        "claim": m.Claim(shard=1, state=m.ClaimState.LOADED, age_s=1.5), "promise": PROMISE,
        "control": ADDRESS, "data": Endpoint("fe80::1%eth0", 7601), "epoch": 6,
        "peers": (Endpoint("192.168.1.21", 7600),),
    } | changes  # fmt: skip


def control_messages() -> list[m.ControlMessage]:
    """What nodes say to each other."""
    member = m.Member(node=NODE, instance=RUN, shard=0, data=ADDRESS)
    return [
        m.Greeting(**introduction()),
        m.Welcome(**introduction(client=ADDRESS, ring=EPOCH)),
        m.Refusal(**WHO, code=m.RefusalCode.FLEET, message="two fleets", software="0.1.0"),
        m.State(**WHO, claim=m.Claim(), holds=(1,), epoch=3, progress=0.5, pace=((1, 0.01), (8, 0.02))),
        m.Assign(**WHO, shard=0),
        m.Form(**WHO, epoch=EPOCH, members=(member,), promise=PROMISE),
        m.Ready(**WHO, epoch=EPOCH),
        m.Reject(**WHO, epoch=EPOCH, reason="an older head lives"),
        m.Open(**WHO, epoch=EPOCH, promise=PROMISE),
        m.Close(**WHO, epoch=EPOCH, reason="node lost"),
        m.Beat(**WHO, epoch=7, progress=2**62, frames_in=3, frames_out=2, waiting_send=True, probe_seen=9),
        m.Bye(**WHO, reason="Ctrl-C"),
        m.StatusQuery(),
        m.StatusReport(**WHO, body={"ring": None, "nodes": [1, {"a": "b"}]}),
        m.Clients(**WHO, digest="f" * 32, sealed='{"clients":[],"mac":"00"}'),
        m.Journal(
            **WHO,
            session=2,
            number=1,
            gone=(1,),
            begun=(m.Begun(number=7, key="0f" * 16, prompt=2, max_tokens=9, stop=("END",), logprobs=1),),
            grown=((7, (5, 6, 8), ((-0.5, ((8, -0.5),)),)),),
            ended=((7, m.FinishReason.STOP, 0, 1.5),),
            whole=True,
        ),
        m.JournalAck(**WHO, session=2, number=1),
    ]


def requests() -> list[m.ClientRequest]:
    """What clients ask."""
    chat = (m.ChatMessage(role="system", content="be kind"), m.ChatMessage(role="user", content="hello"))
    return [
        m.GenerateRequest(prompt="hi", max_tokens=3, stop_token_ids=(1, 2), ignore_eos=True, id="a"),
        m.GenerateRequest(
            messages=chat, stream=True, stop=("\n",), tools=({"name": "f"},), reasoning_effort=0.5
        ),
        m.GenerateRequest(token_ids=(5, 6), temperature=1.0, top_k=40, top_p=0.9, seed=2**64 - 1, logprobs=3),
        m.CancelRequest(id="a"),
        m.AckRequest(id="a", seq=7),
        m.StatusRequest(id="b"),
    ]


def replies() -> list[m.ClientReply]:
    """What a head answers."""
    timings = m.Timings(queue_s=0.1, ttft_s=0.2, decode_tok_s=9.5)
    usage = m.Usage(prompt_tokens=2, completion_tokens=1)
    error = RequestError(ErrorCode.OVERLOADED, "too many", request_id="a", retry_after_s=2.0)
    return [
        m.GenerateReply(
            id="a", text="b", token_ids=(7,), finish_reason=m.FinishReason.STOP, usage=usage, timings=timings
        ),
        m.ErrorReply.of(error),
        m.StreamPiece(id="a", seq=1, text="b", token_ids=(7,)),
        m.CancelReply(id="a", cancelled=True),
        m.StatusReply(id="a", status={"ring": "open"}),
        m.QueueNotice(id="a", queued=3),
    ]
