"""A model's own chat template: Jinja, run in a sandbox with bounds on what it writes and how long it runs.

It behaves as in transformers' `apply_chat_template`: the same filters and functions, blocks trimmed alike.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NoReturn, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cascadia_p2p.errors import ErrorCode, RequestError, ShardError

__all__ = ["ChatTemplate", "JsonObject"]

JsonObject: TypeAlias = Mapping[str, object]

MAX_SOURCE: Final = 1 << 20
"""Characters of a template, at most."""

MAX_TEXT: Final = 1 << 24
"""Characters of what it renders, and of any text that it makes on the way."""

MAX_MADE: Final = 1 << 30
"""Characters of all texts that it makes on the way together."""

MAX_STEPS: Final = 1_000_000
"""Turns of loops and calls of macros in one rendering."""

MAX_S: Final = 5.0
"""How long one rendering may take, in seconds."""

MAX_INDENT: Final = 64
"""Of JSON; what stands between its values may be as long."""

MAX_BITS: Final = 1024
"""Of a whole number that is calculated with."""

MAX_VALUES: Final = 1_000_000
"""Values within lists and objects that are written as text, each counted as often as it is written."""


class ChatTemplate:
    """Renders messages to the text that the model was trained on; safe to use from several threads.

    Args:
        source: the template.
        variables: what it may read besides the messages, as in `bos_token`.
        now: the clock of `strftime_now`.

    Raises:
        ShardError: the source is no template.
    """

    def __init__(
        self, source: str, variables: JsonObject | None = None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise ShardError(f"the chat template has {len(source)} characters: at most {MAX_SOURCE} are read")
        self.source = source
        self._variables = dict(variables or {})
        environment = _Sandbox(now)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ShardError(f"the chat template can not be read: {_words(error)}") from None

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        generation: bool = True,
        options: JsonObject | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: plain JSON objects with `role` and `content`; a key whose value is None is left out.
            tools: their descriptions; None when there are none.
            generation: end with the beginning of the model's next turn.
            options: more variables for the template.

        Raises:
            RequestError: BAD_REQUEST when the template refuses the messages or fails on them.
        """
        values: dict[str, object] = {
            **self._variables,
            **(options or {}),
            "messages": [_without_none(message) for message in messages],
            "tools": None if tools is None else [_plain(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": generation,
        }
        budget = _BUDGET.set(_Budget())
        try:
            return self._run(values)
        except _RefusedError as error:
            _refuse(f"the model's chat template refuses these messages: {error}")
        # Whatever a template does wrong concerns the request that it was run for.
        except Exception as error:
            _refuse(f"the model's chat template can not render these messages: {_words(error)}")
        finally:
            _BUDGET.reset(budget)

    def _run(self, values: dict[str, object]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(values):
            length += len(part)
            _check_length(length)
            parts.append(part)
        return "".join(parts)


class _RefusedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


@dataclass(slots=True)
class _Budget:
    """What one rendering has used up, and when it must be over, by `time.monotonic`."""

    steps: int = 0
    made: int = 0
    ends: float = field(default_factory=lambda: time.monotonic() + MAX_S)

    def check_time(self) -> None:
        """Refuse to go on after the time is over."""
        if time.monotonic() > self.ends:
            raise jinja2.TemplateError(f"it takes more than {MAX_S:g} seconds")


_WIDE: Final = re.compile(r"\d{5}|\*|\{[^}]*\{")
"""In a format: a number of five digits, or a width that comes from elsewhere."""

_BUDGET: ContextVar[_Budget] = ContextVar("budget of a rendering")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates that can neither reach out, nor change what they are given, nor grow without bound."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_check_written,
        )
        self.filters["tojson"] = _to_json
        self.filters["format"] = _checked_format
        self.filters["center"] = _narrow(self.filters["center"])
        self.filters["indent"] = _narrow(self.filters["indent"])
        for name, function in self.filters.items():
            self.filters[name] = _bounded(name, function)
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.globals["namespace"] = _PlainNamespace
        # The function only: the class has more than templates need.
        self.globals["dict"] = lambda *items, **named: dict(*items, **named)
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]

    def tick(self) -> str:
        """Count one turn of a loop or call of a macro."""
        budget = _BUDGET.get()
        budget.steps += 1
        if budget.steps > MAX_STEPS:
            raise jinja2.TemplateError(f"it makes more than {MAX_STEPS} steps")
        budget.check_time()
        return ""

    def joined(self, *parts: object) -> str:
        """What `~` gives."""
        texts = [str(_check_written(part)) for part in parts]
        _check_length(sum(map(len, texts)))
        text: str = _counted("".join(texts))
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What the arithmetic operators give."""
        _check_time()
        if any(isinstance(side, int) and side.bit_length() > MAX_BITS for side in (left, right)):
            raise jinja2.TemplateError(f"it calculates with a number of more than {MAX_BITS} bits")
        sized = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "*" and sized:
            counts = [side for side in (left, right) if isinstance(side, int)]
            _check_length(sized[0] * max(counts, default=0))
        elif operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise jinja2.TemplateError("it raises a number to more than the 64th power")
        elif operator == "%" and isinstance(left, str):
            _check_form(left)
            _check_written(right)
        elif sized:
            _check_length(sum(sized))
        return _counted(super().call_binop(context, operator, left, right))

    # The names of the parameters leave all others to what is called.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """What a function or method gives."""
        if __obj == __self.tick:
            return __self.tick()
        _check_time()
        # The base class hands out a wrapper of some methods.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, args, kwargs)
        if any(isinstance(value, int) and value > MAX_TEXT for value in (*args, *kwargs.values())):
            raise jinja2.TemplateError("it calls something with a number that is too large")
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(Parser(self, source, name, filename).parse())
        return tree


class _Counted(NodeTransformer):
    """Makes every loop and macro tick, and `~` check its result."""

    def _tick(self, node: Any) -> Any:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _tick  # noqa: N815 - the visitor looks for these names

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, list(node.nodes), [], None, None).set_lineno(node.lineno)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, behind which Python's insides lie."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


def _check_time() -> None:
    # What is constant is worked out while the template is read.
    if (budget := _BUDGET.get(None)) is not None:
        budget.check_time()


def _counted(value: Any) -> Any:
    """The value; refused when it is one text too many."""
    if isinstance(value, str) and (budget := _BUDGET.get(None)) is not None:
        budget.made += len(value)
        if budget.made > MAX_MADE:
            raise jinja2.TemplateError(f"it makes texts of more than {MAX_MADE} characters together")
    return value


def _check_written(value: Any) -> Any:
    """The value; refused when its text would have no end, as of a list that holds one list many times."""
    if not isinstance(value, list | tuple | dict | Namespace):
        return value
    count = length = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        count += 1
        if isinstance(each, Namespace):
            raise jinja2.TemplateError("it writes a namespace as text")
        if isinstance(each, dict):
            waiting += (*each, *each.values())
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, str):
            _check_length(length := length + len(each))
        if count + len(waiting) > MAX_VALUES:
            raise jinja2.TemplateError(f"it writes a list of more than {MAX_VALUES} values as text")
    return value


def _check_method(text: str, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Refuse a text's method that would give a text without bound."""
    for value in (*args, *named.values()):
        _check_written(value)
    if name in ("format", "format_map"):
        _check_form(text)
    elif name == "translate":
        raise jinja2.exceptions.SecurityError("the method 'translate' of a text is unsafe")
    elif name == "replace" and len(args) >= 2:
        _check_replaced(text, args[0], args[1])
    elif name == "expandtabs":
        size = next(iter((*args, *named.values())), 8)
        _check_length(text.count("\t") * (size if isinstance(size, int) else 0))
    elif name == "join" and args and isinstance(args[0], list | tuple | dict | str):
        _check_length(len(text) * len(args[0]))


def _check_replaced(text: str, old: object, new: object) -> None:
    old, new = str(old), str(new)
    _check_length(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise jinja2.TemplateError(f"it makes a text of more than {MAX_TEXT} characters")


def _check_form(form: object) -> None:
    """Refuse a format whose widths would fill memory."""
    if _WIDE.search(str(form)):
        raise jinja2.TemplateError("it formats text with a width that is too large")


def _checked_format(form: Any, *args: Any, **kwargs: Any) -> Any:
    _check_form(form)
    return do_format(form, *args, **kwargs)


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no width that only fills memory."""

    def bounded(value: Any, width: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(width, int):
            _check_length(width * (1 + str(value).count("\n")))
        given = (value,) if width is None else (value, width)
        return function(*given, *args, **kwargs)

    return bounded


_STRUCTURAL: Final = frozenset(
    {"batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"}
    | {"map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
    | {"sort", "unique"}
)
"""Filters that write no text, for which a list need not be looked through."""


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no more time and makes no more text than a template may."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        # Some take the environment, or what it knows, before the value.
        before = args[:1] if hasattr(function, "jinja_pass_arg") else ()
        value, *rest = args[len(before) :]
        if name == "join" and not isinstance(value, str | list | tuple | dict):
            value = list(value)
        _check_filter(name, value, [*rest, *kwargs.values()])
        return _counted(function(*before, value, *rest, **kwargs))

    return bounded


def _check_filter(name: str, value: Any, given: list[Any]) -> None:
    """Refuse a filter that would write a text without bound, or take memory without bound."""
    if name not in _STRUCTURAL:
        for each in (value, *given):
            _check_written(each)
    if name == "replace" and len(given) >= 2:
        _check_replaced(str(value), given[0], given[1])
    elif name == "join" and given:
        _check_length(len(value) * len(str(given[0])))
    elif name == "sum" and any(isinstance(each, list | tuple) for each in given):
        raise jinja2.TemplateError("it adds up lists: only numbers can be added up")
    elif name in ("batch", "slice") and any(isinstance(each, int) and each > MAX_VALUES for each in given):
        raise jinja2.TemplateError("it divides a list by a number that is too large")
    elif name == "tojson" and any(
        (isinstance(each, int) and each > MAX_INDENT) or (isinstance(each, str) and len(each) > MAX_INDENT)
        for each in given
    ):
        raise jinja2.TemplateError(f"it writes JSON with an indent or a mark of more than {MAX_INDENT}")


def _raise(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _without_none(message: JsonObject) -> dict[str, object]:
    return {key: _plain(value) for key, value in message.items() if value is not None}


def _plain(value: object) -> object:
    """The same out of nothing but JSON's own types: no other object has a method in a template."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    return str(value)


def _words(error: BaseException) -> str:
    """What went wrong in one line."""
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    text = " ".join(str(error).split()) or type(error).__name__
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return text[:300] + line


def _refuse(message: str) -> NoReturn:
    raise RequestError(ErrorCode.BAD_REQUEST, message[:1000])
