"""Incremental parser of function calls in a model's answer. It reads the three formats that most
models use.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>  Hermes, Qwen, and models that
                                                                       are told to
    llama    {"name": "f", "parameters": {...}}                        Llama 3, the whole answer
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {...}}]           Mistral; newer:
                                                                       [TOOL_CALLS]f{...}

If the format has marks, then an answer that consists only of calls without these marks is parsed as
well, because some models write calls bare, in a fence, or between other tags. All text that is not
a call of a known function remains content. Blanks around calls are dropped.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from eesd.runtime.text import overlap


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls. It has the marks before and after the calls, and the key of the
    arguments."""

    name: str
    begin: str
    end: str
    arguments: str

    def call_id(self) -> str:
        """Return a new id. Mistral's templates require nine letters or digits."""
        if self is MISTRAL:
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolFormat("llama", "", "", "parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments")
HARMONY = ToolFormat("harmony", "<|channel|>", "", "arguments")
"""The format of gpt-oss, which :mod:`eesd.serve.grammar.harmony` parses."""
BLANKS = " \t\r\n"
BETWEEN = {HERMES: BLANKS, LLAMA: BLANKS + ";", MISTRAL: BLANKS + "[,]"}
"""Characters that are skipped before a call."""

OTHER_MARKS = (
    *("```json", "```xml", "```", "[", ",", "]", "}"),
    *(
        f"<{slash}{tag}>"
        for tag in ("tools", "tool", "function_call", "json", "JSON", "xml", "response")
        for slash in ("", "/")
    ),
)
"""Text that may surround a call that lacks the marks of its format. llama.cpp accepts the same
tags."""
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r"([\w.-]{1,64})\s*(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
_NAMED_SO_FAR = re.compile(r"[\w.-]{1,64}\s*(\[(A(R(G(S\]?)?)?)?)?)?\s*", re.ASCII)
_LONGEST_HEAD = 300
"""Maximum number of characters (including blanks) in a call before its arguments."""
_OUTSIDE = frozenset(" \t\r\n{}[],:0123456789+-.eEtrufalsn")
"""Characters that JSON may have outside strings."""


@dataclass(frozen=True)
class ToolDelta:
    """A part of the answer that new text adds. It is content, a thought, the beginning of a call
    (``id`` and ``name``), or a piece of a call's arguments."""

    content: str = ""
    index: int = 0
    id: str = ""
    name: str = ""
    arguments: str = ""
    thought: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the ``delta`` of a chunk of OpenAI's API."""
        if self.content:
            return {"content": self.content}
        if self.thought:
            return {"reasoning_content": self.thought}
        if not self.id:
            return {
                "tool_calls": [{"index": self.index, "function": {"arguments": self.arguments}}]
            }
        function = {"name": self.name, "arguments": self.arguments}
        begins = {"index": self.index, "id": self.id, "type": "function"}
        return {"tool_calls": [{**begins, "function": function}]}


def whole_calls(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    """Return the calls of an answer in the form of a message's ``tool_calls``."""
    calls: list[dict[str, Any]] = [
        {"id": d.id, "type": "function", "function": {"name": d.name, "arguments": ""}}
        for d in deltas
        if d.id
    ]
    for delta in deltas:
        if delta.arguments:
            calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


class _Object:
    """Finds the end of a JSON object whose text comes in pieces.

    Attributes:
        start: Index of the object's first bracket.
        at: Index up to which the text has been read.
        end: Index after the object's last bracket, or -1 until it is found.
        broken: Whether the text is not JSON.
    """

    def __init__(self, start: int) -> None:
        self.start, self.at, self.end, self.broken = start, start, -1, False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> None:
        """Continue reading in ``text``, which has grown."""
        while self.at < len(text) and self.end < 0 and not self.broken:
            letter = text[self.at]
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.end = self.at + 1
            elif letter not in _OUTSIDE:
                self.broken = True
                return
            self.at += 1


class _BareCalls:
    """Reads an answer that comes in pieces and may consist only of calls without marks.

    Args:
        names: Names of the functions.

    Attributes:
        text: The answer so far.
        calls: The calls so far. Each has a name, arguments, and the index of its end.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.text = ""
        self.calls = list[tuple[str, str, int]]()
        self._names = names
        self._at = 0
        self._object = _Object(0)
        self._heads = [
            f'{{"name":"{name}","{key}":{{' for name in names for key in ("arguments", "parameters")
        ]

    @property
    def whole(self) -> bool:
        """Whether the answer so far consists only of calls."""
        rest = self.text[self._at :].strip(BLANKS)
        return bool(self.calls) and (not rest or rest in OTHER_MARKS)

    def push(self, text: str) -> bool:
        """Add text. Return whether the answer may still consist only of calls."""
        self.text += text
        while rest := self.text[self._at :].lstrip(BLANKS):
            start = len(self.text) - len(rest)
            if rest.startswith("{{"):  # the template of Qwen2.5-Coder doubles the outer braces
                self._at = start + 1
            elif rest.startswith("{"):
                if not self._begins(rest):
                    return False
                if self._object.start != start:
                    self._object = _Object(start)
                self._object.read(self.text)
                self._at = self._object.end
                if self._at < 0:
                    self._at = start
                    return not self._object.broken
                if (call := _other_form(self.text[start : self._at], self._names)) is None:
                    return False
                self.calls.append((*call, self._at))
            elif any(mark.startswith(rest) for mark in OTHER_MARKS):
                break
            elif marks := [mark for mark in OTHER_MARKS if rest.startswith(mark)]:
                self._at = start + max(map(len, marks))
            else:
                return False
        return True

    def _begins(self, text: str) -> bool:
        """Return whether an object begins like a call. If its beginning is incomplete, return
        whether it may still become a call."""
        squeezed = "".join(text[:_LONGEST_HEAD].split())
        return any(head.startswith(squeezed[: len(head)]) for head in self._heads)


class ToolParser:
    """Parses an answer that comes in pieces.

    Args:
        format: The model's format of calls.
        names: Names of the functions.
        streaming: Whether to return a call as soon as its name is known and its arguments begin,
            and then the arguments piece by piece. Such arguments may be cut off later, or turn out
            not to be JSON. If False, only complete calls are returned as calls, and all other text
            is content.
        most: Maximum number of calls. Further calls remain content.
        forced: Whether the answer must be calls. If so, and the answer is cut off within the
            beginning of a call, that beginning is not returned as content.
        marks: Maps the ids of special tokens to their text. It is needed because the tokenizer
            decodes special tokens to nothing.

    Attributes:
        calls: Number of calls returned so far.
        marks: The argument ``marks``.
    """

    def __init__(
        self,
        format: ToolFormat,
        names: Collection[str],
        *,
        streaming: bool,
        most: int = 128,
        forced: bool = False,
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._format = format
        self._names = frozenset(names)
        self._streaming = streaming
        self._most = most
        self.marks = dict(marks)
        self._forced = forced
        self.calls = 0
        self._bare = _BareCalls(names) if format.begin and not forced else None
        """The parser of calls without marks. It is used as long as the answer may consist only of
        such calls."""
        self._text = ""
        """Text that has not been returned yet."""
        self._raw = ""
        """Text that was skipped before a call. It is content if no call follows."""
        self._state = self._content if format.begin else self._before
        self._object = _Object(0)
        self._arguments: _Object | None = None
        """The arguments of a call that was returned in part. They have been returned up to the
        index ``_told``."""
        self._told = 0

    def push(self, text: str) -> list[ToolDelta]:
        """Add text. Return the deltas that are now certain."""
        if self._bare is not None:
            if self._bare.push(text):
                return []
            text = self._bare.text
            self._bare = None
        self._text += text
        deltas: list[ToolDelta] = []
        while True:
            state = self._state
            size = len(self._text)
            deltas += state()
            if self._state == state and len(self._text) == size:
                return deltas

    def finish(self) -> list[ToolDelta]:
        """Return the remaining deltas at the end of the answer."""
        if (bare := self._bare) is not None:
            self._bare = None
            if bare.whole:
                return self._bare_calls(bare)
            return [*self.push(bare.text), *self.finish()]
        rest = self._raw + self._text
        self._raw = self._text = ""
        begun = self._forced and self._format.begin.startswith(rest.strip(BLANKS))
        told = begun or self._arguments is not None or self._state == self._after
        if told or not rest or (self.calls and not rest.strip(BETWEEN[self._format])):
            return []
        return [ToolDelta(rest)]

    def _bare_calls(self, bare: _BareCalls) -> list[ToolDelta]:
        deltas = list[ToolDelta]()
        calls = bare.calls[: self._most]
        for index, (name, arguments, _) in enumerate(calls):
            deltas.append(ToolDelta(index=index, id=self._format.call_id(), name=name))
            deltas.append(ToolDelta(index=index, arguments=arguments))
        self.calls = len(calls)
        if len(calls) < len(bare.calls):
            deltas.append(ToolDelta(bare.text[calls[-1][2] :]))
        return deltas

    def _content(self) -> Iterator[ToolDelta]:
        """Yield content. Text that may begin a call is held back, together with the blanks before
        it."""
        begin = self._format.begin
        at = self._text.find(begin) if begin and self.calls < self._most else -1
        sure = at if at >= 0 else len(self._text) - overlap(self._text, begin)
        content = self._text[:sure].rstrip(BLANKS)
        if at >= 0:
            after = at + len(begin)
            self._raw = self._text[len(content) : after]
            self._text = self._text[after:]
            self._state = self._before
        else:
            self._text = self._text[len(content) :]
        if content:
            yield ToolDelta(content)

    def _before(self) -> Iterator[ToolDelta]:
        """Skip the text before a call. Newer models of Mistral write their mark before each
        call."""
        rest = self._text.lstrip(BETWEEN[self._format])
        if self._format is MISTRAL:
            marked = self._text.lstrip(BLANKS + ",]")
            if marked and self._format.begin.startswith(marked):
                return
            if marked.startswith(self._format.begin):
                rest = marked.removeprefix(self._format.begin)
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest
        named = self._format is MISTRAL and _NAMED.match(rest)
        if rest.startswith("{") or named:
            self._object = _Object(named.end() if named else 0)
            self._state = self._call
        elif rest and not (self._format is MISTRAL and _NAMED_SO_FAR.fullmatch(rest)):
            yield from self._no_call(0)

    def _call(self) -> Iterator[ToolDelta]:
        """Yield a call."""
        self._object.read(self._text)
        whole = self._object.end >= 0
        if self._object.broken and self._arguments is None:
            yield from self._no_call(self._object.at)
            return
        if self._arguments is None and (head := self._head(whole)):
            name, start = head
            self._arguments = _Object(start)
            self._told = start
            yield ToolDelta(index=self.calls, id=self._format.call_id(), name=name)
        if self._arguments is not None:
            self._arguments.read(self._text)
            if more := self._text[self._told : self._arguments.at]:
                yield ToolDelta(index=self.calls, arguments=more)
            self._told = self._arguments.at
        elif whole and (call := _other_form(self._text[: self._object.end], self._names)):
            yield ToolDelta(index=self.calls, id=self._format.call_id(), name=call[0])
            yield ToolDelta(index=self.calls, arguments=call[1])
        elif whole:
            yield from self._no_call(self._object.end)
            return
        if whole or self._object.broken:
            self._end_call(self._object.end if whole else self._object.at)

    def _head(self, whole: bool) -> tuple[str, int] | None:
        """Return the name of the function and the index at which its arguments begin. Return None
        if the function is unknown, or if the call is not JSON and the answer is not streamed."""
        if not (whole or self._streaming):
            return None
        match = _HEAD.match(self._text) or (self._format is MISTRAL and _NAMED.match(self._text))
        if not match:
            return None
        name = match[1]
        if name.startswith('"'):
            name = parsed(name)
        start = match.end() if match.re is _NAMED else 0
        good = self._streaming or isinstance(parsed(self._text[start : self._object.end]), dict)
        return (name, match.end()) if good and name in self._names else None

    def _end_call(self, end: int) -> None:
        self._text = self._text[end:]
        self._raw = ""
        self._arguments = None
        self.calls += 1
        if self._format.end or (self._format is MISTRAL and self.calls >= self._most):
            self._state = self._after
        elif self.calls < self._most:
            self._state = self._before
        else:
            self._state = self._content

    def _after(self) -> Iterator[ToolDelta]:
        """Skip the end mark of a call, or the end of Mistral's list of calls."""
        rest = self._text.lstrip(BLANKS)
        end = self._format.end or "]"
        if rest.startswith(end):
            self._text = rest[len(end) :]
            self._state = self._content
        elif not end.startswith(rest):
            self._state = self._content
        return iter(())

    def _no_call(self, end: int) -> Iterator[ToolDelta]:
        """Yield the skipped text, and the text up to ``end``, as content."""
        content = self._raw + self._text[:end]
        self._text = self._text[end:]
        self._raw = ""
        self._state = self._content
        if content:
            yield ToolDelta(content)


def parsed(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _other_form(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return the name and the arguments of a call whose entries may be in another order, and which
    may have further entries. Return None if the text is not a call."""
    call = parsed(text)
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or call["name"] not in names
    ):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)
