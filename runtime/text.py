"""Text in, text out: tokenizer, chat template, and streaming that never shows half a character or part of a stop string."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from eesd.common.errors import EESDError

Message = Mapping[str, Any]
HALF = "\ufffd"
"""Incomplete bytes of a character decode to this."""


class TextCodec:
    """The tokenizer and chat template of an engine directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.exists():
            raise EESDError(f"{directory} has no tokenizer.json; give token ids, or export from a model that has one.")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise EESDError(f"{path} cannot be read ({error}); export the model again.") from None
        config = directory / "tokenizer_config.json"
        try:
            self._config: dict[str, Any] = json.loads(config.read_text("utf-8")) if config.exists() else {}
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise EESDError(f"{config} is not valid JSON; export the model again.") from None
        template = directory / "chat_template.jinja"
        self.chat_template: str | None = (
            template.read_text("utf-8") if template.exists() else _default_template(self._config.get("chat_template"))
        )

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text (with the tokenizer's own special tokens) or of chat messages (with the template's)."""
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=isinstance(prompt, str)).ids)
        except TypeError:  # the tokenizer raises this for lone surrogates, which stand for bytes that were not UTF-8
            raise EESDError("The prompt is not valid Unicode text; give it as UTF-8.") from None

    def render(self, messages: Sequence[Message]) -> str:
        """Chat messages as text, by the model's chat template."""
        if self.chat_template is None:
            raise EESDError("This model has no chat template; give a plain prompt.")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        special = {name: _content(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=list(messages), add_generation_prompt=True, **special)
        except Exception as error:  # a template is a program: it may fail in any way
            raise EESDError(f"The chat template refuses these messages: {error}.") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _default_template(template: Any) -> str | None:
    """The template in a tokenizer's configuration, which has one, or several by name."""
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return None if template is None else str(template)


def _content(token: Any) -> str:
    """A special token, which is stored as text or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _CharacterStream:
    """Turns tokens into whole characters. It decodes the last tokens together: a token's text depends on the ones before it.

    Unlike the ``DecodeStream`` of tokenizers it shows the text before half a character, does not repeat a prompt that ends in
    half a character, and does not raise for bytes that are not text.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int]) -> None:
        self._decode = codec.decode
        self._window, self._context = list(prompt), len(prompt)
        self._shown = codec.decode(prompt).rstrip(HALF)

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(HALF)
        fresh = whole[len(self._shown) :]
        if fresh and whole == text:  # everything is shown: from here on the newest tokens are enough context
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = self._decode(self._window)
        elif fresh:
            self._shown = whole
        return fresh


class TextStream:
    """Turns tokens into text as they come.

    ``push`` returns the text that is certain: whole characters that cannot be the beginning of a stop string. When a stop
    string is complete, ``stopped`` is set, and the text ends before it.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str]) -> None:
        if any(not text for text in stop):
            raise EESDError("A stop string is empty; give at least one character.")
        self._characters = _CharacterStream(codec, prompt)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token (often "")."""
        if self.stopped:
            return ""
        text = self._held + self._characters.push(token)
        found = min((at for at in (text.find(stop) for stop in self._stop) if at >= 0), default=-1)
        if found >= 0:
            self.stopped, self._held = True, ""
            return text[:found]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
