from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from cascadia_p2p.errors import ErrorCode, RequestError, WireError
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire import PROTOCOL, control
from cascadia_p2p.wire import messages as m
from cascadia_p2p.wire.client import MAX_REQUEST_BYTES, MAX_VALUES
from cascadia_p2p.wire.model import count_openings, count_values, encode_flat, explain

NODE = NodeId("00112233445566aa")
RUN = Instance("ffeeddccbbaa9988")
EPOCH = Epoch(7, RUN)
PROMISE = Promise(slots=4, context=1024, rows=64)
ADDRESS = Endpoint("192.168.1.20", 7600)
WHO = {"node": NODE, "instance": RUN}


def introduction() -> dict[str, object]:
    return dict(
        WHO,
        software="0.1.0",
        fleet="office",
        host="desk-3",
        fingerprint="ab" * 32,
        sources=["", "0123456789abcdef"],
        model="tiny",
        shards=11,
        layers=66,
        hidden=6144,
        holds=[3, 4],
        claim=m.Claim(shard=3, state=m.ClaimState.LOADED, age_s=1.5),
        promise=PROMISE,
        control=ADDRESS,
        data=Endpoint("fe80::1%eth0", 7601),
        epoch=6,
        device="CPU",
        precision="fine",
        cache="bf16",
        pid=4711,
    )


MESSAGES = [
    m.Greeting(**introduction()),
    m.Welcome(**introduction(), client=ADDRESS),
    m.Refusal(**WHO, code=m.RefusalCode.FLEET, message="fleet 'a' meets fleet 'b'", software="0.1.0"),
    m.State(**WHO, claim=m.Claim(), holds=[1], epoch=3, progress=0.5, standby=True),
    m.State(**WHO, claim=m.Claim(), layer_s=0.002, pace=[(1, 0.011), (8, 0.018), (64, 0.5)]),
    m.Assign(**WHO, shard=0),
    m.Form(**WHO, epoch=EPOCH, members=[m.Member(**WHO, shard=0, data=ADDRESS)], promise=PROMISE),
    m.Ready(**WHO, epoch=EPOCH),
    m.Reject(**WHO, epoch=EPOCH, reason="an older head lives"),
    m.Open(**WHO, epoch=EPOCH, promise=PROMISE),
    m.Close(**WHO, epoch=EPOCH, reason="node lost"),
    m.Beat(**WHO, epoch=7, progress=2**62, frames_in=3, frames_out=2, waiting_send=True, probe_seen=9),
    m.Bye(**WHO, reason="Ctrl-C"),
    m.StatusQuery(),
    m.StatusReport(**WHO, body={"ring": None, "nodes": [1, {"a": "b"}]}),
    m.Clients(digest="0123456789abcdef" * 2),
    m.Clients(**WHO, digest="f" * 32, sealed='{"clients":[],"mac":"00"}'),
    m.Journal(
        **WHO,
        session=2,
        number=1,
        gone=[3],
        begun=[
            m.Begun(
                number=4,
                client="k" * 40,
                key="0f" * 16,
                prompt=2,
                max_tokens=64,
                stop=["\n"],
                stop_ids=[0, 2],
                logprobs=1,
                temperature=0.7,
                top_k=40,
                top_p=0.9,
                seed=2**64 - 1,
            )
        ],
        grown=[(4, [7, 8], []), (4, [9], [(-0.5, [(9, -0.5)])])],
        ended=[(4, m.FinishReason.STOP, 1, 0.25)],
        whole=True,
    ),
    m.JournalAck(**WHO, session=2, number=1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.type)
def test_control_messages_survive_the_wire(message: m.ControlMessage) -> None:
    assert m.decode_control(m.encode(message)) == message


def test_a_padded_status_query_is_a_status_query() -> None:
    long = m.StatusQuery(padding="0" * (1 << 17))
    assert m.decode_control(m.encode(long)) == long
    assert b"padding" not in m.encode(m.StatusQuery())


def changed(message: m.ControlMessage, **fields: object) -> bytes:
    return orjson.dumps({**orjson.loads(m.encode(message)), **fields})


@pytest.mark.parametrize("kind", ["hello", "welcome", "refusal"])
@pytest.mark.parametrize("version", [PROTOCOL - 1, PROTOCOL + 1, 2**40])
def test_exo_19_other_version_is_a_value(kind: str, version: int) -> None:
    data = orjson.dumps(
        {
            "type": kind,
            "protocol": version,
            "software": "9.9\x1b[2J" + "x" * 90,
            "new": [1],
            "message": "no\n",
        }
    )
    other = m.decode_control(data)
    assert isinstance(other, m.OtherVersion)
    assert (other.type, other.protocol) == (kind, version)
    assert other.software.startswith("9.9?[2J")
    assert len(other.software) == 64
    assert other.message == "no?"
    assert str(version) in str(other)
    assert str(PROTOCOL) in str(other)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "JSON"),
        (b"\xff\x00", "JSON"),
        (b"[]", "object"),
        (b"{}", "'type'"),
        (b'{"type": 3}', "'type'"),
        (b'{"type": "nonsense"}', "nonsense"),
        (b"[" * 100_000, "JSON"),
        (b'{"type":"beat","x":' + b"[" * 500 + b"]" * 500 + b"}", "beat"),
        (b" " * (1 << 19), "too long"),
        (changed(MESSAGES[0], surprise=1), "surprise"),
        (changed(m.StatusQuery(), padding="0" * ((1 << 17) + 1)), "padding"),
        (changed(MESSAGES[0], node="../../etc"), "node"),
        (changed(MESSAGES[0], node=NODE + "\n"), "node"),
        (changed(MESSAGES[0], fleet="a\x1b[31m"), "fleet"),
        (changed(MESSAGES[0], shards="11"), "shards"),
        (changed(MESSAGES[0], shards=True), "shards"),
        (changed(MESSAGES[0], holds=[0] * 1025), "holds"),
        (changed(MESSAGES[0], protocol="1"), "protocol"),
        (changed(MESSAGES[0], control={"host": "10.0.0.1", "port": 0}), "control"),
        (changed(MESSAGES[0], control={"host": "10.0.0.1", "port": 1, "extra": 1}), "control"),
        (changed(MESSAGES[0], promise={"slots": 0, "context": 1, "rows": 1}), "promise"),
        (changed(MESSAGES[6], epoch={"counter": -1, "head": RUN}), "epoch"),
        (changed(MESSAGES[6], epoch={"counter": 1, "head": "x"}), "epoch"),
        (changed(MESSAGES[6], members=[]), "members"),
        (changed(MESSAGES[11], progress=2**63), "progress"),
        (changed(MESSAGES[3], progress=1.5), "progress"),
        (changed(MESSAGES[17], number=-1), "number"),
        (changed(MESSAGES[17], gone=["3"]), "gone"),
        (changed(MESSAGES[17], grown=[[4, [2**31], []]]), "grown"),
        (changed(MESSAGES[17], grown=[[4, [7]]]), "grown"),
        (changed(MESSAGES[17], ended=[[4, "never", 0, 0.0]]), "ended"),
        (changed(MESSAGES[17], begun=[{"number": 4, "key": "0f" * 16, "prompt": 0}]), "begun"),
    ],
)
def test_control_refusals_name_the_field(data: bytes, words: str) -> None:
    with pytest.raises(WireError) as caught:
        m.decode_control(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


LISTS = [
    (3, "holds", []),
    (3, "pace", []),
    (0, "peers", []),
    (0, "sources", []),
    (6, "members", []),
    *((17, field, []) for field in ("gone", "begun", "grown", "ended")),
    (17, "grown", [4, [7]]),
    (17, "grown", [4, [], [[-0.5]]]),
    (17, "begun", {"number": 4, "key": "0f" * 16, "prompt": 2, "max_tokens": 3, "stop_ids": [""] * 20}),
]


@pytest.mark.parametrize(("index", "field", "wrong"), LISTS)
def test_a_list_of_wrong_items_costs_a_few_errors(
    index: int, field: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error that is made takes as long as many items."""
    errors = []

    def counted(error: ValidationError) -> str:
        errors.append(error.error_count())
        return explain(error)

    monkeypatch.setattr(control, "explain", counted)
    with pytest.raises(WireError, match=field):
        m.decode_control(changed(MESSAGES[index], **{field: [wrong] * 50}))
    assert len(errors) == 1
    assert errors[0] <= 10


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "a b",
            "/etc",
            "-x",
            "*",
            "[",
            "ü" * 60,
            "x" * 70,
            "a..b",
            "127.0.0.1%",
            "1.2.3.4;5",
            "10.0.0.1%lo",
        ),
        *("fe80::1%", "fe80::1%a b", "fe80::1%ü", "fe80::1%a]b", "fe80::1%" + "x" * 250),
        *("localhost", "desk-3", "desk-3.example"),
    ],
)
def test_addresses_that_no_socket_connects_to_are_refused_wherever_they_stand(host: str) -> None:
    """ZeroMQ refuses some of them with an error, and of names it keeps its only thread waiting."""
    told = {"host": host, "port": 7600}
    for index, field in ((0, "control"), (0, "data"), (1, "client"), (3, "client")):
        with pytest.raises(WireError, match=f"{field}.: an endpoint needs an IP address"):
            m.decode_control(changed(MESSAGES[index], **{field: told}))
    with pytest.raises(WireError, match=r"peers.*an IP address"):
        m.decode_control(changed(MESSAGES[0], peers=[told]))
    member = {**WHO, "shard": 0, "data": told}
    with pytest.raises(WireError, match=r"members.*an IP address"):
        m.decode_control(changed(MESSAGES[6], members=[member]))


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%eth0", "fe80::1%enp0s31f6.20", "fe80::1%12"])
def test_addresses_are_taken_as_sockets_spell_them(host: str) -> None:
    told = {"host": host, "port": 7600}
    message = m.decode_control(changed(MESSAGES[0], control=told, data=told, peers=[told]))
    assert isinstance(message, m.Greeting)
    assert message.control == message.data == message.peers[0] == Endpoint(host, 7600)
    assert Endpoint.parse(str(message.control)) == message.control


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
json_bytes = json_values.map(lambda value: json.dumps(value).encode())


@given(st.binary(max_size=200) | json_bytes)
@example(b'{"type":"hello","protocol":true}')
@example(b'{"type":"hello","protocol":1e400}')
def test_any_bytes_give_a_control_message_or_a_wire_error(data: bytes) -> None:
    try:
        value = m.decode_control(data)
    except WireError:
        return
    assert value is not None


@given(st.sampled_from(MESSAGES), st.data())
def test_any_changed_field_gives_a_message_or_a_wire_error(
    message: m.ControlMessage, data: st.DataObject
) -> None:
    raw = orjson.loads(m.encode(message))
    field = data.draw(st.sampled_from(sorted(raw)))
    raw[field] = data.draw(json_values)
    try:
        value = m.decode_control(json.dumps(raw).encode())
    except WireError:
        return
    assert isinstance(value, m.OtherVersion) or m.decode_control(m.encode(value)) == value


def request_or_error(data: bytes) -> m.ClientRequest | RequestError:
    try:
        return m.decode_request(data)
    except RequestError as error:
        return error


def test_requests_are_read() -> None:
    request = m.decode_request(
        b'{"prompt": "hi", "max_tokens": 3, "stop_token_ids": [1, 2], "ignore_eos": true, "id": "a"}'
    )
    assert request == m.GenerateRequest(
        prompt="hi", max_tokens=3, stop_token_ids=(1, 2), ignore_eos=True, id="a"
    )
    assert m.decode_request(b'{"op":"generate","token_ids":[0,2147483647]}') == m.GenerateRequest(
        token_ids=(0, 2**31 - 1)
    )
    chat = (
        b'{"messages":[{"role":"developer","content":"a"},{"role":"user","content":[{"type":"text","text":"b"},'
        b'{"type":"text","text":"c"}]},{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}],'
        b'"tools":[{"name":"f"}],"reasoning_effort":0,"stop":["\\n","END"],"stream":true}'
    )
    request = m.decode_request(chat)
    assert request == m.GenerateRequest(
        messages=(
            m.ChatMessage(role="developer", content="a"),
            m.ChatMessage(role="user", content="bc"),
            m.ChatMessage(role="assistant", tool_calls=({"function": {"name": "f"}},)),
        ),
        tools=({"name": "f"},),
        reasoning_effort=0.0,
        stop=("\n", "END"),
        stream=True,
    )
    assert m.decode_request(m.encode(request)) == request
    drawn = b'{"prompt":"a","temperature":1,"top_k":40,"top_p":0.9,"seed":18446744073709551615,"logprobs":20}'
    request = m.decode_request(drawn)
    assert request == m.GenerateRequest(
        prompt="a", temperature=1.0, top_k=40, top_p=0.9, seed=2**64 - 1, logprobs=20
    )
    assert m.decode_request(m.encode(request)) == request
    for asked, meant in ((b"true", 0), (b"0", 0), (b"false", None), (b"null", None), (b"7", 7)):
        assert m.decode_request(b'{"prompt":"a","logprobs":' + asked + b"}") == m.GenerateRequest(
            prompt="a", logprobs=meant
        )
    # What is null, or no stop at all, is as if it were left out.
    assert m.decode_request(b'{"prompt":"a","stop":[],"messages":null}') == m.GenerateRequest(
        prompt="a", stop=()
    )
    assert m.decode_request(b'{"op":"cancel","id":"a"}') == m.CancelRequest(id="a")
    assert m.decode_request(b'{"op":"ack","id":"a","seq":7}') == m.AckRequest(id="a", seq=7)
    assert m.decode_request(b'{"op":"status"}') == m.StatusRequest()


@pytest.mark.parametrize(
    ("data", "words", "echo"),
    [
        (b"hello", ["JSON"], None),
        (b'"hello"', ["object", "a string"], None),
        (b'{"id":"a"}', ["prompt", "token_ids"], "a"),
        (b'{"id":"a","prompt":""}', ["prompt", "empty"], "a"),
        (b'{"id":"a","token_ids":[]}', ["token_ids", "empty"], "a"),
        (b'{"id":"a","prompt":"x","token_ids":[1]}', ["both"], "a"),
        (b'{"id":"a","prompt":3}', ["prompt", "string", "number"], "a"),
        (b'{"id":"a","prompt":"x","max_tokens":0}', ["max_tokens", "1"], "a"),
        (b'{"id":"a","prompt":"x","max_tokens":"5"}', ["max_tokens", "integer", "a string"], "a"),
        (b'{"id":"a","prompt":"x","max_tokens":true}', ["max_tokens", "integer", "a boolean"], "a"),
        (b'{"id":"a","prompt":"x","max_tokens":1.5}', ["max_tokens"], "a"),
        (b'{"id":"a","prompt":"x","temprature":0.5}', ["temprature", "unknown", "max_tokens"], "a"),
        (b'{"id":"a","messages":[]}', ["messages", "empty"], "a"),
        (b'{"id":"a","messages":"hi"}', ["messages", "array", "a string"], "a"),
        (b'{"id":"a","messages":[3]}', ["messages[0]", "object"], "a"),
        (b'{"id":"a","prompt":"x","messages":[{"role":"user","content":"x"}]}', ["both", "messages"], "a"),
        (b'{"id":"a","messages":[{"role":"user"}]}', ["messages[0].content", "missing"], "a"),
        (b'{"id":"a","messages":[{"role":"tool","tool_calls":[{}]}]}', ["messages[0].content"], "a"),
        (b'{"id":"a","messages":[{"content":"x"}]}', ["messages[0].role", "missing"], "a"),
        (b'{"id":"a","messages":[{"role":"me","content":"x"}]}', ["messages[0].role", "developer"], "a"),
        (b'{"id":"a","messages":[{"role":"user","content":"x","nme":"y"}]}', ["nme", "unknown"], "a"),
        (b'{"id":"a","messages":[{"role":"user","content":[{"type":"image"}]}]}', ["content", "text"], "a"),
        (b'{"id":"a","messages":[{"role":"user","content":[{"type":"text"}]}]}', ["content", "text"], "a"),
        (b'{"id":"a","prompt":"x","tools":[{}]}', ["tools", "messages"], "a"),
        (b'{"id":"a","prompt":"x","reasoning_effort":0.5}', ["reasoning_effort", "messages"], "a"),
        (b'{"id":"a","prompt":"x","reasoning_effort":1.5}', ["reasoning_effort", "0.99", "medium"], "a"),
        (b'{"id":"a","prompt":"x","reasoning_effort":"wild"}', ["reasoning_effort", "0.99", "medium"], "a"),
        (b'{"id":"a","prompt":"x","reasoning_effort":true}', ["reasoning_effort", "0.99", "medium"], "a"),
        (b'{"id":"a","prompt":"x","stop":"END"}', ["stop", "array"], "a"),
        (b'{"id":"a","prompt":"x","stop":["b",""]}', ["stop[1]", "1 to 256"], "a"),
        (b'{"id":"a","prompt":"x","stop":[7]}', ["stop[0]", "string", "a number"], "a"),
        (b'{"id":"a","prompt":"x","stop":["' + b"y" * 257 + b'"]}', ["stop[0]", "256", "257"], "a"),
        (b'{"id":"a","prompt":"x","stop":[' + b'"y",' * 16 + b'"y"]}', ["stop", "17", "16"], "a"),
        (b'{"id":"a","prompt":"x","temperature":-0.1}', ["temperature", "0", "-0.1"], "a"),
        (b'{"id":"a","prompt":"x","temperature":100.5}', ["temperature", "100", "100.5"], "a"),
        (b'{"id":"a","prompt":"x","temperature":NaN}', ["JSON"], None),
        (b'{"id":"a","prompt":"x","temperature":1e999}', ["JSON"], None),
        (b'{"id":"a","prompt":"x","temperature":"1"}', ["temperature", "number", "a string"], "a"),
        (b'{"id":"a","prompt":"x","temperature":true}', ["temperature", "number", "a boolean"], "a"),
        (b'{"id":"a","prompt":"x","temperature":1,"top_p":0}', ["top_p", "greater than 0", "0"], "a"),
        (b'{"id":"a","prompt":"x","temperature":1,"top_p":1.01}', ["top_p", "1", "1.01"], "a"),
        (b'{"id":"a","prompt":"x","temperature":1,"top_k":-1}', ["top_k", "0", "-1"], "a"),
        (b'{"id":"a","prompt":"x","temperature":1,"top_k":2147483648}', ["top_k", "2147483648"], "a"),
        (b'{"id":"a","prompt":"x","top_p":0.9}', ["top_p", "goes with 'temperature'"], "a"),
        (b'{"id":"a","prompt":"x","top_k":9}', ["top_k", "goes with 'temperature'"], "a"),
        (b'{"id":"a","prompt":"x","seed":-1}', ["seed", "0", "-1"], "a"),
        (
            b'{"id":"a","prompt":"x","seed":18446744073709551616}',
            ["seed", "less than 18446744073709551616"],
            "a",
        ),
        (b'{"id":"a","prompt":"x","seed":1.5}', ["seed", "integer"], "a"),
        (b'{"id":"a","prompt":"x","logprobs":-1}', ["logprobs", "true, false", "0 to 20"], "a"),
        (b'{"id":"a","prompt":"x","logprobs":21}', ["logprobs", "0 to 20"], "a"),
        (b'{"id":"a","prompt":"x","logprobs":2.0}', ["logprobs", "0 to 20"], "a"),
        (
            b'{"id":"a","prompt":"x","logprobs":20,"max_tokens":2858}',
            ["logprobs", "those of 2857 tokens with 20", "'max_tokens' is 2858"],
            "a",
        ),
        (
            b'{"id":"a","prompt":"x","key":"A1"}',
            ["field 'key' should match ^[0-9a-f]{32,128}$, and does not"],
            "a",
        ),
        (b'{"id":"a","token_ids":[1,"2"]}', ["token_ids[1]"], "a"),
        (b'{"id":"a","token_ids":[-1]}', ["token_ids[0]", "0"], "a"),
        (b'{"id":"a","token_ids":[99999999999999999999999]}', ["token_ids[0]"], "a"),
        (b'{"id":3,"prompt":"x"}', ["id", "string"], None),
        (b'{"id":"a","op":"fly"}', ["op", "fly", "generate"], "a"),
        (b'{"id":"a","op":7}', ["op", "a number"], "a"),
        (b'{"op":"cancel"}', ["id", "missing"], None),
        (b'{"op":"ack","id":"a"}', ["seq", "missing"], "a"),
        (b'{"op":"ack","id":"a","seq":0}', ["seq", "1"], "a"),
        (b'{"id":"a","prompt":"x","acks":true}', ["acks", "stream"], "a"),
        (b'{"prompt":"x","stream":true,"acks":true}', ["acks", "id"], None),
        (b'{"id":"a","op":"status","prompt":"x"}', ["prompt", "unknown", "status"], "a"),
        (b'{"id":"' + b"x" * 129 + b'","prompt":"x"}', ["id", "128"], None),
        (b'{"id":"a","prompt":"\\ud800"}', ["JSON"], None),
    ],
)
def test_bad_requests_are_refused_in_words(data: bytes, words: list[str], echo: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        m.decode_request(data)
    assert caught.value.code is ErrorCode.BAD_REQUEST
    assert caught.value.request_id == echo
    for word in words:
        assert word in caught.value.message
    assert len(caught.value.message) < 500


def test_a_long_list_of_wrong_ids_costs_one_error() -> None:
    data = b'{"token_ids":[' + b'"",' * 500_000 + b'""]}'
    with pytest.raises(RequestError, match=r"token_ids\[0\]"):
        m.decode_request(data)


def asked(tools: bytes, *, calls: bytes = b"{}", text: bytes = b"hi", more: bytes = b"") -> bytes:
    messages = b'[{"role":"assistant","content":"' + text + b'","tool_calls":[' + calls + b"]}]"
    return b'{"id":"a","messages":' + messages + b',"tools":[{"a":[' + tools + b"]}]" + more + b"}"


def many(value: bytes, count: int) -> bytes:
    return b",".join([value] * count)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (asked(many(b"[]", MAX_VALUES + 1)), ["65536", "65545 lists and objects"]),
        (asked(many(b"{}", 2_700_000)), ["65536", "lists and objects"]),
        (asked(b"", more=b',"x":' + b"[" * 100_000), ["65536", "lists and objects"]),
        (b'{"id":"a","messages":[' + many(b"{}", 300_000) + b"]}", ["65536", "300002 lists and objects"]),
        (asked(many(b"1", 4_000_000)), ["'tools'", "65536"]),
        (asked(many(b'""', MAX_VALUES)), ["'tools'", "65536"]),
        (asked(b"", calls=b'{"a":[' + many(b"0.5", MAX_VALUES) + b"]}"), ["'messages'", "65536"]),
        (
            asked(many(b"1", MAX_VALUES // 2), calls=b'{"a":[' + many(b"1", MAX_VALUES // 2) + b"]}"),
            ["'tools'", "65536"],
        ),
        (asked(b"", more=b',"stop":[' + many(b'"a"', MAX_VALUES) + b"]"), ["'stop'", "65536"]),
        (b'{"id":"a","token_ids":[' + many(b"1", 4_000_000) + b"]}", ["'token_ids'", "4000000", "1048576"]),
        (
            b'{"id":"a","token_ids":[' + many(b"1", 1 << 20) + b'],"held":[2]}',
            ["'held'", "1 ids", "1048577", "1048576"],
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else f"{len(value)} bytes",
)
def test_what_would_take_long_to_read_is_refused_in_words(data: bytes, words: list[str]) -> None:
    assert len(data) <= MAX_REQUEST_BYTES
    with pytest.raises(RequestError) as caught:
        m.decode_request(data)
    assert caught.value.code is ErrorCode.BAD_REQUEST
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        asked(many(b"[]", 60_000)),
        asked(many(b'{"type":"string"}', 30_000)),
        asked(b"1", text=rb"[{\"\\" * 200_000),
        b'{"token_ids":[' + many(b"1", 1 << 19) + b'],"held":[' + many(b"1", 1 << 19) + b"]}",
    ],
    ids=["lists", "objects", "brackets in text", "ids"],
)
def test_what_is_far_beyond_any_use_is_still_read(data: bytes) -> None:
    assert isinstance(m.decode_request(data), m.GenerateRequest)


def values_of(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(each for one in inner for each in values_of(one))]


bracketed = st.text(alphabet='[]{}"\\a,é', max_size=8)


@given(
    st.recursive(
        st.none() | bracketed,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(bracketed, inner, max_size=3),
        max_leaves=20,
    ),
    st.integers(0, 30),
)
def test_values_are_counted_as_they_are(value: JsonValue, most: int) -> None:
    values = values_of(value)
    lists = sum(isinstance(each, dict | list) for each in values)
    assert count_openings(orjson.dumps(value)) == lists
    assert count_openings(json.dumps(value).encode()) == lists
    assert min(count_values(value, most), most + 1) == min(len(values), most + 1)


@given(st.binary(max_size=200) | json_bytes)
def test_any_bytes_give_a_request_or_a_request_error(data: bytes) -> None:
    value = request_or_error(data)
    if isinstance(value, RequestError):
        assert value.code is ErrorCode.BAD_REQUEST
        assert value.message
    else:
        assert value.op in ("generate", "ack", "cancel", "status")


@given(st.dictionaries(st.sampled_from([*m.GenerateRequest.model_fields, "new"]), json_values, max_size=6))
def test_any_request_object_is_answered_and_its_id_echoed(raw: dict[str, object]) -> None:
    value = request_or_error(json.dumps(raw).encode())
    given_id = raw.get("id")
    if isinstance(value, RequestError):
        is_json = "must be JSON" not in value.message
        echoed = isinstance(given_id, str) and len(given_id) <= 128 and is_json
        assert value.request_id == (given_id if echoed else None)
    else:
        assert value.id == given_id


REPLIES = [
    m.GenerateReply(
        id="a",
        text="x",
        token_ids=[1, 2],
        finish_reason=m.FinishReason.LENGTH,
        usage=m.Usage(prompt_tokens=1, completion_tokens=2),
        timings=m.Timings(queue_s=0.0, ttft_s=0.5, decode_tok_s=None),
    ),
    m.ErrorReply.of(RequestError(ErrorCode.OVERLOADED, "full", request_id="b", retry_after_s=2.0)),
    m.CancelReply(id="c", cancelled=True),
    m.StatusReply(status={"ring": "open", "missing": None}),
    m.StreamPiece(id="d", seq=1, text="x", token_ids=[1, 2]),
    m.StreamPiece(seq=2, reasoning="hm", token_ids=[]),
    m.QueueNotice(id="d", queued=3),
    m.GenerateReply(
        id="d",
        text="",
        reasoning="hm",
        tool_calls=[m.ToolCall(function={"name": "f", "arguments": {"x": 1}})],
        token_ids=[1, 2],
        finish_reason=m.FinishReason.STOP,
        usage=m.Usage(prompt_tokens=1, completion_tokens=2),
        timings=m.Timings(queue_s=0.0, ttft_s=0.5, decode_tok_s=1.5),
        seq=3,
        final=True,
    ),
    m.StreamPiece(id="e", seq=1, text="x", token_ids=[1], logprobs=[m.TokenScore(token_id=1, logprob=-0.5)]),
    m.GenerateReply(
        id="e",
        text="x",
        token_ids=[1],
        logprobs=[
            m.TokenScore(
                token_id=1,
                token="x",
                logprob=-0.5,
                top_logprobs=[
                    m.ScoredToken(token_id=7, token="\ufffd", logprob=-0.25),
                    m.ScoredToken(token_id=1, token="x", logprob=-0.5),
                ],
            )
        ],
        seed=2**64 - 1,
        finish_reason=m.FinishReason.LENGTH,
        usage=m.Usage(prompt_tokens=1, completion_tokens=1),
        timings=m.Timings(queue_s=0.0, ttft_s=0.5),
    ),
]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_replies_survive_the_wire(reply: m.ClientReply) -> None:
    assert encode_flat(reply) == m.encode(reply)
    assert m.decode_reply(m.encode(reply)) == reply


def test_error_reply_keeps_the_error() -> None:
    error = RequestError(ErrorCode.CONTEXT_OVERFLOW, "1300 is more than 1024", request_id="b")
    again = m.ErrorReply.of(error).to_error()
    assert (again.code, again.message, again.request_id) == (error.code, error.message, "b")
    assert orjson.loads(m.encode(m.ErrorReply.of(error))) == {
        "id": "b",
        "error": {"code": "context_overflow", "message": "1300 is more than 1024"},
    }


def test_replies_of_a_newer_head_are_read() -> None:
    raw = orjson.loads(m.encode(REPLIES[0]))
    raw["mood"] = []
    raw["usage"]["guessed_tokens"] = 4
    assert m.decode_reply(orjson.dumps(raw)) == REPLIES[0]


@given(st.binary(max_size=200) | json_bytes)
def test_any_bytes_give_a_reply_or_a_wire_error(data: bytes) -> None:
    try:
        m.decode_reply(data)
    except WireError:
        return
