"""Find the tokens of a GGUF file that are not text, and the tokens that end a text.

A file gives the ids of only a few such tokens. llama.cpp (``src/llama-vocab.cpp``) finds the rest
by name, and treats every token with such a name as a control token. This module goes by the type in
the file. A token of a text type stays text, such as HTML's ``</s>`` in the vocabularies of Qwen and
Gemma.
"""

from collections.abc import Sequence
from typing import Any

from eesd.model.fields import Fields

UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
"""Values of ``tokenizer.ggml.token_type``."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|eom_id|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>"),
    *("<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
    *("</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
}
_CODE_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
"""Tokens that a code model writes after filling in the middle. The names are used if the file lacks
the key."""
_MORE_ENDS = {"\u2581<EOT>", "<|end_of_turn|>", "<|eot|>"}
"""Names in CodeLlama, OpenChat and Llama 4. llama.cpp uses them only if the file has the id."""
_MARKS = {
    *(f"<|{part}|>" for part in ("fim_prefix", "fim_suffix", "fim_middle")),
    *(f"<{part}>" for part in ("fim-prefix", "fim-suffix", "fim-middle")),
    *(f"<{part}>" for part in ("fim_prefix", "fim_suffix", "fim_middle", "PRE", "SUF", "MID")),
    *(f"\u2581<{part}>" for part in ("PRE", "SUF", "MID")),
    *(f"<|{part}|>" for part in ("code_prefix", "code_suffix", "code_middle")),
    *(f"<|{part}|>" for part in ("prefix", "suffix", "middle")),
    *(f"<\uff5cfim\u2581{part}\uff5c>" for part in ("begin", "hole", "end")),
}
_TEMPLATES = "tokenizer.chat_template"
"""Prefix of the keys of chat templates."""
CONTROL_NAMES = _TURN_ENDS.union(_MARKS, *_CODE_ENDS.values())
"""llama.cpp finds these tokens in a text before it is cut, whatever their type in the file."""


def values(fields: Fields, name: str, *kinds: type) -> list[Any]:
    """Return a list in ``tokenizer.ggml``. Its values must have one of these types. Raises
    ValueError."""
    found = fields.take(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or any(type(value) not in kinds for value in found):
        raise ValueError(
            f"tokenizer.ggml.{name} is not a list of {' or '.join(kind.__name__ for kind in kinds)}"
        )
    return found


def token_types(fields: Fields, tokens: Sequence[str]) -> list[int]:
    """Return the type of each token. If the file has no types, all are 1 (normal). Raises
    ValueError."""
    if "tokenizer.ggml.token_type" not in fields.raw:
        return [1] * len(tokens)
    types = values(fields, "token_type", int)
    if len(types) < len(tokens):
        raise ValueError(f"it has {len(types)} types for {len(tokens)} tokens")
    return types


def end_tokens(fields: Fields) -> list[int]:
    """Return the tokens that end a text. Tokens whose ids are in the file come first, then tokens
    that are found by name.

    A token that is found by name ends a text if its type is control, or if the chat template
    contains it, because in some files the tokens at the ends of turns have the type user-defined.

    Raises:
        ValueError: The metadata are damaged.
    """
    ends = _given(fields, _END_KEYS)
    if "tokenizer.ggml.tokens" not in fields.raw:
        return ends
    tokens = values(fields, "tokens", str)
    names = _TURN_ENDS | _MORE_ENDS
    for key, named in _CODE_ENDS.items():
        found = _given(fields, (key,))
        ends += found
        names |= set(() if found else named)
    templates = "\n".join(str(fields.raw[key]) for key in fields.raw if key.startswith(_TEMPLATES))
    types = token_types(fields, tokens)
    ends += [
        index
        for index, token in enumerate(tokens)
        if token in names and (types[index] == CONTROL or token in templates)
    ]
    by_name = {tokens[index]: index for index in ends if index < len(tokens)}
    inner = _inner(by_name)
    return [index for index in dict.fromkeys(ends) if index not in inner]


def _given(fields: Fields, keys: Sequence[str]) -> list[int]:
    ids = (fields.integer(f"tokenizer.ggml.{key}", None, optional=True, least=0) for key in keys)
    return [index for index in ids if index is not None]


def _inner(ends: dict[str, int]) -> set[int]:
    """Return the tokens that do not end a turn if some other end tokens exist. ``<|end|>`` ends
    only a message of gpt-oss and Solar Open, and ``</s>`` is text for Gemma 4."""
    inner = set[str]()
    if ends.keys() & {"<|call|>", "<|calls|>"} and ends.keys() & {"<|return|>", "<|flush|>"}:
        inner.add("<|end|>")
    if "<|tool_response>" in ends:
        inner.add("</s>")
    return {ends[name] for name in inner if name in ends}
