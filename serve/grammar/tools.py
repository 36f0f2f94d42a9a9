"""Function calling. This module writes the tools of a chat request into the prompt, and makes the
grammar of required calls.

Tools are passed to the chat template if it reads them. For other models, the system message
describes the tools in plain words and asks for calls in the hermes format.
:mod:`eesd.serve.grammar.tool_calls` parses the answer.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from eesd.common.checks import check_flag, shown
from eesd.common.errors import EESDError
from eesd.runtime.chat_template import ChatTemplate, Message
from eesd.runtime.constraint import GrammarConstraint, make_constraint, quoted, with_answer
from eesd.runtime.json_schema import OPTIONS, options_of, read_schema
from eesd.runtime.llm import LLM
from eesd.runtime.text import TextCodec
from eesd.serve.grammar.harmony import CHANNEL, CONSTRAIN, MESSAGE, writes_harmony
from eesd.serve.grammar.tool_calls import (
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    ToolFormat,
    ToolParser,
)

LOGGER = logging.getLogger("eesd.serve")
_OTHER_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
MAX_TOOLS = 128
MAX_CALLS = 16
"""Maximum number of calls in an answer if the request sets none. Without a limit, a model that must
call could go on for ever."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TOLD = """You can call these functions, given with JSON schemas of their parameters:
{tools}

To call a function, answer with its name and arguments as JSON between two tags:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
Results come between <tool_response> tags."""
"""Instructions for a model whose template does not read tools."""


@dataclass(frozen=True)
class Tools:
    """The functions in a request.

    Attributes:
        tools: The functions' definitions in the request.
        choice: ``auto`` (the model decides), ``required`` (it must call a function), or the name of
            the function that it must call.
        parallel: Whether the model may call several functions at once.
        format: The model's format of calls.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: str
    parallel: bool
    format: ToolFormat

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The functions by name."""
        return {tool["function"]["name"]: tool["function"] for tool in self.tools}

    @property
    def most(self) -> int:
        """Maximum number of calls in an answer. Llama 3 and gpt-oss write only one."""
        is_free = self.choice in ("auto", "required") and self.format not in (LLAMA, HARMONY)
        return MAX_CALLS if self.parallel and is_free else 1

    def parser(self, codec: TextCodec, *, streaming: bool) -> ToolParser:
        """Make the parser of one answer."""
        most = 128 if self.parallel else 1
        # If a required call is cut off, it is returned as a part of a call instead of as content.
        streaming = streaming or self.choice != "auto"
        marks = {
            token: text
            for text in (self.format.begin, self.format.end)
            if (token := special_token(text, codec)) is not None
        }
        names = self.functions.keys()
        forced = self.choice != "auto"
        return ToolParser(
            self.format, names, streaming=streaming, most=most, forced=forced, marks=marks
        )

    def constraint(
        self, llm: LLM, answer: GrammarConstraint | None = None
    ) -> GrammarConstraint | None:
        """Return the grammar of the required calls. If no call is required, it is the grammar of
        calls and of an answer without calls.

        Args:
            llm: The model.
            answer: Constraint of an answer without calls.

        Returns:
            None if the output is unconstrained.

        Raises:
            EESDError: The parameters of a function are not a supported JSON schema.
        """
        if self.choice == "auto" and answer is None:
            return None
        left_out = set[str]()
        grammar = self._grammar(llm.codec, left_out)
        if self.choice == "auto" and answer is not None:
            made = with_answer(grammar, answer, llm)
        else:
            made = make_constraint("grammar", grammar, llm)
        made.ignored |= left_out
        return made

    def _grammar(self, codec: TextCodec, left_out: set[str]) -> str:
        """Return the grammar. Add to ``left_out`` those keywords of the parameters' schemas that
        the grammar does not enforce."""
        names = [name for name in self.functions if self.choice in ("auto", "required", name)]
        rule = self._harmony_rule if self.format is HARMONY else self._call_rule
        rules = [f"call_{index}: {rule(name, left_out, codec)}" for index, name in enumerate(names)]
        call = "(" + " | ".join(f"call_{index}" for index in range(len(names))) + ")"
        begin, end = (_literal(text, codec) for text in (self.format.begin, self.format.end))
        one = call
        if self.format is HERMES:
            one = f'{begin} "\\n" {call} "\\n" {end}'
        next_one = {HERMES: '"\\n"', MISTRAL: '", "'}.get(self.format, "") + f" {one}"
        start = one
        if self.most > 1:
            start += f" ({next_one}){{0,{self.most - 1}}}"
        if self.format is MISTRAL:
            start = f'{begin} "[" {start} "]"'
        if self.choice == "auto":
            # A call without marks is allowed as well. If it were not, a model that begins such a
            # call would have to end it as an answer.
            ways = ["@answer", call]
            if self.format not in (LLAMA, HARMONY):
                ways.append(start)
            start = " | ".join(ways)
        return "\n".join([f"start: {start}", *rules])

    def _harmony_rule(self, name: str, left_out: set[str], codec: TextCodec) -> str:
        """Return the rule for a call of gpt-oss up to its end."""
        channel, constrain, message = (
            _literal(mark, codec) for mark in (CHANNEL, CONSTRAIN, MESSAGE)
        )
        schema, options = self._parameters(name, left_out)
        text = json.dumps({**schema, OPTIONS: options})
        head = quoted(f"commentary to=functions.{name} ")
        return f'{channel} {head} {constrain} "json" {message} %json {text}'

    def _parameters(self, name: str, left_out: set[str]) -> tuple[dict[str, Any], Any]:
        """Return the schema of a function's arguments and llguidance's options for the schema."""
        function = self.functions[name]
        lenient = function.get("strict") is not True
        schema = {
            "type": "object",
            "additionalProperties": False,
            **(function.get("parameters") or {}),
        }
        schema, _, keywords = read_schema(schema, lenient, (name,))
        left_out |= keywords
        return schema, options_of(lenient)

    def _call_rule(self, name: str, left_out: set[str], _: TextCodec) -> str:
        schema, options = self._parameters(name, left_out)
        if self.choice == "auto":
            # There is one schema for the whole call, because llguidance reads alternatives in
            # parallel only if all of them are schemas.
            schema = {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    # The id makes the schema the root of its references.
                    self.format.arguments: {"$id": f"urn:function:{name}", **schema},
                },
                "required": ["name", self.format.arguments],
                "additionalProperties": False,
            }
        text = json.dumps({**schema, OPTIONS: options})
        if self.choice == "auto":
            return f"%json {text}"
        head = quoted(f'{{"name": {json.dumps(name)}, "{self.format.arguments}": ')
        return f'{head} %json {text} "}}"'


def special_token(text: str, codec: TextCodec) -> int | None:
    """Return the special token with this name, or None if the model has no such token. No other
    tokens spell a special token, and a special token is not part of the answer's text."""
    token = codec.tokenizer.token_to_id(text)
    added = codec.tokenizer.get_added_tokens_decoder()
    return token if token in added and added[token].special else None


def _literal(text: str, codec: TextCodec) -> str:
    """Return a text as it is written in a grammar."""
    token = special_token(text, codec)
    return quoted(text) if token is None else f"<[{token}]>"


def tools_of(body: Mapping[str, Any], codec: TextCodec) -> Tools | None:
    """Read the tools of a chat request from its fields ``tools``, ``tool_choice`` and
    ``parallel_tool_calls``.

    Args:
        body: The request's JSON.
        codec: Tokenizer and chat template of the model.

    Returns:
        The tools, or None if there are no tools. If ``tool_choice`` is ``none``, this is None as
        well, and the prompt omits the tools.

    Raises:
        EESDError: A value cannot be used.
    """
    given = body.get("tools")
    choice = body.get("tool_choice")
    if not isinstance(given, list | tuple | None):
        raise EESDError(f"tools is {shown(given)}; give a list of functions.")
    if not given:
        if choice not in (None, "none", "auto"):
            raise EESDError("tool_choice requires a call, but there are no tools; give tools.")
        return None
    if len(given) > MAX_TOOLS:
        raise EESDError(f"There are {len(given)} tools; give at most {MAX_TOOLS}.")
    for number, tool in enumerate(given, 1):
        _check_tool(tool, f"Tool {number}")
    names = [tool["function"]["name"] for tool in given]
    if len(set(names)) < len(names):
        raise EESDError("Two tools have the same name; give each tool a different name.")
    chosen, allowed = _choice(choice, names)
    given = [tool for tool in given if tool["function"]["name"] in allowed]
    parallel = body.get("parallel_tool_calls")
    parallel = parallel is None or check_flag("parallel_tool_calls", parallel)
    return None if chosen == "none" else Tools(tuple(given), chosen, parallel, _format_of(codec))


def _check_tool(tool: Any, name: str) -> None:
    is_function = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    function = is_function and tool.get("function")
    if not isinstance(function, Mapping):
        raise EESDError(
            f"{name} is no function; give "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}.'
        )
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise EESDError(
            f"{name} has the name {shown(function.get('name'))}; give 1 to 64 letters, "
            "digits, _, . or -."
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise EESDError(
            f"{name} has parameters that are {type(parameters).__name__}; give a JSON schema."
        )
    if (parameters or {}).get("type", "object") != "object":
        raise EESDError(
            f"{name} has parameters of type {shown((parameters or {})['type'])}; give the "
            "schema of an object."
        )


def _choice(given: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the choice, and the names of the tools in the prompt. These are all tools, unless
    OpenAI's ``allowed_tools`` lists some of them."""
    chosen = given.get("type") if isinstance(given, Mapping) else given
    if chosen in (None, "none", "auto", "required"):
        return chosen or "auto", names
    if chosen == "any":  # Mistral and Anthropic have this name for ``required``
        return "required", names
    if chosen == "allowed_tools":
        inner = given.get(chosen, given)
        tools = isinstance(inner, Mapping) and inner.get("tools")
        if (
            not isinstance(tools, list)
            or not tools
            or inner.get("mode", "auto") not in ("auto", "required")
        ):
            raise EESDError(
                "tool_choice allowed_tools has no tools, or another mode than auto or "
                "required; give both."
            )
        return inner.get("mode", "auto"), [_named(tool, names) for tool in tools]
    return _named(given, names), names


def _named(given: Any, names: Sequence[str]) -> str:
    """Return the function name in a tool choice. The choice may have OpenAI's form for chats,
    OpenAI's form for responses, or Anthropic's form."""
    is_choice = isinstance(given, Mapping) and given.get("type") in ("function", "tool")
    found = is_choice and given.get("function", given)
    if not isinstance(found, Mapping) or "name" not in found:
        raise EESDError(
            f"tool_choice is {shown(given)}; give none, auto, required, or a function with "
            "its name."
        )
    if found["name"] not in names:
        raise EESDError(
            f"tool_choice names {shown(found['name'])}, which is not in tools; add it, or "
            "choose another tool."
        )
    return str(found["name"])


def _format_of(codec: TextCodec) -> ToolFormat:
    """Return the model's format of calls, which its chat template shows."""
    template = codec.tool_template
    if template is None or not template.reads_tools or HERMES.begin in template.source:
        return HERMES
    if MISTRAL.begin in template.source:
        return MISTRAL
    if writes_harmony(codec):
        return HARMONY
    return LLAMA if '"parameters": ' in template.source else HERMES


def encode_chat(
    messages: Sequence[Message],
    tools: Tools | None,
    codec: TextCodec,
    effort: str | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    ending: str = "answer",
) -> list[int]:
    """Return the token ids of chat messages and tools. The messages may include calls and their
    results.

    Args:
        messages: The messages.
        tools: The functions.
        codec: Tokenizer and chat template of the model.
        effort: The reasoning effort, for templates that read it. None leaves it to the template.
        variables: Values that the template reads.
        ending: ``answer`` begins an answer, ``end`` does not, and ``continue`` leaves the last
            message open.

    Raises:
        EESDError: A message cannot be used, or the template refuses the messages.
    """
    parsed = [_with_arguments(message) for message in messages]
    template = codec.tool_template if tools else codec.chat_template
    _check_variables(variables, codec)
    if effort is not None and template is not None:
        variables = {**_effort(effort, template), **variables}
    told: Sequence[Mapping[str, Any]] | None = tools.tools if tools else None
    if template is not None and not template.reads_tools:
        parsed = _told(_in_words(parsed), tools)
        told = None
    if ending == "continue":
        return _continued(parsed, told, codec, variables)
    return codec.encode(parsed, told, variables, ending == "answer")


def _check_variables(variables: Mapping[str, Any], codec: TextCodec) -> None:
    """Refuse variables that other fields set. If messages must not write special tokens, also
    refuse variables that are text, because text could write such tokens."""
    for name, value in variables.items():
        if name in _OTHER_FIELDS:
            raise EESDError(
                f"chat_template_kwargs has {name}; leave it out, or use the request field of "
                "this name."
            )
        if codec.plain is not None and not (value is None or isinstance(value, bool | int | float)):
            raise EESDError(
                f"chat_template_kwargs has text for {name}, which could contain special "
                "tokens; leave it out."
            )


def _continued(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    codec: TextCodec,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return the token ids up to the end of the last message's content. As in transformers, the
    content is found at the last occurrence of its text."""
    if codec.plain is not None:
        raise EESDError(
            "continue_final_message is not supported with --plain-content; leave it out."
        )
    content = _plain_text(messages[-1])
    text = codec.render(messages, tools, answer=False, variables=variables)
    at = text.rfind(content.strip())
    if not content.strip() or at < 0:
        raise EESDError(
            "The chat template changes the last message, so it cannot be continued; give "
            "another message."
        )
    kept = content.strip()
    if text.startswith(content.lstrip(), at):
        kept = content.lstrip()
    return codec.ids(text[: at + len(kept)], special=False)


def _effort(effort: str, template: ChatTemplate) -> dict[str, Any]:
    """Return the template's variables for an effort. ``reasoning_effort`` is the effort itself, and
    ``enable_thinking`` is False only for ``none``."""
    values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if not (known := values.keys() & template.names):
        _warn_of_effort()
    return {name: values[name] for name in known}


@cache
def _warn_of_effort() -> None:
    """Warn once, because clients send an effort with each request."""
    LOGGER.warning(
        "This model's chat template does not support reasoning efforts, so "
        "reasoning_effort of requests is ignored."
    )


def _with_arguments(message: Message) -> Message:
    """Return the message with the arguments of its calls as parsed JSON instead of text, because
    templates expect that."""
    if not isinstance(message, Mapping) or message.get("tool_calls") is None:
        return message
    calls = message["tool_calls"]
    good = isinstance(calls, Sequence) and all(
        isinstance(call, Mapping)
        and isinstance(call.get("function"), Mapping)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )
    if not good:
        raise EESDError(
            "A message has tool_calls that are not a list of calls; give each call as "
            "the server sent it."
        )
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {
        **message,
        "tool_calls": [{**call, "function": _parsed(call["function"])} for call in calls],
    }


def _parsed(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    return {**function, "arguments": value} if isinstance(value, dict) else function


def _in_words(messages: Sequence[Message]) -> list[Message]:
    """Write calls and results as text. This is for a template that reads only ``content``.
    Consecutive results become one user message."""
    told: list[Message] = []
    after_result = False
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            text = f"<tool_response>\n{_plain_text(message)}\n</tool_response>"
            if after_result:
                text = f"{told.pop()['content']}\n{text}"
            told.append({"role": "user", "content": text})
        elif role is not None and message.get("tool_calls"):
            calls = [_written(call["function"]) for call in message["tool_calls"]]
            told.append(
                {"role": role, "content": "\n".join(filter(None, [_plain_text(message), *calls]))}
            )
        else:
            told.append(message)
        after_result = role == "tool"
    return told


def _written(function: Mapping[str, Any]) -> str:
    call = json.dumps(
        {name: function.get(name) for name in ("name", "arguments")}, ensure_ascii=False
    )
    return f"{HERMES.begin}\n{call}\n{HERMES.end}"


def _plain_text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(
        str(part["text"])
        for part in parts
        if isinstance(part, Mapping) and part.get("text") is not None
    )


def _told(messages: list[Message], tools: Tools | None) -> list[Message]:
    """Return the messages with a system message that describes the tools."""
    if tools is None:
        return messages
    text = TOLD.format(
        tools="\n".join(
            json.dumps(function, ensure_ascii=False) for function in tools.functions.values()
        )
    )
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{_plain_text(messages[0])}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
