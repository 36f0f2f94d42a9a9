"""Convert text to tokens and tokens to text. This module has the tokenizer, the chat template, and
a stream that never shows half a character or part of a stop string."""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Encoding, Tokenizer

from eesd.common.byte_level import BYTES
from eesd.common.checks import shown
from eesd.common.errors import EESDError, refused
from eesd.common.json_input import read_json_object, read_text
from eesd.common.manifest import SPECIAL_TOKENS
from eesd.runtime.chat_template import ChatTemplate, Message, Tool
from eesd.runtime.plain_content import PlainContent

HALF = "\ufffd"
"""The text to which invalid bytes are decoded."""
_REMEDY = "export the model again"


class TextCodec:
    """The tokenizer and chat template of an engine directory.

    Args:
        directory: Engine directory.
        most_tokens: Maximum number of tokens of a text, or None for no limit. A text that has too
            many characters for this number is refused before it is tokenized.
        plain_content: Whether special tokens can come only from the template, and not from messages
            or tools.

    Attributes:
        tokenizer: The tokenizer.
        chat_template: The chat template, or None if the model has none.
        tool_template: The chat template for messages with tools. It is the template called
            ``tool_use``, or ``chat_template`` if there is no such template.
        plain: Reads messages in such a way that they cannot write special tokens. It is None if
            messages may write special tokens.

    Raises:
        EESDError: There is no tokenizer, a file is damaged, or the template does not allow
            ``plain_content``.
    """

    def __init__(
        self, directory: Path, most_tokens: int | None = None, plain_content: bool = False
    ) -> None:
        path = directory / "tokenizer.json"
        if not path.exists():
            raise EESDError(
                f"{directory} has no tokenizer.json; give token ids, or export from a model "
                "that has one."
            )
        with refused(lambda error: f"{path} cannot be read ({error}); {_REMEDY}."):
            self.tokenizer = Tokenizer.from_file(str(path))
        _check_post_processor(path, self.tokenizer)
        self._most = most_tokens
        self._vocabulary = self.tokenizer.get_vocab
        path = directory / "tokenizer_config.json"
        file = directory / "chat_template.jinja"
        config = read_json_object(path, _REMEDY) if path.exists() else {}
        self.tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        named = (
            {"default": read_text(file, _REMEDY)}
            if file.exists()
            else _templates(path, config.get("chat_template"))
        )
        tokens = {
            name: _content(path, name, config[name])
            for name in SPECIAL_TOKENS
            if config.get(name) is not None
        }
        templates = {name: ChatTemplate(source, tokens) for name, source in named.items()}
        self.chat_template = templates.get("default")
        self.tool_template = templates.get("tool_use", self.chat_template)
        self.plain: PlainContent | None = None
        if plain_content and self.chat_template:
            self.plain = PlainContent(self.tokenizer, self._read)
            for template in templates.values():
                self.plain.check(template)

    def encode(
        self,
        prompt: str | Sequence[Message],
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        answer: bool = True,
    ) -> list[int]:
        """Token ids of a text (with the tokenizer's special tokens) or of chat messages (with the
        template's special tokens)."""
        if isinstance(prompt, str):
            return self.ids(prompt, special=True)
        render = partial(self.render, answer=answer, variables=variables)
        if self.plain is not None:
            return self.plain.read(render, prompt, tools)
        return self.ids(render(prompt, tools), special=False)

    def ids(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with or without the tokenizer's own special tokens."""
        return list(self._read(text, special=special).ids)

    def _read(
        self, text: str, tokenizer: Tokenizer | None = None, special: bool = False
    ) -> Encoding:
        """Encode a text with ``tokenizer``, or with the model's tokenizer if that is None."""
        if (
            self._most is not None
            and len(text) > self._most
            and (least := len(text) // self._longest) > self._most
        ):
            raise EESDError(
                f"The text has at least {least} tokens, but the model accepts {self._most}; "
                "give a shorter text."
            )
        # A TypeError means that the text has lone surrogates, by which Python represents bytes that
        # are not UTF-8.
        no_text = "The prompt is not valid Unicode text; give it as UTF-8."
        no_tokens = "The tokenizer cannot encode the prompt ({}); give token ids."
        with refused(
            lambda error: no_text if isinstance(error, TypeError) else no_tokens.format(error)
        ):
            return (tokenizer or self.tokenizer).encode(text, add_special_tokens=special)

    @cached_property
    def _longest(self) -> int:
        """Number of characters of the longest token. This number is computed only for long texts,
        because listing a vocabulary takes a long time."""
        return max(map(len, self._vocabulary()), default=1)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        answer: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render chat messages as text; see
        :meth:`~eesd.runtime.chat_template.ChatTemplate.render`."""
        template = self.chat_template if tools is None else self.tool_template
        if template is None:
            raise EESDError("This model has no chat template; give a plain prompt.")
        return template.render(messages, tools, answer, variables)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _check_post_processor(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse a post-processor whose template names a special token without ids. With such a
    post-processor the library would panic when it encodes a text."""
    processor = (
        json.loads(tokenizer.post_processor.__getstate__()) if tokenizer.post_processor else {}
    )
    for step in (processor, *processor.get("processors", ())):
        if step.get("type") == "TemplateProcessing":
            named = [
                piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece
            ]
            unlisted = [name for name in named if name not in step["special_tokens"]]
            if unlisted:
                raise EESDError(
                    f"{path} adds the token {shown(unlisted[0])} to texts, but does not list "
                    f"it; {_REMEDY}."
                )


def _templates(path: Path, template: Any) -> dict[str, str]:
    """Return those templates of a tokenizer's configuration that are used, by name. A single
    template is called ``default``."""
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError):
            raise EESDError(
                f"{path} has a chat template without name or template; {_REMEDY}."
            ) from None
    found = template if isinstance(template, dict) else {"default": template}
    used = {name: found[name] for name in ("default", "tool_use") if found.get(name) is not None}
    if not all(isinstance(source, str) for source in used.values()):
        raise EESDError(f"{path} has a chat_template that is not text; {_REMEDY}.")
    return used


def _content(path: Path, name: str, token: Any) -> str:
    """Return the text of a special token, which is stored as a text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        raise EESDError(f"{path} has a {name} that is not text; {_REMEDY}.")
    return token


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_EACH_BYTE = "eesd-each-byte"
"""Name of the error handler that writes U+FFFD for each broken byte, as SentencePiece and
tokenizers do for byte tokens."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return HALF * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenBytes:
    """The bytes of text that each token represents. A token may end anywhere inside a character.

    Attributes:
        special: Names of the tokens that are not text, by id.
        has_byte_tokens: Whether some tokens are single bytes.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._tokenizer = codec.tokenizer
        self._decode = codec.decode
        self.special = {
            token: added.content
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        decoder = self._tokenizer.decoder
        self._byte_level = decoder is not None and decoder.decode(["\u0120"]) == " "
        self.has_byte_tokens = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    def name(self, token: int) -> str | None:
        """Return the token as it is written in the vocabulary, or None if the token is not text."""
        return None if token in self.special else self._tokenizer.id_to_token(token)

    def added(self, token: int, before: int | None) -> bytes:
        """Return the bytes that a token adds to the text. ``before`` is the previous token that is
        text. The result is empty if the token itself is not text."""
        name = self.name(token)
        if not name:
            return b""
        if self._byte_level:
            # Added tokens may contain other characters. Their text is their name.
            known = BYTES.keys() >= set(name)
            return bytes(BYTES[character] for character in name) if known else name.encode()
        if self.has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(byte[1])
        # One token of context is enough, because decoders only join words and drop a space at the
        # beginning of the text.
        context = [] if before is None else [before]
        return self._decode([*context, token])[len(self._decode(context)) :].encode()


class TextStream:
    """Turns tokens into text as they are generated. A ``copy`` of the object continues
    independently.

    ``push`` returns the text that is certain. It consists of whole characters that cannot be the
    beginning of a stop string. When a stop string is complete, it is stored in ``stop``, and the
    text ends before it. A stop string that is complete within the first ``min_tokens`` tokens is
    treated as text. Special tokens are not text. A special token in ``stop_tokens`` has the name of
    a stop string, and completes that stop string.

    A token may end anywhere inside a character, and so may a prompt. The decoders of tokenizers
    cannot wait for the rest of a character. They write U+FFFD instead. ``ByteFallback`` writes
    U+FFFD for a whole run of bytes if one byte is broken, even for characters that were shown long
    ago. So this class joins the bytes. If the text is valid, it is the same as the decoder's text.
    A byte becomes U+FFFD, as in SentencePiece, only when it is certain that it belongs to no
    character.

    A text may be split into prompt and new tokens at any token. The result is always the text that
    the new tokens add to the prompt's text. A character that begins in the prompt is returned with
    the token that completes it. A character that is never completed is not shown.
    """

    def __init__(
        self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._bytes = TokenBytes(codec)
        self._rest = b""
        self._before: int | None = None
        self._stop = tuple(stop)
        self._unstopped = min_tokens
        self.stop_tokens = {
            token: name for token, name in self._bytes.special.items() if name in self._stop
        }
        self._held = ""
        self.stop: str | None = None
        # At most three bytes wait for the rest of their character, and each token has at least one
        # byte.
        tail = list(islice((token for token in reversed(prompt) if self._bytes.name(token)), 3))
        for token in reversed(tail):
            self._characters(token)

    def push(self, token: int) -> str:
        """The text that became certain with this token (often "")."""
        if self.stop:
            return ""
        self.stop = self.stop_tokens.get(token)
        text = self._held + self._characters(token)
        self._unstopped -= 1
        found = min(
            ((at, stop) for stop in self._stop if (at := text.find(stop)) >= 0), default=None
        )
        if found is not None and self._unstopped < 0:
            (at, self.stop) = found
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back because it could have begun a stop string."""
        held = self._held
        self._held = ""
        return held

    def _characters(self, token: int) -> str:
        """The characters that this token completes."""
        if not self._bytes.name(token):
            return ""
        data = self._rest + self._bytes.added(token, self._before)
        self._before = token
        text, used = codecs.utf_8_decode(
            data, _EACH_BYTE if self._bytes.has_byte_tokens else "replace", False
        )
        self._rest = data[used:]
        return text


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``mark``. ``mark`` is not in
    ``text``."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
