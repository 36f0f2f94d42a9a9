"""Text in, text out: tokenizer, chat template, and streaming that never shows half a character or part of a stop string."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eesd.common.errors import EESDError
from eesd.common.json_input import read_json_object, read_text
from eesd.model.tokenizer_files import SPECIAL_TOKENS
from eesd.runtime.chat_template import ChatTemplate, Message

HALF = "\ufffd"
"""Incomplete bytes of a character decode to this."""
_REMEDY = "export the model again"


class TextCodec:
    """The tokenizer and chat template of an engine directory.

    Attributes:
        tokenizer: The tokenizer.
        chat_template: The chat template, or None if the model has none.

    Raises:
        EESDError: There is no tokenizer, or a file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.exists():
            raise EESDError(f"{directory} has no tokenizer.json; give token ids, or export from a model that has one.")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise EESDError(f"{path} cannot be read ({error}); {_REMEDY}.") from None
        path, file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config = read_json_object(path, _REMEDY) if path.exists() else {}
        self.tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        source = read_text(file, _REMEDY) if file.exists() else _default_template(path, config.get("chat_template"))
        tokens = {name: _content(path, name, config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None}
        self.chat_template = None if source is None else ChatTemplate(source, tokens)

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text (with the tokenizer's own special tokens) or of chat messages (with the template's)."""
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=isinstance(prompt, str)).ids)
        except TypeError:  # the tokenizer raises this for lone surrogates, which stand for bytes that were not UTF-8
            raise EESDError("The prompt is not valid Unicode text; give it as UTF-8.") from None
        except Exception as error:  # and plain Exceptions for text that its vocabulary cannot express
            raise EESDError(f"The tokenizer cannot encode the prompt ({error}); give token ids.") from None

    def render(self, messages: Sequence[Message]) -> str:
        """Chat messages as text, by the model's chat template."""
        if self.chat_template is None:
            raise EESDError("This model has no chat template; give a plain prompt.")
        return self.chat_template.render(messages)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _default_template(path: Path, template: Any) -> str | None:
    """The template in a tokenizer's configuration, which has one, or several by name."""
    if isinstance(template, list):
        named: dict[str, Any] = {}
        for entry in template:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise EESDError(f"{path} has a chat template without name or template; {_REMEDY}.")
            named[entry["name"]] = entry["template"]
        template = named
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise EESDError(f"{path} has a chat_template that is not text; {_REMEDY}.")
    return template


def _content(path: Path, name: str, token: Any) -> str:
    """A special token, which is stored as text or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise EESDError(f"{path} has a {name} that is not text; {_REMEDY}.")
    return content


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
