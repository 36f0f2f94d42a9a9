"""Read chat messages in such a way that their text cannot write special tokens. For example,
``<|im_end|>`` in a message becomes letters and does not end a turn.

A template may trim, split or inspect the content, so it must see the content nearly unchanged. A
mark is inserted into each special token that a message spells, so that the tokenizer does not
recognize it. So all special tokens that the tokenizer finds in the rendered text come from the
template. A second tokenizer, whose normalizer drops the marks, reads the text for the model.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer, normalizers

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.json_input import MAX_DEPTH
from eesd.runtime.chat_template import ChatTemplate, Message, Tool

MARK = "\ufdd0"
"""A Unicode noncharacter, which a program is free to use internally."""
_TURNS = {"system": "eesd-turn-0", "user": "eesd-turn-1", "assistant": "eesd-turn-2"}
_LAST = "eesd-turn-3"
_NEVER = -1e6
"""This log-probability is so low that the piece is never chosen."""
_REMEDY = "leave plain_content out"
_MADE = "The chat template makes a special token of the text of these messages; send another text."


class PlainContent:
    """Reads chat messages in such a way that their texts cannot write special tokens.

    Args:
        tokenizer: The model's tokenizer.
        encode: Encodes a text with a tokenizer, without adding special tokens.

    Raises:
        EESDError: The tokenizer has no special tokens, or they cannot be distinguished from text.
    """

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str, Tokenizer], Encoding]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token: item.content for token, item in added.items() if item.special}
        names = sorted(self._special.values(), key=len, reverse=True)
        if not names:
            raise EESDError(
                f"The tokenizer has no special tokens to keep apart from text; {_REMEDY}."
            )
        for name in names:
            if len(name) < 2 or name[0].isalnum() or name[0].isspace():
                raise EESDError(
                    f"The special token {shown(name)} cannot be kept apart from text; {_REMEDY}."
                )
        self._first = re.compile("|".join({re.escape(name[0]) for name in names}))
        self._spelled = re.compile("|".join(map(re.escape, names)))
        self._encode = encode
        self._seen = tokenizer
        self._without_marks, self._unknown = _without_marks(tokenizer)

    def check(self, template: ChatTemplate) -> None:
        """Raise :class:`EESDError` unless the template ends each turn with a special token. If a
        turn ended with ordinary text, any message could end a turn."""
        turns = [{"role": role, "content": text} for role, text in _TURNS.items()] + [
            {"role": "user", "content": _LAST}
        ]
        try:
            text = template.render(turns)
        except EESDError:  # not every template accepts system messages
            text = template.render(turns[1:])
        starts = sorted(at for turn in turns if (at := text.find(turn["content"])) >= 0)
        special = [start for start, _ in self._tokens(text)]
        for at, following in zip(starts, [*starts[1:], len(text)], strict=False):
            if not text.startswith(_TURNS["system"], at) and not any(
                at < start < following for start in special
            ):
                raise EESDError(
                    "The chat template ends a turn with text that a message can also contain; "
                    f"{_REMEDY}."
                )

    def read(
        self,
        render: Callable[[Sequence[Message], Sequence[Tool] | None], str],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> list[int]:
        """Return the token ids of chat messages and tools. They equal the ids of the rendered text
        if no text spells a special token.

        Raises:
            EESDError: ``render`` raised this error, or the template made a special token from texts
                that contain none.
        """
        given = (messages, tools)
        text = render(*_each_text(given, lambda text: self._spelled.sub(_broken, text)))
        found = self._tokens(text)
        # No special token can begin in these texts, whatever the template does to them. The
        # template then sees changed texts, so the result serves only as a reference.
        safe = _each_text(given, lambda text: self._first.sub(_broken, text))
        reference = text if safe == _each_text(given, str) else render(*safe)
        written = [text[start:end] for start, end in found]
        if written != [reference[start:end] for start, end in self._tokens(reference)]:
            raise EESDError(_MADE)
        if json.dumps(MARK)[1:-1] in text.lower():
            raise EESDError(f"The chat template changes the texts of messages; {_REMEDY}.")
        encoded = self._encode(text, self._without_marks if MARK in text else self._seen)
        names = [self._special[token] for token in encoded.ids if token in self._special]
        if [name for name in names if name != self._unknown] != [
            name for name in written if name != self._unknown
        ]:
            raise EESDError(_MADE)  # the tokenizer makes a special token of letters
        return list(encoded.ids)

    def _tokens(self, text: str) -> list[tuple[int, int]]:
        """Return the beginning and the end of each special token in a text."""
        found = []
        encoding = self._encode(text, self._seen)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            name = self._special.get(token)
            # If the name is not found, the token stands for an unknown letter.
            if name is not None and (at := text.find(name, start, end)) >= 0:
                found.append((at, at + len(name)))
        return found


def _broken(match: re.Match[str]) -> str:
    return f"{match[0][0]}{MARK}{match[0][1:]}"


def _without_marks(tokenizer: Tokenizer) -> tuple[Tokenizer, str | None]:
    """Return a tokenizer that looks for special tokens first and then drops the marks. It does not
    make a special token of the letters that remain. Also return the token for unknown letters."""
    document = json.loads(tokenizer.to_str())
    special = [added for added in document["added_tokens"] if added["special"]]
    for added in special:
        added["normalized"] = False
    model = document["model"]
    names = {added["content"] for added in special}
    dropped = normalizers.Replace(MARK, "")
    unknown = model.get("unk_token")
    if model["type"] == "Unigram":
        unknown = None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
        model["vocab"] = [
            [name, _NEVER if name in names else score] for name, score in model["vocab"]
        ]
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if "".join(pair) not in names]
    made = Tokenizer.from_str(json.dumps(document))
    made.normalizer = (
        normalizers.Sequence([dropped, made.normalizer]) if made.normalizer else dropped
    )
    return made, unknown


def _each_text(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return a copy in which the texts are changed. Values that are not plain data stay as they
    are, and are refused later."""
    if isinstance(value, str):
        if MARK in value:
            raise EESDError(
                f"A message contains U+{ord(MARK):04X}, which is not a character; leave it out."
            )
        return change(str.__str__(value))
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {
            _each_text(key, change, depth + 1): _each_text(item, change, depth + 1)
            for key, item in value.items()
        }
    return (
        [_each_text(item, change, depth + 1) for item in value]
        if isinstance(value, list | tuple)
        else value
    )
