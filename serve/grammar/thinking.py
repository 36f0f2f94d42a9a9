"""Separate a model's thoughts from its answer. Thoughts are a ``<think>...</think>`` block at the
start, as Qwen3, DeepSeek and SmolLM3 write it."""

from eesd.runtime.text import TextCodec, overlap

BEGIN = "<think>"
END = "</think>"
BLANKS = " \t\r\n"


def may_think(codec: TextCodec) -> bool:
    """Return whether a model's chat template contains these marks."""
    template = codec.chat_template
    return template is not None and END in template.source


class ThinkParser:
    """Splits an answer that comes in pieces into thoughts and answer text. Blanks around the marks
    are dropped.

    Args:
        begun: Whether the prompt ends with ``<think>``, so that the answer begins inside thoughts.
    """

    def __init__(self, begun: bool) -> None:
        self._held = BEGIN * begun
        self._state = "before"

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside thoughts."""
        return self._state in ("start", "thinking")

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Add text. Return the thoughts and the answer text that are now certain. If this is the
        ``last`` piece, return all remaining text."""
        self._held += text
        thought = ""
        if self._state == "before":
            begins = self._held.lstrip(BLANKS)
            if begins.startswith(BEGIN):
                self._held = begins.removeprefix(BEGIN)
                self._state = "start"
            elif last or not BEGIN.startswith(begins):
                self._state = "answer"
        if self._state == "start" and (rest := self._held.lstrip(BLANKS)):
            self._held = rest
            self._state = "thinking"
        if self._state == "thinking":
            thought, mark, rest = self._held.partition(END)
            self._held = rest
            if mark:
                thought = thought.rstrip(BLANKS)
                self._state = "end"
            elif not last:  # leave out a possible mark and the blanks before it
                sure = thought[: len(thought) - overlap(thought, END)].rstrip(BLANKS)
                self._held = thought[len(sure) :]
                thought = sure
        if self._state == "end" and (rest := self._held.lstrip(BLANKS)):
            self._held = rest
            self._state = "answer"
        if self._state != "answer":
            return thought, ""
        answer = self._held
        self._held = ""
        return thought, answer
