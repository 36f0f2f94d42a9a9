"""Render chat messages as text with a model's template, like ``apply_chat_template`` of
transformers.

Templates run with limits (:mod:`eesd.runtime.template_limits`). Within the limits, the text is the
same as the text that transformers renders. ``tests/text/test_chat_template.py`` compares the two
for many templates and conversations.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import CodeType, MappingProxyType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from eesd.common.errors import EESDError, reason, refused
from eesd.common.json_input import MAX_DEPTH
from eesd.runtime.template_limits import LimitedEnvironment

Message = Mapping[str, Any]
"""A chat message. It has a ``role``, a ``content``, and other fields that the template uses."""
Tool = Mapping[str, Any]
"""A tool in the form of OpenAI's API. Its ``type`` is ``function``, and its ``function`` has
``name``, ``description`` and ``parameters``."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of the fields in which a message's reasoning may be. Templates read one of the first
two fields."""
_ITEM_FILTERS = {
    "first",
    "join",
    "last",
    "list",
    "map",
    "reject",
    "rejectattr",
    "select",
    "selectattr",
}
"""Filters that read the items of their input."""


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: The template, in Jinja's language.
        special_tokens: The special tokens that the model has, by name, such as ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        answer: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render messages and the beginning of the answer as text.

        Args:
            messages: The messages, at least one. ``content`` is a text or a list of text parts. If
                the template does not read parts, it gets their texts joined by line breaks.
            tools: Functions that the model may call, as in OpenAI's API. Some templates ignore
                them; see :attr:`reads_tools`.
            answer: Whether to begin an answer after the messages.
            variables: Values of the template's variables by name, such as ``enable_thinking``; see
                :attr:`names`.

        Raises:
            EESDError: A message is not plain data with a role, the template is not valid or refuses
                the messages, or rendering takes too long.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise EESDError("There is no chat message; give a list of at least one.")
        conversation = [_checked(message, number) for number, message in enumerate(messages, 1)]
        if tools is not None:
            tools = [_plain(tool, f"Tool {number}") for number, tool in enumerate(tools, 1)]
        with refused(lambda error: f"The chat template refuses these messages: {reason(error)}."):
            code, reads_parts, _ = self._compiled
            if not reads_parts:
                conversation = [_without_parts(message) for message in conversation]
            return self._run(
                code,
                {
                    **variables,
                    "messages": conversation,
                    "tools": tools,
                    "add_generation_prompt": answer,
                },
            )

    @property
    def reads_tools(self) -> bool:
        """Whether the template uses ``tools``. Raises :class:`EESDError` if the template is not
        valid."""
        return "tools" in self.names

    @property
    def names(self) -> frozenset[str]:
        """The names of the variables that the template reads. Raises :class:`EESDError` if the
        template is not valid."""
        try:
            return self._compiled[2]
        except TemplateError as error:
            raise EESDError(
                f"The chat template cannot be used: {str(error)[:200].rstrip('.')}."
            ) from None

    def _run(self, code: CodeType, values: dict[str, Any]) -> str:
        environment = _environment()
        template = Template.from_code(environment, code, environment.make_globals(None))
        return environment.concat(
            template.generate(**({"documents": None} | values | self._special_tokens))
        )

    @cached_property
    def _compiled(self) -> tuple[CodeType, bool, frozenset[str]]:
        """Compile the template to code that is not tied to an environment. Also return whether the
        template reads the parts of a message's content, and the names of its variables."""
        environment = _environment()
        tree = environment.parse(self.source)
        names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        return environment.compile(tree), _reads_parts(tree), names


def _checked(message: Any, number: int) -> dict[str, Any]:
    """Return a copy of a message as a template sees it. Values that are None are left out, and the
    reasoning is in all of its possible fields.

    Raises:
        EESDError: The message has no role, its content is not text, or a value is not plain data.
    """
    if not isinstance(message, Mapping):
        raise EESDError(
            f"Message {number} is {type(message).__name__}; give a mapping with role and content."
        )
    if not isinstance(message.get("role"), str):
        raise EESDError(f"Message {number} has no role; give one, such as user.")
    present = {key: value for key, value in message.items() if value is not None}
    plain: dict[str, Any] = _plain(present, f"Message {number}")
    if not isinstance(plain.get("content", ""), str):
        _check_parts(plain["content"], f"The content of message {number}")
    reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
    return (
        plain
        if reasoning is None
        else {"thinking": reasoning} | plain | {"reasoning_content": reasoning}
    )


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return a deep copy that consists of Python's built-in types for JSON. The copy is needed
    because the methods of a custom object could do anything when the template uses the object."""
    if depth > MAX_DEPTH:
        raise EESDError(f"{name} is nested too deeply; give at most {MAX_DEPTH} levels.")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str.__str__(key): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name, depth + 1) for item in value]
    kind_name = (
        "a mapping with keys that are not text"
        if isinstance(value, Mapping)
        else type(value).__name__
    )
    raise EESDError(
        f"{name} holds {kind_name}; give text, numbers, lists and mappings, as in JSON."
    )


def _check_parts(content: Any, name: str) -> None:
    if not isinstance(content, list):
        raise EESDError(f"{name} is {type(content).__name__}; give a text or a list of text parts.")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise EESDError(
                f"{name} has a part without a type; give parts such as "
                '{"type": "text", "text": "..."}.'
            )
        if kind != "text":
            raise EESDError(f"{name} has a part of type {kind!r}; this version reads text only.")
        if not isinstance(part.get("text"), str):
            raise EESDError(f"{name} has a text part without text; give it as `text`.")


def _without_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return (
        message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content, list)
        else message
    )


def _reads_parts(tree: nodes.Template) -> bool:
    """Return whether a template iterates over the items of a message's content. It may do so in a
    loop or with a filter such as ``selectattr``.

    Content is ``x.content``, ``x["content"]``, a variable or parameter called ``content``, or a
    variable to which any of these was assigned.
    """
    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        if isinstance(node, nodes.CondExpr):
            return is_content(node.expr1) or is_content(node.expr2)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return (isinstance(node, nodes.Getattr) and node.attr == "content") or (
            isinstance(node, nodes.Name) and node.name in names
        )

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For)) or any(
        item.name in _ITEM_FILTERS and is_content(item.node) for item in tree.find_all(nodes.Filter)
    )


class _Generation(Extension):
    """The block ``{% generation %}``, which marks the model's text for training. Its body is
    rendered as usual."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """The object that ``namespace()`` makes. It holds values that loops may set."""

    def __repr__(self) -> str:
        return "<Namespace>"  # its size is bounded, whatever the values are


def _environment() -> LimitedEnvironment:
    """Make the environment that transformers gives to templates, and add limits."""
    options: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "extensions": [_Generation, loopcontrols],
    }
    environment = LimitedEnvironment({"tojson": _tojson}, **options)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON in the form on which models were trained. Unlike Jinja's filter, it does not
    escape characters for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    if len(format) > 200:  # C's strftime can turn one character into 256
        raise EESDError(
            "The chat template has a date format of more than 200 characters; use another template."
        )
    return datetime.now().strftime(format)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)
