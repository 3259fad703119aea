from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from chats import GOLDEN, SPECIALS, TALKS, TEMPLATES, VARIABLES, Talk, tokenizer, tokenizer_content
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import ErrorCode, RequestError, ShardError
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text import template as template_module
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.reply import PlainSplitter, TaggedSplitter
from cascadia_p2p.text.template import ChatTemplate
from cascadia_p2p.text.tokenizer import Tokenizer

TOKENIZER = tokenizer()
EXPECTED = json.loads(GOLDEN.read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "a"}]
DOUBLED = (
    "{{% set n = namespace(x=3) %}}{{% for i in range(40) %}}{{% set n.x = {} %}}{{% endfor %}}{{{{ {} }}}}"
)


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.name)
@pytest.mark.parametrize("name", TEMPLATES)
def test_cas_20_templates_give_what_transformers_gives(name: str, talk: Talk) -> None:
    expected = EXPECTED[name][talk.name]
    template = ChatTemplate(TEMPLATES[name], VARIABLES)
    render = partial(
        template.render, talk.messages, tools=talk.tools, generation=talk.generation, options=talk.options
    )
    if "error" in expected:
        with pytest.raises(RequestError) as refused:
            render()
        assert refused.value.message.endswith(": " + expected["error"])
        return
    text = render()
    assert text == expected["text"]
    assert TOKENIZER.encode(text, affixes=False) == expected["ids"]


@pytest.mark.reference
def test_cas_20_the_expected_texts_are_those_of_transformers_now() -> None:
    pytest.importorskip("transformers")
    from scripts.make_chat_fixtures import rendered

    assert rendered() == EXPECTED


@pytest.mark.parametrize("talk", [talk for talk in TALKS if talk.generation], ids=lambda talk: talk.name)
def test_a_chat_gives_the_ids_of_its_template(talk: Talk) -> None:
    expected = EXPECTED["turns"][talk.name]
    prompt = Chat(TOKENIZER, ChatTemplate(TEMPLATES["turns"], VARIABLES)).prompt(
        talk.messages, tools=talk.tools
    )
    if talk.name == "developer":
        # This template does not know the role.
        assert TOKENIZER.decode(prompt.ids, specials=True).startswith("<|im_start|>system\nRules.<|im_end|>")
    else:
        assert list(prompt.ids) == expected["ids"]
    assert not prompt.opened


# --- what a template can not do -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "{{ raise_exception('only one user, ' ~ messages[0].role) }}",
            "refuses these messages: only one user, user",
        ),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{{ namespace(__x=1) }}", "__x"),
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "__x"),
        ("{% include 'secrets' %}", "no loader"),
        ("{{ 'a' * 10**9 }}", "more than"),
        ("{{ [1] * 10**9 }}", "more than"),
        ("{{ 10**9 * 'a' }}", "more than"),
        ("{{ 9 ** 99999 }}", "64th power"),
        ("{{ 'a'.ljust(10**9) }}", "too large"),
        ("{{ 'a' | center(10**9) }}", "more than"),
        ("{{ 'a\nb' | indent(10**8) }}", "more than"),
        ("{{ '%99999999d' % 3 }}", "width"),
        ("{{ '%99999999d' | format(3) }}", "width"),
        ("{{ '{:>99999999}'.format('a') }}", "width"),
        ("{{ '{:>{w}}'.format('a', w=10**9) }}", "width"),
        ("{{ range(10**6) | list }}", "Range too big"),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "more than",
        ),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "more than",
        ),
        ("{% for i in range(99999) %}{{ 'aaaaaaaaaa' * 1000 }}{% endfor %}", "more than"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{{ ('a' * 1000000).replace('a', 'b' * 2000) }}", "more than"),
        ("{{ ('a' * 1000000) | replace('a', 'b' * 2000) }}", "more than"),
        ("{{ ([1] * 100000) | join('b' * 20000) }}", "more than"),
        ("{{ range(99999) | map('string') | join('b' * 20000) }}", "more than"),
        ("{{ ('b' * 20000).join([''] * 100000) }}", "more than"),
        ("{{ ('\t' * 10000).expandtabs(200000) }}", "more than"),
        ("{{ 'a'.translate({97: 'b'}) }}", "unsafe"),
        ("{{ ([1] * 9999) | tojson(indent=100000) }}", "indent"),
        ("{{ [1] | slice(10**7) | list }}", "too large"),
        ("{{ ([[1]] * 9999) | sum(start=[]) }}", "only numbers"),
        (DOUBLED.format("n.x * n.x", "1"), "bits"),
        (DOUBLED.format("[n.x, n.x]", "n.x"), "values"),
        (DOUBLED.format("[n.x, n.x]", "n.x | tojson"), "values"),
        (DOUBLED.format("[n.x, n.x]", "n.x | pprint"), "values"),
        (DOUBLED.format("[n.x, n.x]", "1 ~ n.x"), "values"),
        (DOUBLED.format("[n.x, n.x]", "'%s' % n.x"), "values"),
        (DOUBLED.format("{'a': n.x, 'b': n.x}", "'{}'.format(n.x)"), "values"),
        (DOUBLED.format("namespace(a=n.x, b=n.x)", "n.x"), "namespace"),
        ("{% for i in range(999) %}{% set a = 'a' * (10000000 + i) %}{% endfor %}", "together"),
        ("{% for i in range(9999) %}{{ range(99999) | sort | length }}{% endfor %}", "seconds"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[7].content }}", "no element 7"),
    ],
)
def test_a_template_can_neither_reach_out_nor_grow(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "MAX_STEPS", 20_000)
    monkeypatch.setattr(template_module, "MAX_S", 2.0)
    with pytest.raises(RequestError) as refused:
        ChatTemplate(source).render(USER)
    assert refused.value.code is ErrorCode.BAD_REQUEST
    assert words in refused.value.message
    assert "\n" not in refused.value.message


def test_bounds_do_not_change_what_templates_may_do() -> None:
    source = (
        "{{ '%02d' % 3 }}{{ '%s-%s' | format(1, 2) }}{{ '{:>3}'.format('a') }}{{ 'ab' * 2 }}{{ [1] + [2] }}"
        "{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'a' | center(3) }}{{ 'a\nb' | indent }}{{ 'a\nb' | indent(2, true) }}"
        "{{ dict(a=1) }}{{ 1 ~ none ~ 'x' ~ undefined_name }}{% for i in range(5) if i % 2 %}{{ loop.index }}"
        "{% else %}never{% endfor %}{{ strftime_now('%d %b %Y') }}{{ ['a', 1] | join('-') }}"
        "{{ [1, 2] | sum }}{{ 'a-b' | replace('-', '+') }}{{ 'a-b'.replace('-', '') }}"
        "{{ '-'.join(['a', 'b']) }}"
        "{{ [1] | tojson }}{{ messages | map(attribute='role') | join('-') }}"
        "{{ [3, 1] | sort | batch(1) | list }}"
        "{{ undefined_name }}"
    )
    template = ChatTemplate(source, now=lambda: datetime(2031, 2, 3))
    assert template.render(USER) == (
        "031-2  aabab[1, 2]10243 a a\n    b  a\n  b{'a': 1}1Nonex1203 Feb 2031a-13a+baba-b[1]user[[1], [3]]"
    )


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% endfor %}", "{% generation %}", "x" * 2_000_000])
def test_what_is_no_template_is_said(source: str) -> None:
    with pytest.raises(ShardError, match="the chat template"):
        ChatTemplate(source)


# --- a model's own files ------------------------------------------------------------------------------------


def write(directory: Path, **files: object) -> Chat:
    """A chat from these files."""
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_content()))
    for name, content in files.items():
        path = directory / {"template": "chat_template.jinja", "config": "tokenizer_config.json"}.get(
            name, "special_tokens_map.json"
        )
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return Chat.load(directory, Tokenizer.load(directory / "tokenizer.json"))


def shown(chat: Chat) -> str:
    return TOKENIZER.decode(chat.prompt(USER).ids, specials=True)


def test_the_template_comes_from_its_file_then_from_the_config(tmp_path: Path) -> None:
    config: dict[str, object] = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    both = write(
        tmp_path, template="{{ bos_token }}file{{ eos_token }}", config={**config, "chat_template": "c"}
    )
    assert shown(both) == "<s>file</s>"
    (tmp_path / "chat_template.jinja").unlink()
    assert shown(write(tmp_path, config={**config, "chat_template": "{{ bos_token }}config"})) == "<s>config"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert shown(write(tmp_path, config={**config, "chat_template": several})) == "d"
    # Newer files keep the tokens' names apart.
    named = write(tmp_path, names={"bos_token": "<s>"}, config={"chat_template": "{{ bos_token }}!"})
    assert shown(named) == "<s>!"
    assert TOKENIZER.special_id("</s>") in write(tmp_path, names={"eos_token": "</s>"}, config={}).eos_ids


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "came without a chat template"),
        ({"config": {"chat_template": None}}, "came without a chat template"),
        ({"config": {"chat_template": [{"name": "rag", "template": "x"}]}}, "came without a chat template"),
        ({"config": {"chat_template": 3}}, "'chat_template' that is no text"),
        ({"config": "no json"}, "tokenizer_config.json is not JSON"),
        ({"config": "[]"}, "tokenizer_config.json is not a JSON object"),
        ({"template": "{% if %}"}, "can not be read: Expected an expression"),
    ],
)
def test_a_model_that_can_not_chat_says_why(files: dict[str, object], words: str, tmp_path: Path) -> None:
    chat = write(tmp_path, **files)
    assert not chat.serves
    with pytest.raises(RequestError) as refused:
        chat.prompt(USER)
    assert refused.value.code is ErrorCode.BAD_REQUEST
    assert words in refused.value.message
    assert "send 'prompt'" in refused.value.message


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("turns", ["<|im_end|>", "</s>"]),
        ("thinking", ["<|im_end|>", "</s>"]),
        ("headers", ["</s>"]),
        ("alternating", ["</s>"]),
        ("opened", ["</s>"]),
        ("effort", ["</s>"]),
    ],
)
def test_exo_18_the_end_of_turn_is_read_off_the_template(name: str, ends: list[str], tmp_path: Path) -> None:
    chat = write(tmp_path, template=TEMPLATES[name], config={"eos_token": "</s>", "bos_token": "<s>"})
    assert chat.end_ids == {TOKENIZER.added[end] for end in ends}
    # And none of them is ever shown.
    for splitter in (chat.splitter(chat.prompt(USER)), PlainSplitter(TOKENIZER, chat.end_ids)):
        assert "".join(text for _, text in splitter.extend([104, 105, *chat.end_ids, 33])) == "hi!"


def test_exo_18_inklings_framing_ends_a_turn() -> None:
    framed = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(280))))
    chat = Chat(framed)
    names = ("<|content_model_end_sampling|>", "<|endoftext|>")
    assert chat.end_ids == {framed.special_id(name) for name in names}
    # A template that the model ships wins, and the answer comes in frames all the same.
    source = "{{ '<|message_user|>' ~ messages[0].content ~ '<|message_model|>' }}"
    prompt = Chat(framed, ChatTemplate(source)).prompt(USER)
    assert prompt.framed
    assert framed.decode(prompt.ids, specials=True) == "<|message_user|>a<|message_model|>"


def test_reasoning_is_expected_where_the_template_shows_it(tmp_path: Path) -> None:
    def splitter(name: str, effort: str | None = None) -> tuple[object, bool]:
        chat = write(tmp_path, template=TEMPLATES[name], config={"eos_token": "</s>", "bos_token": "<s>"})
        prompt = chat.prompt(USER, effort=effort)
        return type(chat.splitter(prompt)), prompt.opened

    assert splitter("turns") == (PlainSplitter, False)
    assert splitter("thinking") == (TaggedSplitter, False)
    assert splitter("thinking", "none") == (TaggedSplitter, False)
    assert splitter("opened") == (TaggedSplitter, True)


def test_effort_reaches_the_template(tmp_path: Path) -> None:
    chat = write(tmp_path, template="{{ reasoning_effort }} {{ enable_thinking }}")
    for effort, text in (
        ("high", "high True"),
        ("none", "none False"),
        (0.0, "0.0 False"),
        (0.5, "0.5 True"),
    ):
        assert TOKENIZER.decode(chat.prompt(USER, effort=effort).ids) == text
    with pytest.raises(RequestError, match="expected 0.0 to 0.99".replace(".", r"\.")):
        chat.prompt(USER, effort="wild")


@given(
    st.lists(st.sampled_from([*SPECIALS, "<think>", "a", "<|im", "_end|>", "ü", "\ufdd0"]), max_size=8).map(
        "".join
    )
)
@settings(max_examples=50, deadline=None)
def test_a_users_text_can_not_spell_a_special_token(text: str) -> None:
    chat = Chat(TOKENIZER, ChatTemplate(TEMPLATES["turns"], VARIABLES))
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    special = [id_ for id_ in chat.prompt(messages).ids if id_ in TOKENIZER.special_ids]
    start, end = TOKENIZER.added["<|im_start|>"], TOKENIZER.added["<|im_end|>"]
    assert special == [start, end, start, end, start, end, start]
    told = TOKENIZER.decode(chat.prompt(messages).ids, specials=True)
    assert told.count(text.replace("\ufdd0", "")) >= 2
