"""The harmony format of gpt-oss. An answer is a list of messages. Each message has a channel, and a
call names its function:

    <|channel|>analysis<|message|>...<|end|>                      what the model thinks
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>    the answer
"""

import re
from collections.abc import Collection, Iterator

from eesd.runtime.text import TextCodec, overlap
from eesd.serve.grammar.tool_calls import HARMONY, ToolDelta, parsed

CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""The marks that end a message. The last of them also begins the next message."""
MARKS = (CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


def writes_harmony(codec: TextCodec) -> bool:
    """Return whether a model's chat template has these marks."""
    template = codec.chat_template
    return template is not None and all(mark in template.source for mark in (CHANNEL, MESSAGE))


class HarmonyParser:
    """Parses an answer that comes in pieces.

    Args:
        names: Names of the functions. A message that calls any other function counts as content.
        streaming: Whether arguments are returned as they come. If False, a call whose arguments are
            not a JSON object is returned as content.

    Attributes:
        calls: The number of calls so far.
    """

    def __init__(self, names: Collection[str], streaming: bool) -> None:
        self.calls = 0
        self._names = frozenset(names)
        self._streaming = streaming
        self._held = ""
        self._kind = "header"
        self._name = ""
        self._arguments = ""
        self._begun = False

    def push(self, text: str, last: bool) -> list[ToolDelta]:
        """Add text. Return the deltas that are now certain. If this is the ``last`` piece, return
        all remaining deltas."""
        self._held += text
        deltas: list[ToolDelta] = []
        while self._held:
            size = len(self._held)
            read = self._header if self._kind == "header" else self._body
            deltas += read(last)
            if len(self._held) == size:
                break
        if last and self._kind == "call":
            deltas += self._end_call()
        if last and self._held and not self._begun:  # an answer without marks
            deltas.append(ToolDelta(self._held))
        return deltas

    def _header(self, last: bool) -> Iterator[ToolDelta]:
        """Read the header of a message if the header is complete."""
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            return
        self._held = rest
        self._begun = True
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        self._kind = "content"
        if channel and channel[1] == "analysis":
            self._kind = "thought"
        if recipient and recipient[1] in self._names:
            self._kind = "call"
            self._name = recipient[1]
            self._arguments = ""
            if self._streaming:
                yield ToolDelta(index=self.calls, id=HARMONY.call_id(), name=self._name)

    def _body(self, last: bool) -> Iterator[ToolDelta]:
        """Yield the text of a message up to its end mark. Text that may become an end mark is held
        back."""
        found = [(at, mark) for mark in ENDS if (at := self._held.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._held), ""))
        if not found and not last:
            at -= max(overlap(self._held, end) for end in ENDS)
        text = self._held[:at]
        self._held = self._held[at + len(mark) :]
        if self._kind == "call":
            self._arguments += text
            if text and self._streaming:
                yield ToolDelta(index=self.calls, arguments=text)
        elif text and self._kind == "thought":
            yield ToolDelta(thought=text)
        elif text:
            yield ToolDelta(text)
        if mark:
            if self._kind == "call":
                yield from self._end_call()
            self._kind = "header"

    def _end_call(self) -> Iterator[ToolDelta]:
        """Count a call. If the call was not streamed, yield it."""
        self._kind = "header"
        if not self._streaming and not isinstance(parsed(self._arguments), dict):
            yield ToolDelta(self._arguments)
            return
        if not self._streaming:
            yield ToolDelta(index=self.calls, id=HARMONY.call_id(), name=self._name)
            yield ToolDelta(index=self.calls, arguments=self._arguments)
        self.calls += 1
